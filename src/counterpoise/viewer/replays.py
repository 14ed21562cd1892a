"""Credits of replays, as columns of a batch: what other methods would have made of its tokens.

``counterpoise replay`` writes them under ``probes/replay``, one row per token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from counterpoise.run.files import batch_of
from counterpoise.run.read import RunFolder, is_inside

CREDIT = "credit/"  # in the replay's file
PREFIX = "replay/"  # in the viewer
STRIDE = 1 << 32  # above any position
BROKEN = (OSError, ValueError)


def replay_files(run: RunFolder, batch: int) -> dict[str, Path]:
    """``replay/<method>`` -> the file that has it, the newest where several do."""
    folders = (run.path / "probes" / "replay").glob("*_*/")
    files = [
        file
        for folder in folders
        if folder.name.rpartition("_")[2].isdigit() and batch_of(folder) == batch
        for file in folder.glob("*/credits.parquet")
        if is_inside(run.path, file)
    ]
    files.sort(key=lambda file: (file.stat().st_mtime, file))
    return {name: file for file in files for name in _names(run, file)}


def read_credit(file: Path, name: str, rollout_T: np.ndarray, position_T: np.ndarray) -> np.ndarray:
    """A method's credit of every token, in the order of the viewer; NaN where the replay has
    none.
    """
    import pyarrow.parquet as pq

    column = CREDIT + name.removeprefix(PREFIX)
    table = pq.read_table(file, columns=["rollout", "position", column])
    rollout, position, credit = (table.column(at).to_numpy() for at in range(3))
    place = rollout.astype(np.int64) * STRIDE + position
    order = np.argsort(place)
    wanted_T = np.asarray(rollout_T, np.int64) * STRIDE + np.asarray(position_T, np.int64)
    at_T = np.minimum(np.searchsorted(place[order], wanted_T), max(len(place) - 1, 0))
    if not len(place):
        return np.full(len(wanted_T), np.nan)
    return np.where(place[order][at_T] == wanted_T, credit[order][at_T].astype(float), np.nan)


def _names(run: RunFolder, file: Path) -> list[str]:
    import pyarrow.parquet as pq

    try:
        columns = pq.read_schema(file).names
    except BROKEN as error:
        run.note(f"{file.relative_to(run.path)} cannot be read ({error}); it is left out.")
        return []
    return [PREFIX + c.removeprefix(CREDIT) for c in columns if c.startswith(CREDIT)]
