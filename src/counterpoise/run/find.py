"""Find runs: which folders below one hold a run, and which is meant by a name that is none."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from counterpoise.run.schema import INSIDE_TRL, TABLES

FILES = ("manifest.json", "metrics.jsonl", *TABLES)  # any of them makes a folder a run
MAX_NAMES = 12  # of runs that a message lists


def runs_below(folder: Path) -> dict[str, Path]:
    """name -> folder of the runs that lie in a folder; one that is a run itself has none.

    A training inside TRL keeps its run in a folder of its output folder, and has that one's name.
    """
    if not folder.is_dir() or _is_run(folder):
        return {}
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.is_symlink()]
    runs = {path.name: path if _is_run(path) else path / INSIDE_TRL for path in inside}
    return {name: path for name, path in runs.items() if _is_run(path)}


def _is_run(folder: Path) -> bool:
    return not folder.is_symlink() and any((folder / name).exists() for name in FILES)


def check_run(path: Path) -> None:
    """Raise unless the folder holds a run; the message names the runs that are near."""
    if any((path / name).exists() for name in FILES):
        return
    if not path.exists():
        raise ValueError(f"no such run: {path}.{_runs_near(path)}")
    if not path.is_dir():
        raise ValueError(f"{path} is a file, expected a run folder.{_runs_near(path)}")
    below = sorted(map(str, runs_below(path).values()))
    inside = [str(path / INSIDE_TRL)] if _is_run(path / INSIDE_TRL) else []
    if inside or below:
        raise ValueError(f"{path} holds no run itself. Give one in it: {_listed(inside or below)}.")
    raise ValueError(f"{path} holds no run: none of {', '.join(FILES)} is there.{_runs_near(path)}")


def check_runs(paths: Sequence[Path]) -> None:
    """Raise unless all are runs, each given once: the same run twice is no second seed."""
    for at, path in enumerate(paths):
        check_run(path)
        if path.resolve() in [other.resolve() for other in paths[:at]]:
            raise ValueError(f"{path} is given twice. Give each run once.")


def _runs_near(path: Path) -> str:
    """Runs beside a folder, or in ``runs`` here, as the end of a message: the nearest name, then
    all.
    """
    places = [path.parent] + ([Path("runs")] if path.parent == Path() else [])
    runs = [run for place in places for run in runs_below(place).values()]
    if not runs:
        return ""
    by_name = {(run.parent if run.name == INSIDE_TRL else run).name: run for run in runs}
    close = difflib.get_close_matches(path.name, by_name, n=1)
    hint = f" Did you mean {str(by_name[close[0]])!r}?" if close else ""
    return f"{hint} Known: {_listed(sorted(map(str, runs)))}."


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
