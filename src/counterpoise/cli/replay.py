"""``counterpoise replay``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoise.cli.show import Json, Trust, import_from, print_json, say, waiting
from counterpoise.run.find import check_run
from counterpoise.run.read import check_batch

NOTE = (
    "A rank correlation near 1 says that two methods order the tokens alike, not that they weigh"
    " them alike.",
    "Whether they train alike is the cosine of their updates: counterpoise probe RUN --probe"
    " gradient (with_control).",
)


def replay(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    batch: Annotated[
        int,
        typer.Option(
            min=0,
            help="A batch with saved rollouts. Methods that read more than those, and --apply, need"
            " its checkpoint too (keep_every).",
        ),
    ],
    method: Annotated[
        list[str],
        typer.Option(help="A method, or '{name: dapo, credit: [top_entropy]}' (repeatable)."),
    ],
    apply: Annotated[
        bool, typer.Option("--apply", help="Try the update of each, all from one snapshot.")
    ] = False,
    trust: Trust = False,
    json_: Json = False,
) -> None:
    """Put one saved batch through several methods.

    Their credits side by side, rank correlations, and with --apply the update of each.

    Example: `counterpoise replay runs/demo --batch 20 --method dapo --method delta --apply`
    """
    check_run(run)
    check_batch(run, batch, ["rollouts"])
    if trust:
        import_from()
    from counterpoise.cli.probe import lines_of
    from counterpoise.probes import replay as probe

    with waiting(f"replaying batch {batch}"):
        summary = probe.replay(run, batch, method, apply=apply, trust=trust)
    if json_:
        print_json(summary)
        return
    say(f"batch {batch} of {run} under {len(method)} methods")
    for line in lines_of(summary["numbers"]):
        say(line)
    if len(method) > 1:
        say(*NOTE)
    say(f"raw data, one row per token, and figure: {summary['folder']}")
