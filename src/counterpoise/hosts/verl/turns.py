"""What a turn earned, on its way through verl: ``extra_fields`` of an agent loop -> columns.

    turn_rewards    one number per turn
    turn_states     a key of the state before each turn, "" unknown (optional)
    turn_scores     a score of the state after each turn, None or NaN for none (optional)
    turn_spans      [start, end) of each turn in the response (optional: runs of the mask)
    turn_actions, turn_replies, turn_metrics    what was said, and the environment's numbers
    end_reason, failure     why a conversation ended; a failed one is left out of the statistics

``TurnAgentLoop`` fills all of them; an agent loop of your own gives those that it has. A rollout
without ``turn_rewards`` has a turn per run of its mask, and its reward came in the last.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.hosts.verl.method import PREFIX, Setup
from counterpoise.maths.turns import runs
from counterpoise.rollouts import Conversation
from counterpoise.sampling.play import FAILED, state_key, state_keys
from counterpoise.trainer.metrics import talk_metrics

Fields = Mapping[str, Any]
Spans = list[tuple[int, int]]
MAX_FAILED_FRAC = 0.5
TOLERANCE = 1e-4
_SAID: list[str] = []  # rollouts that a person was told about


def is_lost(fields: Fields) -> bool:
    """Whether a rollout's environment failed, or gave a number that is none."""
    is_odd = not all(map(math.isfinite, fields.get("turn_rewards") or []))
    is_odd |= any(
        value is not None and math.isinf(value) for value in fields.get("turn_scores") or []
    )
    return fields.get("end_reason") in FAILED or is_odd


def check_fields(setup: Setup, keys: Sequence[str], fields: Sequence[Fields]) -> None:
    """An error where the environment failed in over half of a batch, or where what the method reads
    of turns is missing.
    """
    lost = [row for row, own in enumerate(fields) if is_lost(own)]
    num = sum(1 for own in fields if own)  # not verl's fillers
    if len(lost) > MAX_FAILED_FRAC * num:
        first = fields[lost[0]].get("failure") or "a reward or score is not finite"
        raise ValueError(
            f"the environment failed in {len(lost)} of {num} rollouts. First, rollout"
            f" {keys[lost[0]]}: {first}. Mend the environment."
        )
    needs = "turn_scores" if "turn_score_NU" in setup.method.needs else "turn_rewards"
    if setup.has_turns and not any(own.get(needs) for own in fields):
        raise ValueError(
            f"{PREFIX}{setup.method.name} with algorithm.counterpoise.turns: no rollout of this"
            f" batch has {needs}. Make the data with counterpoise.hosts.verl.write_rows, or set"
            " actor_rollout_ref.rollout.agent.default_agent_loop to an agent loop that gives them"
            " in extra_fields."
        )


def metrics(fields: Sequence[Fields]) -> dict[str, float]:
    """Turns per conversation, shares of end reasons and the environment's numbers, to log."""
    played = [own for own in fields if own.get("end_reason")]
    if not played:
        return {}
    num_turns = [len(own["turn_rewards"]) for own in played if not is_lost(own)]
    mean = {"turns/mean": sum(num_turns) / len(num_turns)} if num_turns else {}
    return mean | talk_metrics([_talk(own) for own in played])


class _Turns(NamedTuple):
    """The turns of one rollout."""

    spans: Spans
    rewards: list[float]
    states: list[int]
    scores: list[float]


def turn_columns(
    keys: Sequence[str], fields: Sequence[Fields], mask_NT: Tensor, score_N: Tensor
) -> dict[str, Tensor]:
    """The turns of a batch as columns of a ``TokenBatch``; none where no rollout has
    ``turn_rewards``.

    Rollouts without a drawn token are not read: verl's fillers carry the fields of another one.

    Args:
        keys: of verl's queue, <prompt>_<session>_<output>.
        score_N: the reward of each rollout, which the rewards of its turns add up to.
    """
    if not any("turn_rewards" in own for own in fields):
        return {}
    run_NT = runs(mask_NT)
    read = [
        _turns_of(key, own, run_T, score) if run_T.numel() and int(run_T.max()) >= 0 else _NONE
        for key, own, run_T, score in zip(keys, fields, run_NT.cpu(), score_N.tolist())
    ]
    _say_gap(keys, fields, read)
    return _columns(read, mask_NT.shape[1], score_N)


_NONE = _Turns([], [], [], [])


def _turns_of(key: str, own: Fields, run_T: Tensor, score: float) -> _Turns:
    spans = own.get("turn_spans") or _run_spans(run_T)
    if own.get("turn_rewards") is None:
        own = {"turn_rewards": [0.0] * (len(spans) - 1) + [score]}
    num = len(spans)
    _check_spans(key, spans, run_T)
    for name in ("turn_rewards", "turn_states", "turn_scores", "turn_actions"):
        values = own.get(name) or []
        if len(values) != num and (values or name == "turn_rewards"):
            raise ValueError(
                f"rollout {key}: the agent loop gave {len(values)} {name}, expected {num}: its"
                f" response_mask has {num} turns. Give one per turn (a run of 1 in response_mask),"
                " or turn_spans where two turns meet."
            )
    rewards = [float(value) for value in own["turn_rewards"]]
    gap = score - sum(rewards)
    rewards[-1] += gap if abs(gap) > TOLERANCE else 0.0
    scores = [math.nan if s is None else float(s) for s in own.get("turn_scores") or [None] * num]
    return _Turns([(start, end) for start, end in spans], rewards, _states(key, own, num), scores)


def _run_spans(run_T: Tensor) -> Spans:
    """Where each run of drawn tokens lies."""
    at_U = [(run_T == turn).nonzero().flatten() for turn in range(int(run_T.max()) + 1)]
    return [(int(at[0]), int(at[-1]) + 1) for at in at_U]


def _check_spans(key: str, spans: Sequence[Sequence[int]], run_T: Tensor) -> None:
    drawn_T, last = torch.zeros_like(run_T, dtype=torch.bool), 0
    for start, end in spans:
        is_next = last <= start < end <= len(run_T)
        drawn_T[start:end] = True
        last = end if is_next else len(run_T) + 1
    if last > len(run_T) or not torch.equal(drawn_T, run_T >= 0):
        raise ValueError(
            f"rollout {key}: turn_spans {[list(span) for span in spans][:8]} are not the tokens"
            " with response_mask 1. Give [start, end) of each turn in the response, in order."
        )


def _states(key: str, own: Fields, num: int) -> list[int]:
    """Keys of states, hashed with the prompt; -1 unknown."""
    prompt = key.rsplit("_", 2)[0]
    if own.get("turn_actions") and own.get("turn_states"):
        return state_keys(_talk(own), prompt)
    states = own.get("turn_states") or [""] * num
    return [state_key(prompt, state, True) if state else -1 for state in states]


def _talk(own: Fields) -> Conversation:
    return Conversation(
        actions=tuple(own.get("turn_actions") or ()),
        replies=tuple(own.get("turn_replies") or ()),
        states=tuple(own.get("turn_states") or ()),
        end_reason=own.get("end_reason") or "",
        message=own.get("failure") or "",
        metrics=own.get("turn_metrics") or {},
    )


def _columns(read: Sequence[_Turns], width: int, like_N: Tensor) -> dict[str, Tensor]:
    device, dtype = like_N.device, like_N.dtype
    num_turns = max(1, *(len(own.spans) for own in read))
    turn_NT = torch.full((len(read), width), -1)
    mask_NU = torch.zeros(len(read), num_turns, dtype=torch.bool)
    reward_NU = torch.zeros(mask_NU.shape, dtype=dtype)
    state_NU = torch.full(mask_NU.shape, -1)
    score_NU = torch.full(mask_NU.shape, math.nan, dtype=dtype)
    for row, own in enumerate(read):
        num = len(own.spans)
        for turn, (start, end) in enumerate(own.spans):
            turn_NT[row, start:end] = turn
        mask_NU[row, :num] = True
        reward_NU[row, :num] = torch.tensor(own.rewards, dtype=dtype)
        state_NU[row, :num] = torch.tensor(own.states, dtype=torch.long)
        score_NU[row, :num] = torch.tensor(own.scores, dtype=dtype)
    columns = {"turn_NT": turn_NT, "turn_mask_NU": mask_NU, "turn_reward_NU": reward_NU}
    columns["state_NU"] = state_NU
    if not score_NU.isnan().all():
        columns["turn_score_NU"] = score_NU
    return {name: column.to(device) for name, column in columns.items()}


def _say_gap(keys: Sequence[str], fields: Sequence[Fields], read: Sequence[_Turns]) -> None:
    """One line per run where the rewards of turns are not the rollout's: the rest is the last
    turn's.
    """
    if _SAID:
        return
    for key, own, turns in zip(keys, fields, read):
        given, total = sum(own.get("turn_rewards") or []), sum(turns.rewards)
        if turns.spans and own.get("turn_rewards") and abs(total - given) > TOLERANCE:
            _SAID.append(key)
            warnings.warn(
                f"rollout {key}: its turn_rewards add up to {given:g}, and its reward is"
                f" {total:g}. The reward decides; the difference belongs to the last turn.",
                stacklevel=2,
            )
            return


def with_token_rewards(columns: Mapping[str, Tensor], reward_NT: Tensor) -> dict[str, Tensor]:
    """The columns of a ``TokenBatch`` alone. What verl took from the reward of single tokens since
    ``score_NT`` (KL in the reward) is counted in their turns.
    """
    columns = dict(columns)
    score_NT = columns.pop("score_NT")
    if "turn_reward_NU" not in columns:
        return columns
    reward_NU, turn_NT = columns["turn_reward_NU"], columns["turn_NT"]
    place_NT = torch.where(turn_NT >= 0, turn_NT, reward_NU.shape[1])  # the last is thrown away
    more_NU = reward_NU.new_zeros(len(reward_NU), reward_NU.shape[1] + 1)
    more_NU = more_NU.scatter_add(1, place_NT, (reward_NT - score_NT).to(reward_NU.dtype))
    return {**columns, "turn_reward_NU": reward_NU + more_NU[:, :-1]}
