"""What several commands print with: the ``--json`` option, tables, a sign of life."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

from counterpoise.text import visible

LINE_EVERY_S = 20.0  # without a terminal, a line of progress at most this often
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run code that the run folder names: a task, reward or rule."),
]


def command_line(*words: object) -> str:
    """``counterpoise WORDS``, to be copied into a shell of this folder."""
    return f"{program()} {shlex.join(map(str, words))}"


def program() -> str:
    """How this program is called from here: by its name where that finds it, else by its path."""
    script = Path(sys.argv[0])
    if script.name == "__main__.py":
        return f"{_callable(Path(sys.executable), 'python')} -m counterpoise"
    return _callable(script) if script.is_file() else "counterpoise"


def _callable(file: Path, name: str | None = None) -> str:
    """The name of a program on the PATH if that is this very file, else its path from here."""
    name = name or file.name
    on_path = shutil.which(name)
    if on_path and os.path.samefile(os.path.dirname(on_path), file.parent):
        return name
    here = Path.cwd()
    absolute = Path(os.path.abspath(file))
    return str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute)


def import_from(*folders: Path) -> None:
    """Modules that lie in these folders or here can be named in a recipe; installed ones come
    first. For recipes that the user has chosen to run.
    """
    for folder in (*folders, Path.cwd()):
        if str(folder.resolve()) not in sys.path:
            sys.path.append(str(folder.resolve()))


def say(*lines: object, file: TextIO | None = None) -> None:
    """Lines for a person, on stdout by default; text from a folder or a file cannot steer the
    terminal.
    """
    for line in lines or ("",):
        print(visible(line), file=file, flush=True)


def print_json(value: object) -> None:
    """One JSON object on stdout; JSON has no word for a number that is not finite, so such a number
    is a text, as Python's ``float`` reads it: "inf", "nan".
    """
    print(json.dumps(_finite(value), indent=1, default=str, allow_nan=False))


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str]) -> None:
    """A table without lines; the columns named in ``left`` are text, the others numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for at, name in enumerate(head):
        width = min(24, max(len(row[at]) for row in rows)) if at == 0 else None  # labels first
        justify = "left" if name in left else "right"
        table.add_column(Text(visible(name)), justify=justify, overflow="fold", min_width=width)
    for row in rows:
        # Text, not str: a label is somebody's config and may hold markup or escapes
        table.add_row(*(Text(visible(cell)) for cell in row))
    # a file or a pipe has no width: a wrapped line could not be read by a program
    console = Console() if Console().is_terminal else Console(width=10_000)
    console.print(table, soft_wrap=True)


def waiting(text: str) -> AbstractContextManager[object]:
    """A spinner on stderr while the block works; nothing where stderr is not a terminal."""
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(visible(text)))


@contextmanager
def counting(text: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr with the time left; the block calls what it gets with (of what, how many are
    finished, of how many). Where stderr is no terminal, a line now and then.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed
    from rich.progress import TimeRemainingColumn as Remaining

    console, last = Console(stderr=True), time.monotonic()
    words = TextColumn("{task.description}", markup=False)
    columns = (words, MofNCompleteColumn(), BarColumn(bar_width=20), Elapsed(), "left", Remaining())
    quiet, whole = not console.is_terminal, 1e9  # the speed over all parts: some take minutes
    with Progress(*columns, console=console, disable=quiet, speed_estimate_period=whole) as bar:
        part = bar.add_task(visible(text), total=None)

        def report(what: str, num: int, total: int) -> None:
            nonlocal last
            description = f"{visible(text)}: {visible(what)}"
            if num == 0:  # another part of the work has a time of its own
                bar.reset(part)
            bar.update(part, description=description, completed=num, total=total)
            if not console.is_terminal and time.monotonic() - last > LINE_EVERY_S:
                last = time.monotonic()
                left = bar.tasks[0].time_remaining
                rest = "" if left is None else f", about {left:.0f} s left"
                say(f"{description} {num} of {total}{rest}", file=sys.stderr)

        yield report
