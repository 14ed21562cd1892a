"""``counterpoise report``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoise.cli.show import Json, command_line, print_json, say, waiting
from counterpoise.run.find import check_runs


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders: one for its report, several for a comparison."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for index.html, or a file in .html; the folder report in the run (or"
            " beside several runs) by default."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=0, help="Which batch's tokens to show; the last one by default."),
    ] = None,
    json_: Json = False,
) -> None:
    """Write an HTML page that opens from disk: curves, plan, credit, ledger, samples.

    Example: `counterpoise report runs/demo`
    """
    check_runs(runs)
    from counterpoise.report.page import write_report

    with waiting("writing the report"):
        path, result = write_report(runs, out, batch=batch)
    if json_:
        print_json({"page": str(path), "problems": result.problems, "absent": result.absent})
        return
    for problem in result.problems:
        say(f"missing: {problem}")
    say(f"Open {path.absolute()}")
    if len(runs) == 1:
        say(f"See its tokens: {command_line('view', runs[0])}")
