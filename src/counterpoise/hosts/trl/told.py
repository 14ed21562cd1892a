"""What is told of the turns of a rollout inside TRL.

A turn is a run of tokens that the model drew. What a turn earned is told by extra fields of a
``rollout_func``, a list per rollout:

    turn_rewards   a number per turn
    turn_states    a key of the state before each turn, "" where it is not known (may be left out)
    turn_scores    a score of the state after each turn, None where there is none (may be left out)
    turn_spans     [start, end) of each turn in the completion, where two turns meet without a token
                   between them (may be left out)
    turn_actions   what the model did in each turn, if an episode is its actions: states without a
                   key are then told apart by them (may be left out)
    end_reason, failure, turn_metrics    why a rollout ended, what failed, numbers to log

or by an environment of ours (``as_trl``, ``as_rollout_func``). The reward functions decide what a
rollout earned in all: where its turns add up to something else, the difference belongs to the last
one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from counterpoise.sampling.play import FAILED

FIELDS = REWARDS, STATES, SCORES, ACTIONS = (
    *("turn_rewards", "turn_states", "turn_scores"),
    "turn_actions",
)
Spans = Sequence[Sequence[int]]


class Told(NamedTuple):
    """What is known of the turns of one rollout; None is what nobody told."""

    rewards: Sequence[float] | None = None
    states: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    actions: Sequence[str] | None = None
    spans: Spans | None = None
    end_reason: str = ""
    failure: str = ""
    metrics: Mapping[str, float] = {}

    @property
    def is_lost(self) -> bool:
        """Whether its environment failed, or a number is none; a score may be missing (NaN)."""
        numbers = [*(self.rewards or []), *(s for s in self.scores or [] if s == s)]
        return self.end_reason in FAILED or not all(map(math.isfinite, numbers))


def turn_reward(
    turn_rewards: Sequence[Sequence[float]],
    end_reason: Sequence[str] | None = None,
    **columns: object,
) -> list[float | None]:
    """A reward function for TRL: what the turns of each rollout add up to; None where the
    environment failed.

    >>> turn_reward([[0.5, 1.0], [0.0]], ["done", "failed"])
    [1.5, None]
    """
    ends = end_reason or [""] * len(turn_rewards)
    totals = (float(sum(rewards)) for rewards in turn_rewards)
    return [None if end in FAILED else total for total, end in zip(totals, ends)]


def told_by_fields(rows: Sequence[Mapping[str, Any]]) -> list[Told]:
    """The fields of a ``rollout_func``, which TRL puts into the rows of the dataset."""
    for name in FIELDS:
        missing = [k for k, row in enumerate(rows) if row.get(name) is None]
        if missing and len(missing) < len(rows):
            raise ValueError(
                f"rollout_func: {name} is missing for rollouts {missing[:8]}, and the others have"
                " it. Return a list with one list per rollout, or leave it out."
            )
    return [
        Told(
            _numbers(k, REWARDS, row.get(REWARDS)),
            _names(k, STATES, row.get(STATES)),
            _numbers(k, SCORES, row.get(SCORES)),
            _names(k, ACTIONS, row.get(ACTIONS)),
            row.get("turn_spans"),
            str(row.get("end_reason") or ""),
            str(row.get("failure") or ""),
            row.get("turn_metrics") or {},
        )
        for k, row in enumerate(rows)
    ]


def _numbers(row: int, name: str, values: Sequence[Any] | None) -> list[float] | None:
    try:
        return None if values is None else [math.nan if v is None else float(v) for v in values]
    except (TypeError, ValueError):
        raise ValueError(
            f"rollout_func: {name} of rollout {row} is {str(values)[:80]!r}, expected a list with"
            " one number per turn."
        ) from None


def _names(row: int, name: str, values: Sequence[Any] | None) -> list[str] | None:
    if values is None or (not isinstance(values, str) and all(isinstance(v, str) for v in values)):
        return values if values is None else list(values)
    raise ValueError(
        f"rollout_func: {name} of rollout {row} is {str(values)[:80]!r}, expected a list with one"
        ' str per turn, "" where it is not known.'
    )
