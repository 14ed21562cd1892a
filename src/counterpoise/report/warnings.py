"""What a reader should hear first: warnings that the run wrote, and stretches in which there was
nothing to learn, found from the rewards where nobody wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from counterpoise.run.read import RunFolder
from counterpoise.text import shorten

FLAT_BATCHES = 3  # so many batches in a row with equal rewards are worth a line
FLAT = "nothing to learn"
NUMBER = re.compile(r"\d+(\.\d+)?")
MAX_LINES = 12
MAX_LENGTH = 400


def warnings_of(run: RunFolder) -> list[str]:
    """One line for each kind of warning: where it came first, how often, and its first words."""
    written = [
        *_written(run.metric_rows, "batch"),
        *_written(run.evals, "evaluation after batches"),
    ]
    kinds: dict[str, list[tuple[str, str]]] = {}
    for warning in written:
        kinds.setdefault(_kind(warning[1]), []).append(warning)
    lines = [_line(*same[0], len(same)) for same in kinds.values()]
    has_said = any(FLAT in text for _, text in written)
    return [*lines, *([] if has_said else flat_stretches(run))][:MAX_LINES]


def flat_stretches(run: RunFolder) -> list[str]:
    """Stretches of batches in which all rollouts of each prompt had the same reward."""
    flat = {batch for batch, is_flat in _flat_batches(run).items() if is_flat}
    starts = sorted(batch for batch in flat if batch - 1 not in flat)
    ends = sorted(batch for batch in flat if batch + 1 not in flat)
    return [
        f"batch {first} to {last}: {FLAT}: the rewards of each prompt are equal, so no rollout has"
        " an advantage."
        for first, last in zip(starts, ends)
        if last - first + 1 >= FLAT_BATCHES
    ]


def _flat_batches(run: RunFolder) -> dict[int, bool]:
    """batch -> whether nothing varied; from the metrics, else from the saved rollouts."""
    key = "reward/constant_group_frac"
    # a batch without an advantage counts; that all rewards are equal matters to most methods only
    rows = {
        row["batch"]: row[key] == 1 and row.get("reward/flat_batches", 1) > 0
        for row in run.metric_rows
        if key in row
    }
    return rows or {batch: _is_flat(run, batch) for batch in run.batches("rollouts")}


def _is_flat(run: RunFolder, batch: int) -> bool:
    table = run.table("rollouts", batch, ("group", "reward"))
    if table is None or table.num_columns < 2 or not table.num_rows:
        return False
    reward = table.to_pandas().groupby("group")["reward"]
    return bool((reward.max() == reward.min()).all()) and int(reward.size().max()) > 1


def _written(rows: Sequence[dict[str, object]], where: str) -> list[tuple[str, str]]:
    return [
        (f"{where} {row['batch']}", str(text))
        for row in rows
        if isinstance(texts := row.get("warnings"), list)
        for text in texts
    ]


def _line(where: str, text: str, num: int) -> str:
    often = f" and {num - 1} more times" if num > 1 else ""
    return f"{where}{often}: {shorten(text, MAX_LENGTH)}"


def _kind(text: str) -> str:
    """Warnings that differ by their numbers are of one kind."""
    return NUMBER.sub("", text.partition(". First,")[0])
