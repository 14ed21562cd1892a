"""A batch of conversations: limits, spans of turns, and what became of every row.

``Play`` is the other side of ``sampling.conversation``: it hands what the model wrote to the
episodes and their replies, as tokens, to the model.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from math import nan
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.environments import Environment, Reply
from counterpoise.environments.episodes import Episodes
from counterpoise.policy.bridge import Bridge
from counterpoise.rollouts import Conversation
from counterpoise.sampling.slots import Answer
from counterpoise.tasks.workers import Fault
from counterpoise.types import Prompt

CHECKED = 100  # every so many rows one is played again, to see that an episode is its actions
FAILED = ("failed", "timed out")


class Limits(NamedTuple):
    """When a conversation ends at the latest; each limit has its ``end_reason``.

    Args:
        max_turns: turns of the model ("turns").
        max_turn_tokens: tokens that the model draws in one turn; the turn is then cut and goes to
            the environment as it is.
        max_new_tokens: tokens that the model draws in all ("length").
        max_row_tokens: tokens of prompt, turns and replies ("length"); no reply is cut. None: the
            prompt and twice ``max_new_tokens``.
        max_positions: tokens that the model can read, None where that has no end.
        step_time_limit_s: seconds that the environment may take for one step ("timed out").
    """

    max_turns: int
    max_turn_tokens: int
    max_new_tokens: int
    max_row_tokens: int | None = None
    max_positions: int | None = None
    step_time_limit_s: float = 10.0

    def most(self, prompt_length: int) -> int:
        """Tokens of a row after its prompt."""
        most = self.max_row_tokens or prompt_length + 2 * self.max_new_tokens
        return min(most, self.max_positions or most) - prompt_length


class Row:
    """One conversation as it grows: where its turns lie, and why it ended."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.start, self.num_drawn, self.is_stopped = 0, 0, True
        self.end_reason = self.message = ""


class Play:
    """Conversations of many rows with one environment (a ``sampling.slots.Dialogue``).

    Args:
        prompts, seeds, prompt_lengths: one per row; rows of a group share prompt and seed.
        bridge: a reply as tokens.
        decode: what the model wrote in a turn, as text.
        stop_ids: tokens that end a turn.
        episodes: of a host that plays them in its own way.
    """

    def __init__(
        self,
        environment: Environment,
        prompts: Sequence[Prompt],
        seeds: Sequence[int],
        prompt_lengths: Sequence[int],
        *,
        limits: Limits,
        bridge: Bridge,
        decode: Callable[[list[int]], str],
        stop_ids: Sequence[int],
        episodes: Episodes | None = None,
    ) -> None:
        self.limits, self.bridge, self.decode, self.stop_ids = limits, bridge, decode, stop_ids
        self.prompts, self.environment = prompts, environment
        self.episodes = episodes or Episodes(environment, prompts, seeds, limits.step_time_limit_s)
        self.rows = [Row() for _ in prompts]
        self.most = [limits.most(length) for length in prompt_lengths]  # tokens after the prompt

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest row after its prompt."""
        return max(self.most)

    def first_limit(self, row: int) -> int:
        return self._room(row, 0)

    def hear(self, row: int, token_ids: list[int]) -> None:
        own = self.rows[row]
        own.spans.append((own.start, len(token_ids)))
        own.num_drawn += len(token_ids) - own.start
        turn, own.is_stopped = token_ids[own.start :], token_ids[-1] in self.stop_ids
        self.episodes.send(row, self.decode(turn[:-1] if own.is_stopped else turn))

    def answers(self, *, wait: bool) -> list[Answer]:
        return [self._answer(row, reply) for row, reply in self.episodes.poll(wait=wait)]

    def _room(self, row: int, length: int) -> int:
        """Tokens at which a turn ends that starts at ``length``."""
        left = self.limits.max_new_tokens - self.rows[row].num_drawn
        return min(length + min(self.limits.max_turn_tokens, left), self.most[row])

    def _answer(self, row: int, reply: Reply | Fault) -> Answer:
        own, limits = self.rows[row], self.limits
        if isinstance(reply, Fault):
            own.end_reason, own.message = reply
        elif reply.is_done:
            own.end_reason = "done"
        elif len(own.spans) == limits.max_turns:
            own.end_reason = "turns"
        elif own.num_drawn >= limits.max_new_tokens:
            own.end_reason = "length"
        else:
            end = own.spans[-1][1]
            said = self.bridge(reply.text, is_stopped=own.is_stopped)
            limit = self._room(row, end + len(said))
            if limit > end + len(said):
                own.start = end + len(said)
                return Answer(row, said, limit)
            own.end_reason = "length"
        return Answer(row)

    def check(self) -> None:
        """Play some rows again: an environment whose replies differ is an error."""
        played = [k for k, row in enumerate(self.rows) if row.end_reason not in FAILED]
        self.episodes.check(played[::CHECKED])

    def conversation(self, row: int) -> Conversation:
        own, replies = self.rows[row], self.episodes.replies[row]
        first = getattr(self.environment, "first_state", None)
        states = (first(self.prompts[row]) if first else "", *(reply.state for reply in replies))
        return Conversation(
            actions=self.episodes.actions[row],
            replies=tuple(reply.text for reply in replies),
            states=states[: len(own.spans)],
            end_reason=own.end_reason,
            message=own.message,
            metrics=mean_metrics(replies),
        )

    def columns(
        self, width: int, group: Sequence[int], talks: Sequence[Conversation]
    ) -> dict[str, Tensor]:
        """The turns of all rows as columns of a ``TokenBatch``: ``mask_NT`` and those of turns."""
        most = max(len(row.spans) for row in self.rows)
        turn_NT = torch.tensor([self._turns(row, width) for row in range(len(self.rows))])
        keys = [state_keys(talk, own) for talk, own in zip(talks, group)]
        replies = self.episodes.replies
        scores = [[nan if r.score is None else r.score for r in row] for row in replies]
        columns = {
            "mask_NT": turn_NT >= 0,
            "turn_NT": turn_NT,
            "turn_mask_NU": _padded([[True] * len(row.spans) for row in self.rows], most, False),
            "turn_reward_NU": _padded([[r.reward for r in row] for row in replies], most, 0.0),
            "state_NU": _padded(keys, most, -1),
            "turn_score_NU": _padded(scores, most, nan),
        }
        if columns["turn_score_NU"].isnan().all():
            del columns["turn_score_NU"]
        return columns

    def _turns(self, row: int, width: int) -> list[int]:
        """The turn of every token of a row, -1 on what the model did not write."""
        out: list[int] = []
        for turn, (start, end) in enumerate(self.rows[row].spans):
            out += [-1] * (start - len(out)) + [turn] * (end - start)
        return out + [-1] * (width - len(out))


def mean_metrics(replies: Sequence[Reply]) -> dict[str, float]:
    """The environment's numbers, each averaged over the turns that have it."""
    names = sorted({name for reply in replies for name in reply.metrics})
    numbers = {n: [r.metrics[n] for r in replies if n in r.metrics] for n in names}
    return {name: sum(values) / len(values) for name, values in numbers.items()}


def extra_fields(play: Play, row: int) -> dict[str, Any]:
    """What a host carries of a conversation beside its tokens: lists with an entry per turn, why it
    ended, what failed.
    """
    talk, replies, spans = play.conversation(row), play.episodes.replies[row], play.rows[row].spans
    missing = len(spans) - len(replies)
    return {
        "turn_rewards": [reply.reward for reply in replies] + [0.0] * missing,
        "turn_states": list(talk.states),
        "turn_scores": [reply.score for reply in replies] + [None] * missing,
        "turn_spans": [list(span) for span in spans],
        "turn_actions": list(talk.actions),
        "turn_replies": list(talk.replies),
        "turn_metrics": dict(talk.metrics),
        "end_reason": talk.end_reason,
        "failure": talk.message,
    }


def _padded(rows: Sequence[list[Any]], width: int, fill: float) -> Tensor:
    """Ragged rows as one tensor."""
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])


def state_keys(talk: Conversation, group: int | str) -> list[int]:
    """A key per turn: the environment's, or the actions so far where it gives none."""
    named = [state or repr(talk.actions[:turn]) for turn, state in enumerate(talk.states)]
    return [state_key(group, name, bool(given)) for name, given in zip(named, talk.states)]


@functools.lru_cache(maxsize=100_000)
def state_key(group: int | str, name: str, is_named: bool) -> int:
    """63 bits of (group, name); names and histories never meet."""
    text = f"{group}\0{int(is_named)}\0{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
