"""Environments of other packages, where they are installed: played with the real ones."""

from __future__ import annotations

import pickle
import random
import socket
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest

from counterpoise.environments.adapters import OwnRandom
from counterpoise.tasks import task

SERVER = Path(__file__).parents[1] / "helpers" / "openenv_server.py"


def play(environment, prompt, actions):
    episode = environment.start(prompt, seed=0)
    replies = []
    for action in actions:
        replies.append(episode.step(action))
        if replies[-1].is_done:
            break
    return replies


def check_streams(environment):
    """Prompts depend on their place, episodes on their prompt, and the caller's dice stay."""
    random.seed(5)
    before = random.getstate()
    first = list(islice(environment.prompts("train", 0), 4))
    assert list(islice(environment.prompts("train", 0, start=2), 2)) == first[2:]
    assert [p.meta for p in islice(environment.prompts("test", 0), 4)] != [p.meta for p in first]
    assert random.getstate() == before
    with pytest.raises(ValueError, match="unknown split 'tset'. Did you mean 'test'"):
        next(environment.prompts("tset", 0))


@pytest.fixture
def gem_game():
    pytest.importorskip("gem")
    return task("gem:game:GuessTheNumber-v0-easy")


def test_gem_plays_a_guessing_game(gem_game):
    prompt = next(gem_game.prompts("train", 0))
    assert "between 1 and 10" in prompt.text and "guess" in prompt.text.lower()
    numbers = [rf"\boxed{{{number}}}" for number in (5, 5)]
    first, again = play(gem_game, prompt, numbers)
    assert "you guessed 5" in first.text and first.text.endswith("Enter your next guess.")
    assert "already guessed" in again.text and again.reward == 0
    hits = [play(gem_game, prompt, [rf"\boxed{{{n}}}"])[0] for n in range(1, 11)]
    assert [reply.reward for reply in hits if reply.is_done] == [1.0]


def test_gem_streams(gem_game):
    check_streams(gem_game)


def test_two_gem_episodes_do_not_disturb_each_other():
    """2048 draws a tile at every step, from the global dice."""
    pytest.importorskip("gem")
    game = task("gem:game:Game2048-v0-easy")
    prompt = next(game.prompts("train", 0))
    moves = [rf"\boxed{{{move}}}" for move in ("up", "left", "down", "right", "up", "left")]
    alone = play(game, prompt, moves)
    one, two = game.start(prompt, 0), game.start(prompt, 0)
    both = []
    for move in moves[: len(alone)]:
        random.seed(len(both))  # and the caller's dice do not matter
        both.append((one.step(move), two.step(move)))
    assert both == [(reply, reply) for reply in alone]


def test_gem_names_its_environments():
    pytest.importorskip("gem")
    with pytest.raises(ValueError, match="gem has no environment 'game:Wordel-v0-easy'. Did you"):
        task("gem:game:Wordel-v0-easy")


@pytest.fixture
def textarena_game():
    pytest.importorskip("textarena")
    return task("textarena:GuessTheNumber-v0")


def test_textarena_plays_a_guessing_game(textarena_game):
    prompt = next(textarena_game.prompts("train", 0))
    assert "You are playing Guess The Number" in prompt.text
    first, second = play(textarena_game, prompt, ["[5]", "[6]"])
    # the own action is not repeated, nor what was said before
    assert first.text in ("The target number is higher.", "The target number is lower.")
    assert "[6]" not in second.text and "playing" not in second.text
    ends = [play(textarena_game, prompt, [f"[{number}]"])[0] for number in range(1, 21)]
    assert [reply.reward for reply in ends if reply.is_done] == [1.0]


def test_textarena_streams(textarena_game):
    check_streams(textarena_game)


def test_textarena_refuses_games_for_two():
    pytest.importorskip("textarena")
    with pytest.raises(ValueError, match="textarena:TicTacToe-v0 cannot be played by one player"):
        next(task("textarena:TicTacToe-v0").prompts("train", 0))


def test_own_random_also_keeps_numpys_dice():
    numpy = pytest.importorskip("numpy")
    own = OwnRandom()
    numpy.random.seed(0)
    outside = numpy.random.get_state()[1].tolist()
    with own.swap():
        numpy.random.seed(3)
        first = numpy.random.rand()
    assert numpy.random.get_state()[1].tolist() == outside
    with own.swap():
        second = numpy.random.rand()
    alone = numpy.random.RandomState(3)
    assert [first, second] == [alone.rand(), alone.rand()]


@pytest.mark.parametrize(
    ("name", "install"),
    [
        ("gem:game:Wordle-v0", "gem-llm"),
        ("textarena:Wordle-v0", "textarena"),
        ("verifiers:wordle", r"'verifiers\[all\]<0.4'"),
        ("openenv:http://localhost:1", "openenv-core"),
    ],
)
def test_a_missing_package_is_one_line(name, install, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"^{name} needs the package '.*': pip install {install}$"):
        task(name)


@pytest.fixture(scope="module", params=["", "ignores_seeds"])
def openenv_url(request):
    pytest.importorskip("openenv")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVER), str(port), *filter(None, [request.param])]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_for(port, server)
        yield f"openenv:http://127.0.0.1:{port}", bool(request.param)
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_for(port, server):
    for _ in range(600):
        assert server.poll() is None, "the server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("the server did not answer within a minute")


def test_openenv_plays_on_a_server_that_honours_seeds(openenv_url):
    url, ignores_seeds = openenv_url
    game = task(url)
    prompt = next(game.prompts("train", 0))
    assert prompt.text.startswith("Guess the last digit of my number, which begins ")
    if ignores_seeds:
        with pytest.raises(ValueError, match="two resets with the seed .* began differently"):
            game.start(prompt, 0)
        return
    check_streams(game)
    replies = play(game, prompt, map(str, range(10)))
    assert replies == play(game, prompt, map(str, range(10)))
    assert [reply.text for reply in replies] == ["no"] * (len(replies) - 1) + ["yes"]
    assert [reply.reward for reply in replies] == [0.0] * (len(replies) - 1) + [1.0]
    assert replies[-1].is_done
    with pytest.raises(ValueError, match=r"no field 'words', it has .*text"):
        next(task(url, observation="words").prompts("train", 0))


VERIFIERS_GAME = """
import verifiers as vf
from datasets import Dataset

class Digits(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        is_hit = messages[-1].content == state["answer"]
        reply = [{"role": "user", "content": "yes" if is_hit else f"no {state['tries']}"}]
        if is_hit:
            state["final_env_response"] = reply
        return reply

def hit(completion, answer, **kwargs):
    said = [m for m in completion if getattr(m, "role", None) == "assistant"]
    return 1.0 if said[-1].content == answer else 0.0

def speed(state, **kwargs):
    return 1 / state["tries"]

def load_environment(turns=4):
    rows = [{"question": f"My digit? {n}", "answer": str(n)} for n in range(10)]
    rubric = vf.Rubric(funcs=[hit, speed], weights=[1.0, 0.5])
    return Digits(
        dataset=Dataset.from_list(rows), rubric=rubric, system_prompt="Guess.", max_turns=turns
    )
"""


@pytest.fixture
def verifiers_game(tmp_path, monkeypatch):
    vf = pytest.importorskip("verifiers")
    if not hasattr(vf, "MultiTurnEnv"):
        pytest.skip("this version of verifiers has no multi-turn environments")
    (tmp_path / "digits_of_ours.py").write_text(VERIFIERS_GAME)
    monkeypatch.syspath_prepend(tmp_path)
    return task("verifiers:digits-of-ours", turns=3)


def test_verifiers_plays_and_its_rubric_pays_at_the_end(verifiers_game):
    prompt = next(verifiers_game.prompts("train", 0))
    assert prompt.text == f"Guess.\n\nMy digit? {prompt.answer}"
    replies = play(verifiers_game, prompt, ["x", prompt.answer])
    assert [reply[:3] for reply in replies] == [("no 1", 0.0, False), ("yes", 1.25, True)]
    assert replies[-1].metrics["hit"] == 1.0 and replies[-1].metrics["speed"] == 0.5
    # the last turn is not answered: two tries were counted
    lost = play(verifiers_game, prompt, ["x", "y", "z"])
    assert [reply[:3] for reply in lost] == [
        ("no 1", 0, False),
        ("no 2", 0, False),
        ("", 0.25, True),
    ]


def test_verifiers_streams_and_pickles(verifiers_game):
    check_streams(verifiers_game)
    again = pickle.loads(pickle.dumps(verifiers_game))
    assert next(again.prompts("test", 1)) == next(verifiers_game.prompts("test", 1))
