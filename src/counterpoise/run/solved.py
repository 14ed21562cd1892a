"""Which rollouts of a run count as solved, as its files tell it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SUCCESS_COLUMN = "success"  # of rollouts/, where a named reward decides


def solved(rows: Mapping[str, Any], least: float) -> list[bool]:
    """One answer per rollout: the column ``success`` where it says something, else whether the
    reward is at least ``least``. ``rows`` are columns: lists, arrays or a data frame.

    >>> solved({"reward": [1.5, 0.2, 1.0]}, 0.5)
    [True, False, True]
    >>> solved({"reward": [1.5, 0.2, 1.0], "success": [False, True, None]}, 0.5)
    [False, True, True]
    """
    reward = _plain(rows["reward"])
    told = _plain(rows[SUCCESS_COLUMN]) if SUCCESS_COLUMN in rows else [None] * len(reward)
    return [
        bool(one) if _is_number(one) else _is_number(number) and number >= least
        for number, one in zip(reward, told)
    ]


def _plain(column: Any) -> list[Any]:
    return column.tolist() if hasattr(column, "tolist") else list(column)


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) and value == value
