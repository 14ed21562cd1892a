"""The report page: one file that opens from disk, loads nothing, and runs only its own scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from counterpoise.report import overview, samples
from counterpoise.report.charts.index import CHARTS, Chart
from counterpoise.report.charts.style import Drawing
from counterpoise.report.compare import Comparison, Settings, comparison, words
from counterpoise.report.html import render_page
from counterpoise.report.runs import Group, group_runs
from counterpoise.report.warnings import warnings_of
from counterpoise.run.files import write_text
from counterpoise.run.read import RunFolder, open_run
from counterpoise.text import spans

if TYPE_CHECKING:
    from typing_extensions import Unpack

SECTIONS = {
    "learning": ("Learning", "What the policy earned, by batch."),
    "signals": ("Signals", "Whether there is something to learn from, and whether it is used."),
    "turns": ("Turns", "What the turns of an episode earned, how many there were, how it ended."),
    "plan": ("Plan", "Which rollouts share an update. Only tokens of one update can cancel in it."),
    "credit": ("Credit", "How the advantage of a rollout was spread over its tokens."),
    "ledger": ("Ledger", "What the updates did to each token, and why."),
}
LEDGER_OFF = "This run has no ledger: set ledger.every in the recipe to have one."
IMPORTED = (
    "An imported dump has no ledger: what an update does to tokens is measured during training."
)


class Card(NamedTuple):
    """A chart that could be drawings."""

    chart: Chart
    drawing: Drawing


class Content(NamedTuple):
    """Everything the page shows, before it is a page."""

    title: str
    groups: list[Group]
    tiles: list[overview.Tile]
    warnings: list[str]
    headline: Card | None
    axes: overview.Table
    settings: overview.Table
    cards: dict[str, list[Card]]
    absent: dict[str, list[str]]
    comparison: Comparison | None
    details: list[samples.Detail]
    problems: list[str]


def write_report(
    paths: Sequence[str | Path],
    out: Path | None = None,
    *,
    batch: int | None = None,
    **compared: Unpack[Settings],
) -> tuple[Path, Content]:
    """Write the report of one run, or the comparison of several; returns its path and what it
    shows.

    Args:
        paths: run folders.
        out: as in ``page_file``; ``report/index.html`` in the run, or in the folder above several
            runs, by default.
        batch: which tokens table to show; the last one by default.
        compared: ``metric``, ``baseline``, ``threshold`` of the comparison.
    """
    runs = [open_run(path) for path in paths]
    out = page_file(out) if out else default_path(runs)
    page = content(runs, batch=batch, **compared)
    write_text(out, render(page))
    return out, page


def page_file(out: Path) -> Path:
    """The file of a page: ``out`` itself if it ends in .html, else index.html in that folder.

    >>> page_file(Path("pages/delta.html")).as_posix(), page_file(Path("pages")).as_posix()
    ('pages/delta.html', 'pages/index.html')
    """
    is_file = out.suffix.lower() == ".html"
    if is_file and out.is_dir():
        raise ValueError(
            f"--out: {str(out)!r} is a folder, expected a file, since the name ends in .html."
            " Choose another name."
        )
    if not is_file and out.is_file():
        raise ValueError(
            f"--out: {str(out)!r} is a file, expected a folder for index.html or a name that ends"
            " in .html. Choose another name."
        )
    return out if is_file else out / "index.html"


def default_path(runs: Sequence[RunFolder], *, beside: bool = False) -> Path:
    """In the run itself, or in the folder that holds the first of several; ``beside``: there for
    one run too.

    A link out of there is not followed.
    """
    folder = runs[0].path if len(runs) == 1 and not beside else runs[0].path.parent
    out = folder / "report" / "index.html"
    if not out.parent.resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"report: {str(out.parent)!r} is a link that leads elsewhere. Say where the page shall"
            " be with --out."
        )
    return out


def content(
    runs: Sequence[RunFolder], *, batch: int | None = None, **compared: Unpack[Settings]
) -> Content:
    """Read everything; what the files lack ends up in ``absent`` and ``problems``."""
    if batch is not None and not any(
        batch in run.batches(folder) for run in runs for folder in ("tokens", "rollouts")
    ):
        known = {at for run in runs for kind in ("tokens", "rollouts") for at in run.batches(kind)}
        raise ValueError(
            f"report: no run has tokens or rollouts of batch {batch}. There are:"
            f" {spans(sorted(known)) or 'none'}."
        )
    groups = group_runs(list(runs))
    first = groups[0].runs[0]
    compare, trouble = _comparison(groups, compared)
    drawings = [(chart, chart.draw(groups, batch)) for chart in CHARTS]
    cards = {
        name: [Card(c, d) for c, d in drawings if d is not None and c.section == name]
        for name in SECTIONS
    }
    return Content(
        title=first.name if len(runs) == 1 else " · ".join(group.label for group in groups),
        groups=groups,
        tiles=overview.tiles(groups),
        warnings=_of_runs(runs, warnings_of),
        headline=next(iter(cards["learning"]), None),
        axes=overview.axes_table(groups),
        settings=overview.settings_table(groups),
        cards=cards,
        absent={
            name: [_lack(c, groups) for c, d in drawings if d is None and c.section == name]
            for name in SECTIONS
            if name != "turns" or cards[name]
        },
        comparison=compare,
        details=[
            samples.detail(group.label, group.runs[0], batch, 3 if len(groups) == 1 else 1)
            for group in groups
        ],
        problems=_of_runs(runs, lambda run: run.problems) + trouble,
    )


def _of_runs(runs: Sequence[RunFolder], lines_of: Callable[[RunFolder], list[str]]) -> list[str]:
    """Lines of every run, with its name where there are several."""
    return [
        f"{run.name}: {line}" if len(runs) > 1 else line for run in runs for line in lines_of(run)
    ]


def render(page: Content) -> str:
    """The page as HTML."""
    figures = {
        card.chart.name: card.drawing.figure for cards in page.cards.values() for card in cards
    }
    return render_page(
        "report.html",
        title=page.title,
        source="run folders",
        figures=figures,
        page=page,
        sections={k: section for k, section in SECTIONS.items() if k != "turns" or page.cards[k]},
        origins=[(run, overview.origin(run)) for group in page.groups for run in group.runs],
        ledger_off=IMPORTED if _is_imported(page.groups) else LEDGER_OFF,
        words_of=words,
    )


def _lack(chart: Chart, groups: Sequence[Group]) -> str:
    return (
        f"{chart.title} (needs {chart.needs})"
        if chart.needs and not _is_imported(groups)
        else chart.title
    )


def _is_imported(groups: Sequence[Group]) -> bool:
    return all("imported_from" in run.manifest for group in groups for run in group.runs)


def _comparison(groups: Sequence[Group], compared: Settings) -> tuple[Comparison | None, list[str]]:
    """The comparison; one that cannot be made is a line among the problems and the rest of the page
    is shown.
    """
    if len(groups) < 2:
        return None, []
    try:
        return comparison(groups, **compared), []
    except ValueError as error:
        return None, [str(error)]
