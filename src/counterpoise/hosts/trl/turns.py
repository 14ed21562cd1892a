"""Rewards, states and scores of turns inside TRL, as columns.

A turn is a run of tokens that the model drew. What a turn earned is told by extra fields of a
``rollout_func``, a list per rollout:

    turn_rewards   a number per turn
    turn_states    a key of the state before each turn, "" where it is not known (may be left out)
    turn_scores    a score of the state after each turn, None where there is none (may be left out)

or by an environment of ours (``as_trl``). The reward functions decide what a rollout earned in all:
where its turns add up to something else, the difference belongs to the last one.

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

from counterpoise.hosts.trl.live import FILLER, places
from counterpoise.hosts.trl.method import Setup
from counterpoise.maths.turns import runs, turns
from counterpoise.sampling.play import state_key
from counterpoise.types import Conversation, TokenBatch

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

REWARDS, STATES, SCORES, END = "turn_rewards", "turn_states", "turn_scores", "end_reason"
# columns of TRL's dict
TURNS = REWARD, STATE, SCORE = "cp_turn_reward", "cp_state", "cp_turn_score"
TOLERANCE = 1e-4  # of sums of rewards, as for a TokenBatch
Talk = tuple[list[str], str]  # names of the states before each turn, and why a rollout ended


class Told(NamedTuple):
    """What is known of the turns of one rollout; None is what nobody told."""

    rewards: Sequence[float] | None = None
    states: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    end_reason: str = ""


class TurnColumns(NamedTuple):
    """The turns of this process's rollouts.

    Attributes:
        columns: ``REWARD``, ``STATE`` and, where somebody told any, ``SCORE``, [N, U].
        is_sound_N: False where a number is not finite; such a rollout does not count.
        talks: for the run folder.
    """

    columns: dict[str, Tensor]
    is_sound_N: Tensor
    talks: list[Talk]

    def sound(self, reward_N: Tensor) -> Tensor:
        """Rewards, NaN where a rollout does not count."""
        return torch.where(self.is_sound_N, reward_N, math.nan)


def turn_reward(turn_rewards: Sequence[Sequence[float]], **columns: object) -> list[float]:
    """A reward function for TRL: what the turns of each rollout add up to.

    >>> turn_reward([[0.5, 1.0], [0.0]])
    [1.5, 0.0]
    """
    return [float(sum(rewards)) for rewards in turn_rewards]


def keep_arguments(calls: list[tuple[Any, ...]]) -> Callable[[Callable], Callable]:
    """Put around a method, writes down what it is called with."""

    def wrap(method: Callable) -> Callable:
        def watch(*args: object) -> object:
            calls.append(args)
            return method(*args)

        return watch

    return wrap


def tells_turns(trainer: CreditMixin) -> bool:
    """Whether somebody could tell what a turn earned."""
    return getattr(trainer, "rollout_func", None) is not None


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
    if trainer.tools and "env_mask" in rows[0]:
        raise ValueError(
            "rollout_func returned env_mask, and there are tools too: TRL then reads its own mask"
            " and would train on the environment's tokens. Pass tools or environment_factory, or"
            " play inside rollout_func, not both."
        )
    return told_by_fields(rows)


def told_by_fields(rows: Sequence[Mapping[str, Any]]) -> list[Told]:
    """The fields of a ``rollout_func``, which TRL puts into the rows of the dataset."""
    for name in (REWARDS, STATES, SCORES):
        missing = [k for k, row in enumerate(rows) if row.get(name) is None]
        if missing and len(missing) < len(rows):
            raise ValueError(
                f"rollout_func: {name} is missing for rollouts {missing[:8]}, and the others have"
                " it. Return a list with one list per rollout, or leave it out."
            )
    return [
        Told(
            _numbers(k, REWARDS, row.get(REWARDS)),
            _names(k, row.get(STATES)),
            _numbers(k, SCORES, row.get(SCORES)),
            str(row.get(END) or ""),
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


def _names(row: int, values: Sequence[Any] | None) -> list[str] | None:
    if values is None or (not isinstance(values, str) and all(isinstance(v, str) for v in values)):
        return values if values is None else list(values)
    raise ValueError(
        f"rollout_func: {STATES} of rollout {row} is {str(values)[:80]!r}, expected a list with one"
        ' str per turn, "" where the state is not known.'
    )


def turn_columns(
    trainer: CreditMixin, told: Sequence[Told], mask_NT: Tensor, reward_N: Tensor
) -> TurnColumns | None:
    """What was told as columns; None where no process was told anything."""
    is_told, has_scores = _agree(trainer, told)
    if not is_told:
        return None
    count, total = (runs(mask_NT).amax(1) + 1).tolist(), reward_N.tolist()
    check_counts(told, count)
    _warn_of_gap(trainer, told, count, total)
    whole = [complete(*row) for row in zip(told, count, total)]
    _, group_N = places(trainer, len(whole))
    keys = [
        [state_key(group, name, True) if name else -1 for name in one.states or []]
        for one, group in zip(whole, group_N.tolist())
    ]
    columns = {REWARD: _padded([one.rewards for one in whole], 0.0), STATE: _padded(keys, -1)}
    if has_scores:
        columns[SCORE] = _padded([one.scores for one in whole], math.nan)
    return TurnColumns(
        {name: column.to(mask_NT.device) for name, column in columns.items()},
        torch.tensor([_is_sound(one) for one in told], device=mask_NT.device),
        [(list(one.states or []), one.end_reason) for one in whole],
    )


def _agree(trainer: CreditMixin, told: Sequence[Told]) -> tuple[bool, bool]:
    """Whether any process was told something, and whether any was told scores: all of them have
    the same columns.
    """
    flags = [any(any(part is not None for part in one[:3]) for one in told)]
    flags += [any(one.scores is not None for one in told)]
    flag_2 = torch.tensor([flags], dtype=torch.long, device=trainer.accelerator.device)
    is_told, has_scores = trainer.accelerator.gather(flag_2).amax(0).tolist()
    return bool(is_told), bool(has_scores)


def check_counts(told: Sequence[Told], count: Sequence[int]) -> None:
    """One entry per turn, in every rollout that has a token of the model."""
    for row, (one, num) in enumerate(zip(told, count)):
        for name, values in zip((REWARDS, STATES, SCORES), one):
            if num and values is not None and len(values) != num:
                raise ValueError(
                    f"rollout_func: rollout {row} has {len(values)} {name}, expected {num}:"
                    f" env_mask has {num} runs of 1. Return one entry per turn of the model, and"
                    " mark what stands between two turns with 0."
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
        if one.rewards is not None and count[row] and _is_sound(one) and math.isfinite(total[row])
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


def _is_sound(told: Told) -> bool:
    """Rewards are finite; a score may be missing (NaN)."""
    is_finite = all(map(math.isfinite, told.rewards or []))
    return is_finite and not any(map(math.isinf, told.scores or []))


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
    turn_NT, reward_NU = runs(batch.mask_NT), columns[REWARD]
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


def gather_talks(trainer: CreditMixin, row_N: Tensor) -> list[Talk] | None:
    """Of all processes, those of rollouts that count."""
    if trainer._credit_talks is None:
        return None
    talks, row = gather_object(trainer._credit_talks), trainer.accelerator.gather(row_N).tolist()
    return [talk for talk, number in zip(talks, row) if number != FILLER]


def conversations(
    batch: TokenBatch, decode: Callable[[list[list[int]]], list[str]], talks: list[Talk] | None
) -> list[Conversation] | None:
    """What was said in every rollout, read off its tokens; None where nothing has turns."""
    if batch.turn_NT is None:
        return None
    talks = talks or [([], "")] * batch.num_rollouts
    return [
        _conversation(ids, row, decode, *talk)
        for ids, row, talk in zip(batch.token_ids_NT.tolist(), batch.turn_NT.tolist(), talks)
    ]


def _conversation(
    ids: list[int],
    turn_T: list[int],
    decode: Callable[[list[list[int]]], list[str]],
    states: list[str],
    end_reason: str,
) -> Conversation:
    num = max(turn_T) + 1
    starts = [turn_T.index(turn) for turn in range(num)]
    ends = [start + turn_T[start:].count(turn) for turn, start in enumerate(starts)]
    said = [ids[start:end] for start, end in zip(starts, ends)]
    replies = [ids[end:start] for end, start in zip(ends, starts[1:])]
    texts = decode(said + replies)
    return Conversation(
        tuple(texts[:num]), tuple(texts[num:]), tuple(states or [""] * num), end_reason or "done"
    )
