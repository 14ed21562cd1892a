"""``counterpoise replay``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def replay(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    batch: Annotated[int, typer.Option(min=0, help="A batch with a checkpoint (keep_every).")],
    method: Annotated[
        list[str],
        typer.Option(help="A method, or '{name: dapo, credit: [top_entropy]}' (repeatable)."),
    ],
    apply: Annotated[
        bool, typer.Option("--apply", help="Try the update of each, all from one snapshot.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """One saved batch under several methods: credits side by side, rank correlations, and the
    update of each.

    Example: `counterpoise replay runs/demo --batch 20 --method dapo --method delta --method dfpo_min
        --apply`
    """
    from counterpoise.cli.probe import lines_of
    from counterpoise.probes.replay import replay as replayed

    summary = replayed(run, batch, method, apply=apply)
    if json_:
        print(json.dumps(summary, indent=1))
        return
    print(f"batch {batch} of {run} under {len(method)} methods")
    for line in lines_of(summary["numbers"]):
        print(line)
    print(f"raw data, one row a token, and figure: {summary['folder']}")
