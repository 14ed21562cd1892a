"""``counterpoise compare``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoise.cli.show import Json, print_json, print_table, say, waiting
from counterpoise.run.find import check_runs

if TYPE_CHECKING:
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
        typer.Option(
            help="Count batches and tokens until this value; the baseline's final mean by default."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder for index.html, or a file in .html; the folder report beside the runs"
            " by default."
        ),
    ] = None,
    page: Annotated[bool, typer.Option("--page/--no-page", help="Write the page as well.")] = True,
    json_: Json = False,
) -> None:
    """Compare methods over seeds.

    Final and best value, how soon it is reached, and whether a difference is more than noise.

    Example: `counterpoise compare runs/grpo-* runs/delta-* --baseline grpo`
    """
    check_runs(runs)
    from counterpoise.report.compare import Settings, as_json, comparison
    from counterpoise.report.page import default_path, page_file, write_report
    from counterpoise.report.runs import group_runs
    from counterpoise.run.read import open_run

    settings: Settings = {"metric": metric, "baseline": baseline, "threshold": threshold}
    with waiting("comparing runs"):
        opened = [open_run(path) for path in runs]
        result = comparison(group_runs(opened), **settings)
        path, is_replaced = None, False
        if page:
            path = page_file(out) if out else default_path(opened, beside=True)
            is_replaced = path.is_file()
            write_report(runs, path, **settings)
    if json_:
        print_json(as_json(result) | {"page": str(path) if path else None})
        return
    _print_tables(result)
    for note in result.notes:
        say(note)
    if path:
        say(f"Open {path.absolute()}" + " (replaces the page that was there)" * is_replaced)


def _print_tables(result: Comparison) -> None:
    """How good, then how soon: each fits a terminal of 80 columns."""
    from counterpoise.report.compare import words
    from counterpoise.text import with_range

    value, difference, unit = words(result.metric)
    good = [
        (
            line.label,
            str(line.seeds),
            value(*line.final),
            difference(*line.difference) if line.difference else "–",
            line.verdict,
        )
        for line in result.lines
    ]
    soon = [
        (
            line.label,
            value(line.best.mean),
            f"{line.reach.reached} of {line.reach.total}",
            with_range(*line.reach.batches),
            with_range(*line.reach.tokens),
        )
        for line in result.lines
    ]
    head = ("method", "seeds", "final", f"difference{unit}", "verdict")
    print_table(head, good, left=["method", "verdict"])
    if len(good) > 1:
        say(f"differences are against {result.baseline}")
    say()
    reached = f"reached {value(result.threshold)}"
    print_table(("method", "best", reached, "after batches", "after tokens"), soon, left=["method"])
    say()
