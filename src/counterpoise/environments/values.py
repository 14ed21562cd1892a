"""Exact values of the built-in games: of the best player, and of any policy.

A policy is a table of probabilities, one per history and action. Every history is scored once; then
rewards are added up backwards. Over the belief the secret is as likely as the history leaves it;
given the secret the values are what a group of rollouts of one prompt estimates.

Axes: H histories, A actions, E outcomes of an action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.environments import Reply
from counterpoise.environments.games import Game, Secret, State
from counterpoise.types import Prompt

# (action, reply) of each turn so far
History = tuple[tuple[str, str], ...]
STOP = ";"  # ends a turn of the models that come with the package


def outcomes(
    game: Game[Secret, State], state: State, action: str, secret: Secret | None = None
) -> list[tuple[float, Reply, State]]:
    """What may follow an action: the chance of every reply, the reply and the state after it.

    Args:
        secret: of the episode; None takes all that are possible, each as likely as another.

    >>> from counterpoise.environments.guess import Guess, Interval
    >>> [out[:2] for out in outcomes(Guess(n=4), Interval(1, 4, 3), "1")]  # doctest: +ELLIPSIS
    [(0.25, Reply(text='=', reward=1.0, ...)), (0.75, Reply(text='>', reward=0.0, ...))]
    """
    secrets = list(game.possible(state, action)) if secret is None else [secret]
    chance: dict[str, float] = {}
    after: dict[str, tuple[Reply, State]] = {}
    for one in secrets:
        reply, state_after = game.answer(one, state, action)
        chance[reply.text] = chance.get(reply.text, 0) + 1 / len(secrets)
        after[reply.text] = reply, state_after
    return [(chance[text], *after[text]) for text in after]


def state_values(
    game: Game[Secret, State],
    first: State,
    policy: Callable[[State], Mapping[str, float]] | None = None,
) -> dict[State, float]:
    """What a player earns who plays by the state alone, from every state that may follow ``first``
    and from ``first`` itself.

    Args:
        policy: the probability of each action; None is the best player.

    >>> from counterpoise.environments.guess import Guess, Interval
    >>> state_values(Guess(), Interval(1, 16, 4))[1, 16, 4]
    0.9375
    """
    values: dict[State, float] = {}

    def value(state: State) -> float:
        if state not in values:
            if policy is None:
                values[state] = max(action_value(state, action) for action in game.actions)
            else:
                shares = policy(state).items()
                values[state] = sum(share * action_value(state, act) for act, share in shares)
        return values[state]

    def action_value(state: State, action: str) -> float:
        return sum(
            chance * (reply.reward + (0 if reply.is_done else value(after)))
            for chance, reply, after in outcomes(game, state, action)
        )

    value(first)
    return values


class Tree(NamedTuple):
    """Every history of an episode in which a player may be asked for an action.

    Args:
        histories: the shortest first; H of them.
        states: of each history.
        actions: A of them.
        history_E, action_E: what an outcome follows.
        chance_E, reward_E: of an outcome.
        next_E: the history after it, -1 at the end.
    """

    histories: list[History]
    states: Sequence[tuple[object, ...]]
    actions: tuple[str, ...]
    history_E: Tensor
    action_E: Tensor
    chance_E: Tensor
    reward_E: Tensor
    next_E: Tensor


def tree(game: Game[Secret, State], prompt: Prompt, *, is_secret_known: bool = False) -> Tree:
    """All histories of legal actions from a prompt on, over the belief or given its secret.

    >>> from counterpoise.environments.guess import Guess
    >>> game = Guess(n=8, turns=3)
    >>> len(tree(game, game.prompt(5)).histories)
    155
    """
    secret = game.secret(prompt) if is_secret_known else None
    histories: list[History] = [()]
    states = [game.first(prompt)]
    rows: list[tuple[int, int, float, float, int]] = []
    ahead = cache(lambda state, action: outcomes(game, state, action, secret))
    for number, state in enumerate(states):  # grows while it is read
        for at, action in enumerate(game.actions):
            for chance, reply, after in ahead(state, action):
                next_ = -1 if reply.is_done else len(states)
                rows.append((number, at, chance, reply.reward, next_))
                if not reply.is_done:
                    histories.append((*histories[number], (action, reply.text)))
                    states.append(after)
    table_E5 = torch.tensor(rows, dtype=torch.float64)
    history_E, action_E, next_E = table_E5[:, [0, 1, 4]].long().unbind(1)
    return Tree(
        histories, states, game.actions, history_E, action_E, table_E5[:, 2], table_E5[:, 3], next_E
    )


class Values(NamedTuple):
    """What a policy earns from each history on, and what each action adds to that."""

    value_H: Tensor
    action_value_HA: Tensor
    advantage_HA: Tensor


def values(tree: Tree, probability_HA: Tensor) -> Values:
    """Exact values of a policy: ``V(h) = sum_a p(a|h) Q(h, a)``, ``A = Q - V``.

    Args:
        probability_HA: of each legal action after each history. What a row lacks to 1 (malformed
            actions) counts as an episode that ends there and earns nothing.

    >>> from counterpoise.environments.guess import Guess
    >>> game = Guess(n=8, turns=3)
    >>> histories = tree(game, game.prompt(5))
    >>> blind_HA = torch.full((len(histories.histories), 8), 1 / 8)
    >>> round(values(histories, blind_HA).value_H[0].item(), 3)
    0.33
    """
    probability_HA = probability_HA.double()
    num_actions = len(tree.actions)
    length_H = torch.tensor([len(history) for history in tree.histories])
    length_E, cell_E = length_H[tree.history_E], tree.history_E * num_actions + tree.action_E
    action_value_HA = torch.zeros(len(tree.histories), num_actions, dtype=torch.float64)
    value_H = torch.zeros(len(tree.histories), dtype=torch.float64)
    for length in range(int(length_H.max()), -1, -1):
        of_E, of_H = length_E == length, length_H == length
        next_E = tree.next_E[of_E]
        future_E = torch.where(next_E >= 0, value_H[next_E.clamp_min(0)], 0.0)
        worth_E = tree.chance_E[of_E] * (tree.reward_E[of_E] + future_E)
        action_value_HA.view(-1).index_add_(0, cell_E[of_E], worth_E)
        value_H[of_H] = (probability_HA * action_value_HA)[of_H].sum(1)
    return Values(value_H, action_value_HA, action_value_HA - value_H[:, None])


def transcript(prompt: Prompt, history: History) -> str:
    """What a model has read after a history: the prompt, and every turn with its reply.

    >>> transcript(Prompt("", "1-g:"), (("8", "<"), ("4", ">")))
    '1-g:8;<4;>'
    """
    return prompt.text + "".join(f"{action}{STOP}{reply}" for action, reply in history)
