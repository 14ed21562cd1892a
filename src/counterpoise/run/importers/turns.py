"""Turns of conversations in another trainer's dump: the stretches of its loss mask.

A dump tells neither states nor what each turn earned: the reward is booked at the last turn, as
turn rules do without rewards of turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import fmean

from counterpoise.run.files import Columns
from counterpoise.run.importers.dump import Imported


def turns_of(mask: Sequence[bool]) -> list[int]:
    """The turn of each token, -1 on tokens that the model did not write.

    >>> turns_of([True, True, False, True])
    [0, 0, -1, 1]
    """
    out, turn = [], -1
    for is_own, tokens in groupby(mask):
        turn += is_own
        out += [turn if is_own else -1 for _ in tokens]
    return out


def has_turns(rows: Sequence[Imported]) -> bool:
    """Whether any rollout has tokens of another side between its own."""
    return any(max(turns_of(row.columns["loss_mask"]), default=0) > 0 for row in rows)


def turn_columns(rows: Sequence[Imported], texts: Sequence[Sequence[str]] | None) -> Columns:
    """The columns of turns of a rollouts table; none where every rollout is one turn."""
    if not has_turns(rows):
        return {}
    turn_N = [turns_of(row.columns["loss_mask"]) for row in rows]
    num_N = [max(turn_T, default=-1) + 1 for turn_T in turn_N]
    said = [_said(turn_T, texts[k] if texts else None) for k, turn_T in enumerate(turn_N)]
    has_advantage = any(row.advantage is not None or "credit" in row.columns for row in rows)
    advantage = {"turn_advantage": [_advantages(row, turn_T) for row, turn_T in zip(rows, turn_N)]}
    return {
        "turn": turn_N,
        "turn_reward": [_rewards(row, num) for row, num in zip(rows, num_N)],
        **(advantage if has_advantage else {}),
        "turn_state": [[""] * num for num in num_N],
        "turn_key": [[-1] * num for num in num_N],
        "turn_action": [actions for actions, _ in said],
        "turn_reply": [replies for _, replies in said],
        "end_reason": ["length" if row.stop_reason == "length" else "done" for row in rows],
        "failure": [""] * len(rows),
    }


def _rewards(row: Imported, num: int) -> list[float | None]:
    return [0.0] * (num - 1) + [row.reward] if num else []


def _advantages(row: Imported, turn_T: Sequence[int]) -> list[float | None]:
    """The mean credit of each turn's tokens, else the rollout's advantage."""
    credit_T = row.columns.get("credit") or [row.advantage] * len(turn_T)
    out: list[float | None] = []
    for turn in range(max(turn_T, default=-1) + 1):
        known = [c for c, at in zip(credit_T, turn_T) if at == turn and c is not None]
        out.append(fmean(known) if known else None)
    return out


def _said(turn_T: Sequence[int], texts: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """What the model wrote in each turn, and what came after it."""
    actions, replies = [], []
    for turn, tokens in groupby(zip(turn_T, texts or [""] * len(turn_T)), key=lambda pair: pair[0]):
        text = "".join(word for _, word in tokens)
        if turn >= 0:
            actions.append(text)
        elif actions:
            replies.append(text)
    return actions, replies
