"""What several commands print with: the ``--json`` option, tables, a sign of life."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run code that the run folder names: a task, reward or rule."),
]


def print_json(value: object) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, indent=1, default=str))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> None:
    """A table without lines; the columns named in ``left`` are text, the others numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from counterpoise.text import visible

    table = Table(box=None, pad_edge=False, header_style="dim")
    for at, name in enumerate(head):
        width = min(24, max(len(row[at]) for row in rows)) if at == 0 else None  # labels first
        justify = "left" if name in left else "right"
        table.add_column(Text(visible(name)), justify=justify, overflow="fold", min_width=width)
    for row in rows:
        # Text, not str: a label is somebody's config and may hold markup or escapes
        table.add_row(*(Text(visible(cell)) for cell in row))
    Console().print(table)


def waiting(text: str) -> AbstractContextManager[object]:
    """A spinner on stderr while the block works; nothing where stderr is not a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(text)
