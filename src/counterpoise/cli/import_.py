"""``counterpoise import``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoise.cli.show import Json, command_line, print_json, say, waiting


def import_(
    kind: Annotated[
        str, typer.Argument(metavar="FORMAT", help="prime-rl, nemo-rl, slime, trl or verl.")
    ],
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file of the dump, or a folder of them.")
    ],
    out: Annotated[Path, typer.Option(help="The run folder to make.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json or a folder with one; without it ids (TRL, verl: words) are shown."
        ),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            help="TRL, verl: columns whose sum is the reward; all numeric ones, or verl's score."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Turn another trainer's token dump into a run folder, for view, report and audit.

    Example: `counterpoise import prime-rl token_exports --out runs/prime --tokenizer model`
    """
    from counterpoise.ledger.measures.categories import categories
    from counterpoise.run.importers.convert import import_run
    from counterpoise.run.read import open_run

    with waiting(f"importing {source}"):
        batches = import_run(
            kind, source, out, tokenizer=tokenizer, rewards=reward or (), categories=categories
        )
    if json_:
        print_json({"run_dir": str(out), "rollouts": batches})
        return
    say(f"{sum(batches.values())} rollouts of {len(batches)} batch(es) in {out}")
    absent = open_run(out).manifest["not_in_dump"]
    if absent:
        say(f"Not in the dump, so absent on every page: {', '.join(absent)}")
    say(f"See them: {command_line('view', out)}")
