"""What the runs of an arena scored: ``results.jsonl``, one object per run and evaluation, and
``activity.json``.

A run is (arm, lr, seed). Lines come in any order; of lines that repeat the last one holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeGuard

from counterpoise.errors import ConfigError
from counterpoise.run.files import append_json
from counterpoise.run.read import read_jsonl, read_mapping
from counterpoise.text import shorten, visible

FILE = "results.jsonl"
KEYS = ("arm", "lr", "seed", "batch")
Row = Mapping[str, str | float | None]


class Run(NamedTuple):
    """One training."""

    arm: str
    lr: float
    seed: int


class Result(NamedTuple):
    """One evaluation of a run after ``batch`` batches, or why the run ended there; numbers that
    are not finite are left out.
    """

    run: Run
    batch: int
    values: dict[str, float]
    stopped: str = ""


class Activity(NamedTuple):
    """Cosine of an arm's update with its control's on the same rollouts, one per saved batch."""

    control: str
    cosine: list[float]

    @property
    def mean(self) -> float:
        return math.fsum(self.cosine) / len(self.cosine) if self.cosine else math.nan


def append_result(out: Path, row: Row) -> None:
    """One line of ``results.jsonl``, on disk when this returns; a line that a kill cut off stays
    alone.
    """
    if _result(row) is None:
        raise ValueError(
            f"arena: a result needs {', '.join(KEYS)} (text, number, whole numbers), got"
            f" {shorten(dict(row), 200)}."
        )
    append_json(out / FILE, row)


def read_results(out: Path, problems: list[str] | None = None) -> list[Result]:
    """The results of a folder, each run and batch once; a last line that is cut off is left out.

    Args:
        problems: takes a line for each thing that cannot be read.
    """
    rows = read_jsonl(out / FILE, problems)
    known = [result for row in rows if (result := _result(row)) is not None]
    if len(known) < len(rows) and problems is not None:
        problems.append(
            f"{FILE}: {len(rows) - len(known)} line(s) without {', '.join(KEYS)}; they are left"
            " out."
        )
    return list({(one.run, one.batch, bool(one.stopped)): one for one in known}.values())


def finished(results: Sequence[Result], last: int) -> set[Run]:
    """Runs with an evaluation after ``last`` batches, and those that stopped before."""
    return {one.run for one in results if one.stopped or one.batch == last}


def read_activity(out: Path) -> dict[str, Activity]:
    """``activity.json`` by arm; empty where it is missing."""
    arms = read_mapping(out / "activity.json").get("arms", {})
    try:
        return {
            name: Activity(one["control"], [x for x in one["cosine"] if _is_finite(x)])
            for name, one in arms.items()
        }
    except (KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"{out / 'activity.json'}: expected arms with control and cosine. Remove it and let the"
            " arena measure again."
        ) from None


def _result(row: Row) -> Result | None:
    arm, lr, seed, batch = (row.get(key) for key in KEYS)
    if not isinstance(arm, str) or type(seed) is not int or type(batch) is not int:
        return None
    if not _is_finite(lr):
        return None
    stopped = visible(row["stopped"]) or "no reason given" if "stopped" in row else ""
    numbers = {} if stopped else {key: value for key, value in row.items() if key not in KEYS}
    values = {key: float(value) for key, value in numbers.items() if _is_finite(value)}
    return Result(Run(arm, float(lr), seed), batch, values, stopped)


def _is_finite(value: object) -> TypeGuard[float]:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
