"""Fresh ends of responses from many places at once, in few calls of the sampler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from counterpoise.policy import Policy
from counterpoise.sampling import branch, sample_from
from counterpoise.trainer.config import Rollouts as Settings

MAX_ROWS = 1024  # rows in flight, where the recipe does not say
SPREAD = 4  # prefixes in one call differ in length by at most the limit of tokens over this


class State(NamedTuple):
    """A place in a response: the ids of the prompt and of the response up to there."""

    prompt_ids: list[int]
    prefix_ids: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.prefix_ids)


class Ends(NamedTuple):
    """Whole responses (``answers``, token ids), the number of the state that each goes on from,
    and how many tokens were drawn.
    """

    answers: list[list[int]]
    source: list[int]
    num_tokens: int


def complete_states(
    policy: Policy,
    states: Sequence[State],
    samples: int,
    settings: Settings,
    seed: Callable[[int], int],
) -> Ends:
    """``samples`` responses from every state, drawn as the rollouts are and no longer than they may
    be; ``seed`` gives that of the k-th call.
    """
    limit = settings.max_new_tokens
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    answers, source, num_tokens = [], [], 0
    for part, chosen in enumerate(alike(states, limit, positions)):
        fresh = sample_from(
            policy,
            [states[k].prompt_ids for k in chosen],
            [states[k].prefix_ids for k in chosen],
            samples,
            by=branch,
            max_new_tokens=room(states, chosen, limit),
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_rows=settings.max_rows or MAX_ROWS,
            seed=seed(part),
        )
        num_tokens += int(fresh.mask_NT.sum())
        source += [chosen[k] for k in fresh.prompt_index_N.tolist()]
        new = [
            ids[keep].tolist() for ids, keep in zip(fresh.token_ids_NT.cpu(), fresh.mask_NT.cpu())
        ]
        owners = source[len(answers) :]
        answers += [(states[k].prefix_ids + ids)[:limit] for k, ids in zip(owners, new)]
    return Ends(answers, source, num_tokens)


def alike(states: Sequence[State], limit: int, positions: int | None) -> list[list[int]]:
    """States of similar length together: a call draws up to what the shortest prefix has left, of
    which others throw the rest away, and that must fit the model's positions.

    >>> states = [State([1], [5] * num) for num in (0, 1, 7, 8)]
    >>> alike(states, limit=10, positions=None)
    [[0, 1], [2, 3]]
    >>> alike(states, limit=10, positions=11)
    [[0], [1], [2], [3]]
    """
    order = sorted(range(len(states)), key=lambda k: (len(states[k].prefix_ids), k))

    def parts(chosen: list[int]) -> list[list[int]]:
        shortest, longest = (len(states[chosen[at]].prefix_ids) for at in (0, -1))
        drawn = room(states, chosen, limit)
        fits = positions is None or max(states[k].length for k in chosen) + drawn <= positions
        if shortest == longest or (fits and longest - shortest <= limit / SPREAD):
            return [chosen]
        middle = (shortest + longest) / 2
        cut = sum(len(states[k].prefix_ids) <= middle for k in chosen)
        return parts(chosen[:cut]) + parts(chosen[cut:])

    return parts(order)


def room(states: Sequence[State], chosen: Sequence[int], limit: int) -> int:
    """Tokens that the shortest of the chosen prefixes has left."""
    return limit - min(len(states[k].prefix_ids) for k in chosen)
