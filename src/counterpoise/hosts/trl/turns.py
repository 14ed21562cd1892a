"""Rewards, states and scores of turns inside TRL, as columns.

A turn is a run of tokens that the model drew, unless somebody tells where turns meet. The reward
functions decide what a rollout earned in all: where its turns add up to something else, the
difference belongs to the last one.

Axes: N rollouts of this process, T tokens, U turns.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor

from counterpoise.hosts.trl.environment import PlayedByTools, told_by_calls
from counterpoise.hosts.trl.live import FILLER, places
from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.told import FIELDS, SCORES, Told, told_by_fields
from counterpoise.maths.turns import runs, turns
from counterpoise.rollouts import Conversation
from counterpoise.sampling.play import state_key, state_keys
from counterpoise.types import TokenBatch

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

# columns of TRL's dict
TURNS = TURN, REWARD, STATE, SCORE = ("cp_turn", "cp_turn_reward", "cp_state", "cp_turn_score")
TOLERANCE = 1e-4  # of sums of rewards, as for a TokenBatch
MAX_FAILED_FRAC = 0.5


class TurnColumns(NamedTuple):
    """The turns of this process's rollouts.

    Attributes:
        columns: ``TURN`` [N, T], ``REWARD``, ``STATE`` and, where somebody told any, ``SCORE``,
            [N, U].
        is_lost_N: rollouts that do not count.
        talks: for the run folder, without what was said.
    """

    columns: dict[str, Tensor]
    is_lost_N: Tensor
    talks: list[Conversation]

    def sound(self, reward_N: Tensor) -> Tensor:
        """Rewards, NaN where a rollout does not count."""
        return reward_N.masked_fill(self.is_lost_N, math.nan)


def keep_arguments(calls: list[tuple[Any, ...]]) -> Callable[[Callable], Callable]:
    """Put around a method, writes down what it is called with."""

    def wrap(method: Callable) -> Callable:
        def watch(*args: object, **kwargs: object) -> object:
            calls.append(args)
            return method(*args, **kwargs)

        return watch

    return wrap


def tells_turns(trainer: CreditMixin) -> bool:
    """Whether somebody could tell what a turn earned; the same on all processes."""
    pools = getattr(trainer, "_environment_pool", {}).values()
    is_ours = any(isinstance(one, PlayedByTools) for pool in pools for one in pool[:1])
    return is_ours or getattr(trainer, "rollout_func", None) is not None


def told_rows(
    trainer: CreditMixin,
    rows: Sequence[Mapping[str, Any]],
    prompts: object,
    completions: Sequence[Any],
    *more: object,
) -> list[Told] | None:
    """What is told of the turns of each rollout, from the arguments of TRL's grading; None where
    nobody could tell anything, on any process.
    """
    if not tells_turns(trainer):
        return None
    if getattr(trainer, "tools", None) and "env_mask" in rows[0]:
        raise ValueError(
            "rollout_func returned env_mask, and there are tools too: TRL then reads its own mask"
            " and would train on the environment's tokens. Pass tools or environment_factory, or"
            " play inside rollout_func, not both."
        )
    if trainer.rollout_func is not None:
        return told_by_fields(rows)
    return [
        told_by_calls(one, messages) if isinstance(one, PlayedByTools) else Told()
        for one, messages in zip(trainer.environments or [], completions)
    ]


def turn_columns(
    trainer: CreditMixin, told: Sequence[Told], mask_NT: Tensor, reward_N: Tensor
) -> TurnColumns | None:
    """What was told as columns; None where no process was told anything."""
    is_told, has_scores = _agree(trainer, told)
    if not is_told:
        return None
    turn_NT = _turns(told, mask_NT)
    count, total = (turn_NT.amax(1) + 1).tolist(), reward_N.tolist()
    check_counts(told, count)
    check_failures(told)
    _warn_of_gap(trainer, told, count, total)
    whole = [complete(*row) for row in zip(told, count, total)]
    keys = [_keys(one, g) for one, g in zip(whole, places(trainer, len(whole))[1].tolist())]
    columns = {REWARD: _padded([one.rewards for one in whole], 0.0), STATE: _padded(keys, -1)}
    if has_scores:
        columns[SCORE] = _padded([one.scores for one in whole], math.nan)
    return TurnColumns(
        {TURN: turn_NT} | {name: column.to(mask_NT.device) for name, column in columns.items()},
        torch.tensor([one.is_lost for one in told], device=mask_NT.device),
        [
            Conversation((), (), tuple(w.states or ()), w.end_reason or "done", metrics=w.metrics)
            for w in whole
        ],
    )


def _turns(told: Sequence[Told], mask_NT: Tensor) -> Tensor:
    """The turn of every token of the model: by ``turn_spans``, else the runs of the mask."""
    turn_NT = runs(mask_NT)
    for row, one in enumerate(told):
        if one.spans is None or not mask_NT[row].any():
            continue
        own_T = torch.full_like(turn_NT[row], -1)
        for turn, (start, end) in enumerate(one.spans):
            own_T[start:end] = turn
        if not torch.equal(own_T >= 0, mask_NT[row]):
            raise ValueError(
                f"rollout_func: turn_spans {str(one.spans)[:80]} of rollout {row} are not the"
                " tokens with env_mask 1. Return [start, end) of each turn in completion_ids."
            )
        turn_NT[row] = own_T
    return turn_NT


def _keys(told: Told, group: int) -> list[int]:
    """Keys of the states before each turn, hashed with the prompt; -1 unknown."""
    if told.actions is not None:
        return state_keys(Conversation(tuple(told.actions), states=tuple(told.states or ())), group)
    return [state_key(group, name, True) if name else -1 for name in told.states or []]


def _agree(trainer: CreditMixin, told: Sequence[Told]) -> tuple[bool, bool]:
    """Whether any process was told something, and whether any was told scores: all of them have
    the same columns.
    """
    flags = [any(any(part is not None for part in one[:5]) for one in told)]
    flags += [any(one.scores is not None for one in told)]
    flag_2 = torch.tensor([flags], dtype=torch.long, device=trainer.accelerator.device)
    is_told, has_scores = trainer.accelerator.gather(flag_2).amax(0).tolist()
    return bool(is_told), bool(has_scores)


def check_counts(told: Sequence[Told], count: Sequence[int]) -> None:
    """One entry per turn, in every rollout that has a token of the model."""
    for row, (one, num) in enumerate(zip(told, count)):
        for name, values in zip(FIELDS, one):
            if num and values is not None and len(values) != num:
                raise ValueError(
                    f"rollout_func: rollout {row} has {len(values)} {name}, expected {num}:"
                    f" env_mask has {num} runs of 1. Return one entry per turn of the model, and"
                    " mark what stands between two turns with 0."
                )


def check_failures(told: Sequence[Told]) -> None:
    """An environment that fails now and then costs a rollout; over half of them is an error."""
    lost = [row for row, one in enumerate(told) if one.is_lost]
    if len(lost) > MAX_FAILED_FRAC * len(told):
        first = told[lost[0]].failure or "a reward or score is not finite"
        raise ValueError(
            f"the environment failed in {len(lost)} of {len(told)} rollouts. First, rollout"
            f" {lost[0]}: {first}. Mend the environment."
        )


def complete(told: Told, num_turns: int, total: float) -> Told:
    """Rewards that add up to the rollout's, and something for every turn.

    >>> complete(Told([0.25, 0.5], ["a", ""]), 2, 1.0)[:3]
    ([0.25, 0.75], ['a', ''], [nan, nan])
    """
    rewards = list(told.rewards or [0.0] * num_turns)[:num_turns]
    if num_turns:
        rewards[-1] += _gap(told, total)
    return told._replace(
        rewards=rewards,
        states=list(told.states or [""] * num_turns)[:num_turns],
        scores=list(told.scores or [math.nan] * num_turns)[:num_turns],
    )


def _gap(told: Told, total: float) -> float:
    """What the turns lack; sums that differ by rounding are equal."""
    known, gap = told.rewards or [], total - sum(told.rewards or [])
    is_rounding = abs(gap) <= TOLERANCE * (1 + sum(map(abs, known)))
    return 0.0 if is_rounding and known else gap


def _warn_of_gap(
    trainer: CreditMixin, told: Sequence[Told], count: Sequence[int], total: Sequence[float]
) -> None:
    """Once per training."""
    rows = [
        row
        for row, one in enumerate(told)
        if one.rewards is not None and count[row] and not one.is_lost and math.isfinite(total[row])
        if _gap(one, total[row])
    ]
    if not rows or trainer._credit_has_warned:
        return
    trainer._credit_has_warned, first = True, rows[0]
    warnings.warn(
        f"turn_rewards of rollout {first} add up to {sum(told[first].rewards or []):g}, and its"
        f" reward is {total[first]:g}: the difference goes to the last turn (in {len(rows)} of"
        f" {len(told)} rollouts of this generation). The reward functions decide the sum;"
        " counterpoise.hosts.trl.turn_reward is one that adds turn_rewards up.",
        stacklevel=2,
    )


def _padded(rows: Sequence[Sequence[float] | None], fill: float) -> Tensor:
    width = max(1, *(len(row or []) for row in rows))
    return torch.tensor([[*(row or []), *[fill] * (width - len(row or []))] for row in rows])


def add_turns(batch: TokenBatch, columns: Mapping[str, Tensor]) -> TokenBatch:
    """The batch with its turns: as they were told, else every run of the mask is one and the
    reward came in the last.
    """
    if REWARD not in columns:
        played = turns(batch)
        return batch.replace(
            turn_NT=played.turn_NT,
            turn_mask_NU=played.mask_NU,
            turn_reward_NU=played.reward_NU,
            state_NU=played.state_NU,
        )
    turn_NT, reward_NU = torch.where(batch.mask_NT, columns[TURN], -1), columns[REWARD]
    number_U = torch.arange(reward_NU.shape[1], device=turn_NT.device)
    mask_NU = number_U <= turn_NT.amax(1, keepdim=True)
    score_NU = columns.get(SCORE)
    return batch.replace(
        turn_NT=turn_NT,
        turn_mask_NU=mask_NU,
        turn_reward_NU=torch.where(mask_NU, reward_NU, 0),
        state_NU=torch.where(mask_NU, columns[STATE], -1),
        turn_score_NU=None if score_NU is None else torch.where(mask_NU, score_NU, math.nan),
    )


def check_scores(setup: Setup, told: TurnColumns | None) -> None:
    """A rule that reads scores of turns has them."""
    if "turn_score_NU" in setup.method.needs and (told is None or SCORE not in told.columns):
        raise ValueError(
            f"the method {setup.method.name!r} reads turn_score_NU, and rollout_func returned no"
            f" {SCORES}. Return a score of the state after each turn, or take turn_rloo."
        )


def gather_talks(trainer: CreditMixin, row_N: Tensor) -> list[Conversation] | None:
    """Of all processes, those of rollouts that count."""
    if trainer._credit_talks is None:
        return None
    talks, row = gather_object(trainer._credit_talks), trainer.accelerator.gather(row_N).tolist()
    return [talk for talk, number in zip(talks, row) if number != FILLER]


def conversations(
    batch: TokenBatch, decode: Callable[[list[list[int]]], list[str]], talks: list[Conversation]
) -> list[Conversation] | None:
    """What was said in every rollout, read off its tokens; None where nothing has turns."""
    if batch.turn_NT is None:
        return None
    num_U = (batch.turn_NT.amax(1) + 1).tolist()
    talks = talks or [Conversation(states=("",) * num) for num in num_U]
    said = [said_by_turn(*row) for row in zip(batch.token_ids_NT.tolist(), batch.turn_NT.tolist())]
    return [
        talk._replace(actions=tuple(decode(actions)), replies=tuple(decode(replies)))
        for talk, (actions, replies) in zip(talks, said)
    ]


def said_by_turn(ids: list[int], turn_T: list[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of each turn, and those between it and the next.

    >>> said_by_turn([5, 6, 7, 8, 0], [0, 0, -1, 1, -1])
    ([[5, 6], [8]], [[7]])
    """
    starts = [turn_T.index(turn) for turn in range(max(turn_T) + 1)]
    ends = [start + turn_T.count(turn) for turn, start in enumerate(starts)]
    actions = [ids[start:end] for start, end in zip(starts, ends)]
    return actions, [ids[end:start] for end, start in zip(ends, starts[1:])]
