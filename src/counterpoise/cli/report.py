"""``counterpoise report``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders: one for its report, several for a comparison."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; report/index.html in the run (or beside several runs) by default."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=0, help="Which batch's tokens to show; the last one by default."),
    ] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="For machines: where the page is and what was missing.")
    ] = False,
) -> None:
    """Write a page that opens from disk: curves, plan, credit, ledger, samples.

    Example: `counterpoise report runs/demo`
    """
    from counterpoise.report.page import write_report
    from counterpoise.text import visible

    path, found = write_report(runs, out, batch=batch)
    if json_:
        print(json.dumps({"page": str(path), "problems": found.problems, "absent": found.absent}))
        return
    for problem in found.problems:
        print(f"missing: {visible(problem)}")
    print(f"Open {visible(path)}")
    if len(runs) == 1:
        print(f"See its tokens: counterpoise view {visible(runs[0])}")
