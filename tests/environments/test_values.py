"""Exact values: every number of the guide on environments, and two ways to get it."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch

from counterpoise.environments.guess import DIGITS, Guess
from counterpoise.environments.lookup import ANSWERS, Lookup
from counterpoise.environments.mastermind import Mastermind
from counterpoise.environments.values import outcomes, state_values, transcript, tree, values

PROMPTS = {
    Guess(): Guess().prompt(5),
    Guess(n=8, turns=3): Guess(n=8, turns=3).prompt(5),
    Mastermind(): Mastermind().prompt("abc"),
    Lookup(letters=3): Lookup(letters=3).prompt("ac", "407"),
}


def evenly(actions):
    return dict.fromkeys(actions, 1 / len(actions))


def start_value(game, policy=None):
    prompt = PROMPTS.get(game) or next(game.prompts("train", 0))
    first = game.first(prompt)
    return state_values(game, first, policy)[first]


def table(histories, policy):
    """A policy of the state as probabilities per history."""
    return torch.tensor(
        [
            [policy(state).get(action, 0.0) for action in histories.actions]
            for state in histories.states
        ],
        dtype=torch.float64,
    )


@pytest.mark.parametrize(("n", "turns", "best"), [(16, 4, 15 / 16), (8, 3, 7 / 8), (5, 3, 1)])
def test_the_best_guesser_halves(n, turns, best):
    assert start_value(Guess(n, turns)) == pytest.approx(best) == min(1, (2**turns - 1) / n)


@pytest.mark.parametrize(
    ("n", "turns", "inside", "blind"), [(16, 4, 0.580, 0.228), (8, 3, 0.619, 0.330)]
)
def test_guessers_that_do_not_plan(n, turns, inside, blind):
    game = Guess(n, turns)
    within = start_value(game, lambda state: evenly(DIGITS[state.low - 1 : state.high]))
    assert round(within, 3) == inside
    unread = start_value(game, lambda state: evenly(game.actions))
    assert round(unread, 3) == blind and unread == pytest.approx(1 - (1 - 1 / n) ** turns)


def test_mastermind_players():
    game = Mastermind()
    assert start_value(game) == pytest.approx(26 / 27) and round(26 / 27, 3) == 0.963
    assert start_value(Mastermind(turns=4)) == pytest.approx(1)
    consistent = start_value(game, lambda state: evenly(game.possible(state, "")))
    blind = start_value(game, lambda state: evenly(game.actions))
    assert (round(consistent, 3), round(blind, 3)) == (0.816, 0.107)


def known(state):
    return {letter for letter, _ in state.known} & set(state.asked)


def look_up(most):
    """Look so many of the letters up, then answer as well as can be."""

    def policy(state):
        hidden = [letter for letter in state.asked if letter not in known(state)]
        if hidden and 2 - len(hidden) < most:
            return {hidden[0]: 1.0}
        digits = dict(state.known)
        total = sum(digits.get(letter, 0) for letter in state.asked)
        return {f"!{total % 10}": 1.0}

    return policy


def test_lookup_players():
    game = Lookup(letters=3)
    assert start_value(game) == pytest.approx(0.90)
    assert [start_value(game, look_up(most)) for most in (0, 1, 2)] == pytest.approx(
        [0.1, 0.05, 0.9]
    )


def test_a_needed_look_up_is_worth_nothing_more_and_an_idle_one_its_cost():
    game = Lookup(letters=3)
    first = game.first(PROMPTS[game])
    best = state_values(game, first)

    def advantage(state, action):
        ahead = sum(
            chance * (reply.reward + (0 if reply.is_done else best[after]))
            for chance, reply, after in outcomes(game, state, action)
        )
        return ahead - best[state]

    by_action = {action: advantage(first, action) for action in game.actions}
    assert by_action == pytest.approx(
        {
            **dict.fromkeys("ac", 0),
            **dict.fromkeys("b", -0.05),
            **dict.fromkeys(ANSWERS, 0.1 - best[first]),
        },
        abs=1e-12,
    )
    (_, _, after), *_ = outcomes(game, first, "a")
    assert advantage(after, "a") == pytest.approx(-0.05)


def test_counts_of_histories_and_sets():
    games = Guess(), Guess(n=8, turns=3), Mastermind()
    counts = [len(tree(game, PROMPTS[game]).histories) for game in games]
    assert counts == [13_531, 155, 12_775]
    game = Mastermind(turns=6)
    sets, new = set(), {game.first(PROMPTS[Mastermind()])}
    while new:
        sets |= {state.codes for state in new}
        steps = [out for state in new for act in game.actions for out in outcomes(game, state, act)]
        new = {after for _, reply, after in steps if not reply.is_done and after.codes not in sets}
    assert len(sets) == 662


SMALL = [
    Guess(n=5, turns=3),
    Guess(n=4, turns=3, cost=0.1),
    Mastermind(letters=2),
    Mastermind(letters=2, pay_blacks=True, cost=0.1),
    Lookup(letters=2, turns=3),
]


@pytest.mark.parametrize("game", SMALL, ids=repr)
def test_the_tree_agrees_with_the_states(game):
    prompt = next(game.prompts("train", 0))
    rng = random.Random(0)
    share = {action: rng.random() for action in game.actions}

    def policy(state):
        weight = {action: share[action] + hash((state, action)) % 7 for action in game.actions}
        return {action: one / sum(weight.values()) for action, one in weight.items()}

    histories = tree(game, prompt)
    result = values(histories, table(histories, policy))
    by_state = state_values(game, game.first(prompt), policy)
    for state, value in zip(histories.states, result.value_H.tolist()):
        assert value == pytest.approx(by_state[state])


@pytest.mark.parametrize("game", SMALL[:4], ids=repr)
def test_the_belief_is_the_mean_over_secrets_and_a_secret_is_what_episodes_earn(game):
    """A random policy of the whole history: its value against playing every line of actions."""
    secrets = list(game.possible(game.first(next(game.prompts("train", 0))), ""))
    trees = [tree(game, game.prompt(secret), is_secret_known=True) for secret in secrets]
    both = tree(game, game.prompt(secrets[0]))
    probability_HA = torch.rand(
        len(both.histories), len(game.actions), generator=torch.Generator().manual_seed(1)
    ).double()
    probability_HA /= probability_HA.sum(1, keepdim=True) * 1.1  # a tenth is malformed
    row = {history: probability_HA[at] for at, history in enumerate(both.histories)}
    given = [values(one, torch.stack([row[history] for history in one.histories])) for one in trees]
    mean = sum(one.value_H[0].item() for one in given) / len(secrets)
    assert values(both, probability_HA).value_H[0].item() == pytest.approx(mean)
    played = brute_force(game, game.prompt(secrets[-1]), row)
    assert given[-1].value_H[0].item() == pytest.approx(played)


def brute_force(game, prompt, row):
    """Every sequence of actions played to its end with a real episode."""
    total = 0.0
    for actions in product(range(len(game.actions)), repeat=game.turns):
        episode, history, chance = game.start(prompt, 0), (), 1.0
        for number, at in enumerate(actions):
            chance *= row[history][at].item()
            reply = episode.step(game.actions[at])
            total += chance * reply.reward * len(game.actions) ** -(game.turns - 1 - number)
            history = (*history, (game.actions[at], reply.text))
            if reply.is_done:
                break
    return total


def test_advantages_are_zero_in_the_mean_and_what_an_action_adds():
    game = Guess(n=4, turns=2)
    histories = tree(game, game.prompt(3), is_secret_known=True)
    result = values(histories, torch.full((len(histories.histories), 4), 0.25))
    assert result.advantage_HA.mean(1).tolist() == pytest.approx([0] * len(histories.histories))
    # a hit is worth 1, a miss the one more guess: 1/4; the value is 1/4 + 3/4 * 1/4
    assert result.action_value_HA[0].tolist() == pytest.approx([0.25, 0.25, 1, 0.25])
    assert result.value_H[0].item() == pytest.approx(7 / 16)
    assert transcript(game.prompt(3), histories.histories[-1]) == "1-4:4;<"
