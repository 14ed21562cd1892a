"""The exact advantage of every turn of some conversations in a built-in game.

Given the secret it is what the rollouts of one prompt can tell; over the belief it is what a player
can know. Axes: H histories, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from counterpoise.environments.games import Game
from counterpoise.environments.values import History, Tree, outcomes, tree, values
from counterpoise.probes.output import Columns
from counterpoise.rollouts import Conversation
from counterpoise.types import Prompt

# how likely a policy plays each action after each of the tree's histories: probability_HA
Plays = Callable[[Prompt, Tree], Tensor]


class Exact(NamedTuple):
    """Advantages by history; the actions are those of the columns."""

    row_of: dict[History, int]
    actions: tuple[str, ...]
    advantage_HA: Tensor
    value_H: Tensor

    def at(self, history: History, action: str) -> tuple[float, float]:
        """Advantage of the action and value before it; NaN where there is no such turn."""
        row = self.row_of.get(history)
        if row is None or action not in self.actions:
            return np.nan, np.nan
        return float(self.advantage_HA[row, self.actions.index(action)]), float(self.value_H[row])


def turn_values(
    game: Game[Any, Any],
    prompts: Sequence[Prompt],
    group: Sequence[int],
    conversations: Sequence[Conversation],
    plays: Plays,
    most: int,
) -> Columns:
    """One row per turn: the advantage of its action and the value before it, given the secret and
    over the belief.

    Args:
        prompts: one per group; ``group`` is one per conversation.
        plays: the policy.
        most: a belief that leaves more histories than this is left out (NaN).
    """
    rows = []
    known = cache(lambda g: exact(game, prompts[g], plays, is_secret_known=True))
    believed = cache(lambda text: _belief(game, _first(prompts, text), plays, most))
    for rollout, (g, talk) in enumerate(zip(group, conversations)):
        for turn, action in enumerate(talk.actions):
            history = tuple(zip(talk.actions[:turn], talk.replies[:turn]))
            one, other = known(g), believed(prompts[g].text)
            advantage, value = one.at(history, action)
            belief = (np.nan, np.nan) if other is None else other.at(history, action)
            rows.append((g, rollout, turn, advantage, value, *belief))
    names = ("group", "rollout", "turn", "advantage", "value", "belief", "belief_value")
    return {name: np.array(column) for name, column in zip(names, zip(*rows))}


def exact(game: Game[Any, Any], prompt: Prompt, plays: Plays, *, is_secret_known: bool) -> Exact:
    """All histories of a prompt with the policy's advantages."""
    histories = tree(game, prompt, is_secret_known=is_secret_known)
    out = values(histories, plays(prompt, histories))
    row_of = {history: row for row, history in enumerate(histories.histories)}
    return Exact(row_of, histories.actions, out.advantage_HA, out.value_H)


def num_histories(game: Game[Any, Any], prompt: Prompt, most: int) -> int:
    """How many histories the belief leaves, counted by states, and no further than above ``most``.

    >>> from counterpoise.environments.guess import Guess
    >>> num_histories(Guess(n=8, turns=3), Guess(n=8, turns=3).prompt(5), most=1000)
    155
    """
    total, level = 1, {game.first(prompt): 1}
    while level and total <= most:
        ahead: dict[Any, int] = {}
        for state, num in level.items():
            for action in game.actions:
                for _, reply, after in outcomes(game, state, action):
                    if not reply.is_done:
                        ahead[after] = ahead.get(after, 0) + num
                        total += num
            if total > most:
                break
        level = ahead
    return total


def remembered(plays: Plays) -> Plays:
    """The same, with every history of a prompt's text asked for once."""
    known: dict[tuple[str, History], Tensor] = {}

    def ask(prompt: Prompt, histories: Tree) -> Tensor:
        new = [h for h in histories.histories if (prompt.text, h) not in known]
        if new:
            probability_HA = plays(prompt, histories._replace(histories=new))
            known.update(((prompt.text, h), row_A) for h, row_A in zip(new, probability_HA))
        return torch.stack([known[prompt.text, h] for h in histories.histories])

    return ask


def _belief(game: Game[Any, Any], prompt: Prompt, plays: Plays, most: int) -> Exact | None:
    if num_histories(game, prompt, most) > most:
        return None
    return exact(game, prompt, plays, is_secret_known=False)


def _first(prompts: Sequence[Prompt], text: str) -> Prompt:
    return next(prompt for prompt in prompts if prompt.text == text)
