"""The turns of a prompt's rollouts: what the model did, what the environment said, what it earned.

They come from the rollouts table (the samples of an evaluation: from theirs), where the run has an
environment; tokens tell their turn themselves.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from counterpoise.run.schema import TURN_COLUMNS
from counterpoise.text import shorten
from counterpoise.viewer.tokens import BatchTokens

MAX_TEXT = 20_000  # characters of a reply that are sent
Turn = dict[str, Any]


def has_turns(tokens: BatchTokens) -> bool:
    """Whether tokens tell their turn."""
    return "turn" in tokens.names


def prompt_turns(tokens: BatchTokens, group: int) -> list[dict[str, Any]]:
    """Rollouts of a prompt in order, each with its turns; those whose environment failed are there
    too. Empty where the run has no turns.
    """
    folder = "evals" if tokens.source == "evals" else "rollouts"
    columns = ("rollout", "group", *(name for name in TURN_COLUMNS if name != "turn"))
    table = tokens.run.table(folder, tokens.batch, columns, {"group": group})
    if not has_turns(tokens) or table is None or "rollout" not in table.column_names:
        return []
    rows = sorted(table.to_pylist(), key=lambda row: row["rollout"])
    number = _numbered([key for row in rows for key in _list(row.get("turn_key"))])
    return [
        {
            "rollout": row["rollout"],
            "end_reason": _text(row.get("end_reason")),
            "failure": shorten(_text(row.get("failure")), 500),
            "turns": _turns(row, number),
        }
        for row in rows
    ]


def _turns(row: dict[str, Any], number: dict[Any, int]) -> list[Turn]:
    reward_U = [_number(value) for value in _list(row.get("turn_reward"))]
    rest_U = np.cumsum(np.nan_to_num(np.array(reward_U, float))[::-1])[::-1].tolist()
    out = []
    for u, (reward, rest) in enumerate(zip(reward_U, rest_U)):
        reply = _entry(row, "turn_reply", u)
        out.append(
            {
                "reward": reward,
                "return": rest if math.isfinite(rest) else None,
                "advantage": _number(_entry(row, "turn_advantage", u)),
                "state": _text(_entry(row, "turn_state", u))[:MAX_TEXT],
                "key": number.get(_entry(row, "turn_key", u)),
                "action": _text(_entry(row, "turn_action", u))[:MAX_TEXT],
                "reply": None if reply is None else _text(reply)[:MAX_TEXT],
                "reply_length": len(_text(reply)),
            }
        )
    return out


def _numbered(keys: list[Any]) -> dict[Any, int]:
    """State keys as small numbers: a browser's numbers do not hold 63 bits."""
    known = [key for key in keys if isinstance(key, int) and key >= 0]
    return {key: at for at, key in enumerate(dict.fromkeys(known))}


def _entry(row: dict[str, Any], name: str, turn: int) -> Any:
    values = _list(row.get(name))
    return values[turn] if turn < len(values) else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if is_number else None
