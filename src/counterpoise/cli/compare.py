"""``counterpoise compare``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from counterpoise.report.compare import Comparison


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders; runs that differ by the seed alone are one method."),
    ],
    metric: Annotated[
        str, typer.Option(help="What to compare by: eval/accuracy or a key of metrics.jsonl.")
    ] = "eval/accuracy",
    baseline: Annotated[
        str | None,
        typer.Option(help="The method to hold others against; the first one by default."),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="For batches and tokens to it; the baseline's final mean by default."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page; report/index.html beside the runs by default.")
    ] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the page as well.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Methods against each other over seeds: final, best, how soon, and whether a difference is
    more than noise.

    Example: `counterpoise compare runs/grpo-* runs/delta-* --baseline grpo`
    """
    from counterpoise.report.compare import as_json, comparison
    from counterpoise.report.groups import group_runs
    from counterpoise.report.page import write_report
    from counterpoise.run.read import open_run
    from counterpoise.text import visible

    settings = {"metric": metric, "baseline": baseline, "threshold": threshold}
    found = comparison(group_runs([open_run(path) for path in runs]), **settings)
    path = write_report(runs, out, **settings)[0] if page else None
    if json_:
        print(json.dumps(as_json(found) | {"page": str(path) if path else None}))
        return
    from rich.console import Console

    for table in _tables(found):
        Console().print(table)
        print()
    for note in found.notes:
        print(visible(note))
    if path:
        print(f"Open {visible(path)}")


def _tables(found: Comparison) -> list[Table]:
    """How good, then how soon: each fits a terminal of 80 columns."""
    from counterpoise.text import number, with_interval

    good = [
        [
            line.label,
            str(line.seeds),
            with_interval(*line.final),
            with_interval(*line.against.difference) if line.against else "–",
            line.verdict,
        ]
        for line in found.lines
    ]
    soon = [
        [
            line.label,
            number(line.best.mean),
            f"{line.reach.reached} of {line.reach.total}",
            with_interval(*line.reach.batches),
            with_interval(*line.reach.tokens),
        ]
        for line in found.lines
    ]
    return [
        _table(["method", "seeds", "final", f"against {found.baseline}", "verdict"], good),
        _table(
            [
                "method",
                "best",
                f"reached {number(found.threshold)}",
                "after batches",
                "after tokens",
            ],
            soon,
        ),
    ]


def _table(head: list[str], rows: list[list[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from counterpoise.text import visible

    table = Table(box=None, pad_edge=False, header_style="dim")
    for at, name in enumerate(head):
        table.add_column(
            Text(visible(name)),
            justify="left" if at == 0 or name == "verdict" else "right",
            overflow="fold",
        )
    for row in rows:
        # Text, not str: a label is somebody's config and may hold markup or escapes
        table.add_row(*(Text(visible(cell)) for cell in row))
    return table
