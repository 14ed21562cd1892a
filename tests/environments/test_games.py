"""The built-in environments: what they answer, pay and draw."""

from __future__ import annotations

from collections import Counter
from itertools import islice, product

import pytest

from counterpoise.environments import Environment
from counterpoise.environments.guess import Guess, Interval, narrow
from counterpoise.environments.lookup import Lookup
from counterpoise.environments.mastermind import Mastermind, marks
from counterpoise.tasks import task

GAMES = {"guess": Guess(), "mastermind": Mastermind(), "lookup": Lookup()}


def play(game, prompt, actions):
    episode = game.start(prompt, seed=0)
    return [episode.step(action) for action in actions]


@pytest.mark.parametrize("name", GAMES)
def test_a_game_is_a_task_of_a_recipe_and_an_environment(name):
    assert task(name) == GAMES[name]
    assert isinstance(task(name), Environment) and task(name).is_trusted


@pytest.mark.parametrize("name", GAMES)
def test_a_prompt_depends_on_its_place_alone_and_splits_differ(name):
    game = GAMES[name]
    first = list(islice(game.prompts("train", 3), 60))
    assert list(islice(game.prompts("train", 3, start=40), 20)) == first[40:]
    assert list(islice(game.prompts("test", 3), 60)) != first
    assert list(islice(game.prompts("train", 4), 60)) != first
    with pytest.raises(ValueError, match=f"{name}: unknown split 'tset'. Did you mean 'test'"):
        next(game.prompts("tset", 0))


@pytest.mark.parametrize(("name", "size"), [("guess", 16), ("mastermind", 27)])
def test_each_secret_comes_once_per_deck(name, size):
    prompts = list(islice(GAMES[name].prompts("test", 0, start=size), size))
    assert Counter(prompt.answer for prompt in prompts) == dict.fromkeys(GAMES[name].actions, 1)


@pytest.mark.parametrize("name", GAMES)
def test_an_episode_is_its_actions_and_ends_after_its_turns(name):
    game = GAMES[name]
    prompt = next(game.prompts("train", 0))
    wrong = [action for action in game.actions if action != prompt.answer][: game.turns]
    replies = play(game, prompt, wrong)
    assert replies == play(game, prompt, wrong)
    assert [reply.is_done for reply in replies] == [False] * (game.turns - 1) + [True]
    over = play(game, prompt, [*wrong, prompt.answer])[-1]
    assert over.is_done and over.reward == 0


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("action", ["", "?", "77", "ab", "!", "!10", "z", ";", "é", "7 "])
def test_a_malformed_action_costs_a_turn_and_tells_nothing(name, action):
    game = GAMES[name]
    prompt = next(game.prompts("train", 0))
    (reply,) = play(game, prompt, [action])
    assert reply.text == "?" and not reply.is_done and reply.reward == -game.cost
    assert reply.metrics["malformed"] == 1
    known, _, left = game.first_state(prompt).rpartition("/")
    assert reply.state == f"{known}/{int(left) - 1}"


@pytest.mark.parametrize("name", GAMES)
def test_rows_stay_under_40_characters_and_use_few(name):
    game, seen = GAMES[name], set()
    for prompt, actions in zip(
        islice(game.prompts("train", 0), 50), product(game.actions, repeat=3)
    ):
        longest = max(game.actions, key=len)
        replies = play(game, prompt, [*actions, *[longest] * 4][: game.turns])
        row = prompt.text + "".join(f"{longest};{reply.text}" for reply in replies)
        assert len(row) <= 40
        seen |= set(row)
    assert seen <= set("0123456789abcdefghijklmnopqrstuvwxyz<>=?!+-:;")


@pytest.mark.parametrize("guess", range(1, 7))
@pytest.mark.parametrize(("low", "high"), [(1, 6), (2, 4), (5, 6)])
def test_an_interval_is_the_set_of_numbers_that_would_have_answered_alike(low, high, guess):
    for secret in range(low, high + 1):
        sign = (secret > guess) - (secret < guess)
        alike = [one for one in range(low, high + 1) if (one > guess) - (one < guess) == sign]
        assert narrow(Interval(low, high, 3), secret, guess) == (alike[0], alike[-1], 2)


def test_marks_by_hand():
    by_hand = {("abc", "abc"): (3, 0), ("abc", "cab"): (0, 3), ("aab", "bba"): (0, 2)}
    by_hand |= {("aaa", "abc"): (1, 0), ("abb", "bbc"): (1, 1), ("aab", "ccc"): (0, 0)}
    assert {pair: marks(*pair) for pair in by_hand} == by_hand


def test_blacks_are_paid_once_and_sum_to_one():
    game = Mastermind(pay_blacks=True, turns=5, cost=0.25)
    replies = play(game, game.prompt("abc"), ["acc", "caa", "ccc", "bbc", "abc"])
    paid = [reply.reward + 0.25 for reply in replies]
    assert paid == pytest.approx([2 / 3, 0, 0, 0, 1 / 3])


def test_a_cost_is_paid_every_turn():
    game = Guess(cost=0.05)
    rewards = [reply.reward for reply in play(game, game.prompt(7), ["8", "?", "7"])]
    assert rewards == pytest.approx([-0.05, -0.05, 0.95])


def test_looking_up_costs_and_an_answer_ends():
    game = Lookup()
    prompt = game.prompt("be", "040070")
    replies = play(game, prompt, ["b", "e", "!1"])
    assert prompt.answer == "1"
    assert [reply.text for reply in replies] == ["=4", "=7", "="]
    assert [reply.reward for reply in replies] == [-0.05, -0.05, 1.0]
    assert [reply.score for reply in replies] == [0.5, 1.0, 1.0]
    (wrong,) = play(game, prompt, ["!4"])
    assert wrong.is_done and wrong.reward == 0 and wrong.score == 0


def test_equal_states_of_a_secret_have_equal_futures():
    """All pairs of first turns that end in the same state answer alike from there on."""
    for game in (Guess(n=6, turns=3), Mastermind(letters=2), Lookup(letters=3, turns=3)):
        prompt = next(game.prompts("train", 0))
        futures = {}
        for actions in product(game.actions, repeat=3):
            first, *later = play(game, prompt, actions)
            if not first.is_done:
                futures.setdefault((first.state, actions[1:]), set()).add(repr(later))
        assert max(map(len, futures.values())) == 1
        assert len(futures) < len(game.actions) ** 3  # some states are equal


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"name": "guess", "n": 40}, "guess: n must be a number <= 35, got 40."),
        ({"name": "guess", "turns": 0}, "guess: turns must be a whole number >= 1, got 0."),
        ({"name": "mastermind", "places": 9}, "mastermind: places must be a number <= 4, got 9."),
        ({"name": "lookup", "cost": -1}, "lookup: cost must be a number >= 0, got -1."),
        ({"name": "gues"}, "unknown task 'gues'. Did you mean 'guess'?"),
        ({"name": "guess", "reward": "math:sqrt"}, "task 'guess' pays its own rewards"),
    ],
)
def test_a_wrong_setting_is_one_line(settings, line):
    with pytest.raises(ValueError, match="^" + line.replace("?", r"\?")):
        task(**settings)
