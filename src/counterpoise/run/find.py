"""Find runs: which folders below one hold a run."""

from __future__ import annotations

from pathlib import Path

from counterpoise.run.read import TABLES
from counterpoise.run.schema import INSIDE_TRL


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
    names = ("manifest.json", "metrics.jsonl", *TABLES)
    return not folder.is_symlink() and any((folder / name).exists() for name in names)
