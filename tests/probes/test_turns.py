"""Credit of turns against exact advantages: all groups of a small game counted, by hand, and
through the command.
"""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

import counterpoise as cp
from counterpoise.cli import run_command
from counterpoise.environments.guess import Guess
from counterpoise.environments.lookup import Lookup
from counterpoise.environments.mastermind import Mastermind
from counterpoise.environments.values import tree
from counterpoise.maths.turns import turns
from counterpoise.probes import open_scene
from counterpoise.probes.methods import methods_of
from counterpoise.probes.turn_values import num_histories, remembered, turn_values
from counterpoise.probes.turns import (
    METHODS,
    check_game,
    scene_credits,
    scene_values,
    turn_credits,
    turn_numbers,
)
from counterpoise.rollouts import Conversation
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.trainer.config import ConfigError, parse_config
from counterpoise.trainer.loop import train

GAME = Guess(n=3, turns=2)


def likes(history, action):
    """How much the policy likes an action: another number for every history."""
    return 1 + sum(ord(letter) for turn in history for part in turn for letter in part) % 5 / (
        1 + GAME.actions.index(action)
    )


def plays(prompt, histories):
    liking_HA = torch.tensor(
        [[likes(h, a) for a in histories.actions] for h in histories.histories], dtype=torch.float64
    )
    return liking_HA / liking_HA.sum(1, keepdim=True)


def ways(prompt):
    """Every conversation about a prompt: actions, replies, rewards, probability."""
    open_ways, out = [((), (), (), 1.0)], []
    while open_ways:
        actions, replies, rewards, chance = open_ways.pop()
        history = tuple(zip(actions, replies))
        whole = sum(likes(history, action) for action in GAME.actions)
        for action in GAME.actions:
            episode = GAME.start(prompt, 0)
            reply = [episode.step(one) for one in (*actions, action)][-1]
            way = (
                (*actions, action),
                (*replies, reply.text),
                (*rewards, reply.reward),
                chance * likes(history, action) / whole,
            )
            (out if reply.is_done else open_ways).append(way)
    return out


@pytest.fixture(scope="module")
def counted():
    """All groups of two rollouts, for every secret: a batch, its exact values, and how likely each
    group is.
    """
    groups = [
        (secret, pair)
        for secret in (1, 2, 3)
        for pair in itertools.product(ways(GAME.prompt(secret)), repeat=2)
    ]
    prompts = [GAME.prompt(secret) for secret, _ in groups]
    rows = [way for _, pair in groups for way in pair]
    group = [g for g in range(len(groups)) for _ in range(2)]
    talks = [Conversation(actions, replies) for actions, replies, _, _ in rows]
    table = pd.DataFrame(turn_values(GAME, prompts, group, talks, remembered(plays), most=100))
    chance_P = np.array([pair[0][3] * pair[1][3] / 3 for _, pair in groups])
    return batch_of(rows, group), table.assign(weight=chance_P[table["group"]])


def batch_of(rows, group):
    width = max(len(actions) for actions, *_ in rows)
    reward_NU = torch.tensor(
        [[*rewards, *[0.0] * (width - len(rewards))] for *_, rewards, _ in rows],
        dtype=torch.float64,
    )
    turn_NU = torch.tensor([[u if u < len(w[0]) else -1 for u in range(width)] for w in rows])
    turn_NT = torch.stack([turn_NU, torch.full_like(turn_NU, -1)], 2).flatten(1)[:, :-1]
    said = [[f"{a};", r] for actions, replies, *_ in rows for a, r in zip(actions, replies)]
    ids = {text: k for k, text in enumerate(dict.fromkeys(t for pair in said for t in pair))}
    tokens = [
        [ids[text] for a, r in zip(*way[:2]) for text in (f"{a};", r)][: 2 * width - 1]
        for way in rows
    ]
    return cp.TokenBatch(
        token_ids_NT=torch.tensor([row + [0] * (2 * width - 1 - len(row)) for row in tokens]),
        mask_NT=turn_NT >= 0,
        group_N=torch.tensor(group),
        reward_N=reward_NU.sum(1),
        sampler_logp_NT=torch.zeros(turn_NT.shape, dtype=torch.float64),
        turn_NT=turn_NT,
        turn_reward_NU=reward_NU,
        turn_mask_NU=turn_NU >= 0,
    )


def numbers_of(counted, **methods):
    batch, values = counted
    credits = {label: method.assign(batch).credit_NT for label, method in methods.items()}
    keys = ["group", "rollout", "turn"]
    return turn_numbers(values.merge(pd.DataFrame(turn_credits(batch, credits)), on=keys))


def test_unbiased_rules_have_slope_1_at_every_turn(counted):
    """Given the secret and over the belief; the others do not."""
    numbers = numbers_of(
        counted,
        turn_rloo=cp.method("turn_rloo"),
        over_all=cp.method("turn_rloo", credit={"over": "all"}),
        rloo=cp.method("rloo"),
        dr_grpo=cp.method("dr_grpo"),
        index=cp.method("turn_rloo", credit=["turn_index_baseline"]),
    )
    assert numbers["num_left_out"] == 0 and numbers["has_belief"]
    for label in ("turn_rloo", "over_all", "rloo"):
        one = numbers["rules"][label]
        slopes = [one["slope"], one["slope_belief"], *one["slope_by_turn"].values()]
        assert [number["mean"] for number in slopes] == pytest.approx([1.0] * 4, abs=2e-6)
    half = numbers["rules"]["dr_grpo"]
    assert half["slope"]["mean"] == pytest.approx(1 / 2, abs=2e-6)
    assert half["correlation"]["mean"] == numbers["rules"]["rloo"]["correlation"]["mean"]
    assert half["variance"]["mean"] == pytest.approx(numbers["rules"]["rloo"]["variance"]["mean"])
    first, second = numbers["rules"]["index"]["slope_by_turn"].values()
    assert abs(first["mean"] - second["mean"]) > 0.1


def test_the_exact_advantage_itself_is_perfect(counted):
    batch, values = counted
    table = values.assign(**{"rule/exact": 3 * values["advantage"], "rule/noise": 1.0})
    numbers = turn_numbers(table)["rules"]
    assert numbers["exact"]["correlation"]["mean"] == pytest.approx(1)
    assert numbers["exact"]["slope"]["mean"] == pytest.approx(3)
    assert numbers["exact"]["variance"]["mean"] == pytest.approx(0, abs=1e-12)
    assert numbers["noise"]["correlation"]["mean"] is None


def test_advantages_have_mean_0(counted):
    """Over the actions of each history, the secret given or not."""
    _, values = counted
    means = (
        values[["advantage", "belief"]].mul(values["weight"], axis=0).groupby(values["turn"]).sum()
    )
    assert np.abs(means.to_numpy()).max() < 1e-12


def test_exact_values_by_hand():
    """One guess among two numbers, the first with probability .3: it is right or not."""
    game = Guess(n=2, turns=1)

    def third(prompt, histories):
        return torch.tensor([[0.3, 0.7]]).expand(len(histories.histories), 2)

    talks = [Conversation(("1",), ("=",)), Conversation(("x",), ("?",))]
    table = turn_values(game, [game.prompt(1)], [0, 0], talks, third, most=10)
    assert table["advantage"][0] == pytest.approx(0.7) and table["value"][0] == pytest.approx(0.3)
    assert table["belief"][0] == pytest.approx(0) and table["belief_value"][0] == pytest.approx(0.5)
    assert math.isnan(table["advantage"][1]), "a malformed action is no turn of the game"
    few = turn_values(game, [game.prompt(1)], [0, 0], talks, third, most=0)
    assert np.isnan(few["belief"]).all() and few["advantage"][0] == pytest.approx(0.7)


def test_each_history_is_asked_once():
    asked = []

    def ask(prompt, histories):
        asked.extend(histories.histories)
        return plays(prompt, histories)

    again = remembered(ask)
    prompts = [GAME.prompt(secret) for secret in (1, 2)]
    for prompt in prompts:
        histories = tree(GAME, prompt, is_secret_known=True)
        assert torch.equal(again(prompt, histories), plays(prompt, histories))
    assert (
        len(asked) == len(set(asked)) == 4
    )  # nothing, 2<, 3< of the first; of the second 1> is new


@pytest.mark.parametrize("game", [Guess(n=5, turns=3), Mastermind(letters=2, places=2), Lookup(2)])
def test_histories_are_counted_without_making_them(game):
    prompt = next(iter(game.prompts("train", 0)))
    num = len(tree(game, prompt).histories)
    assert num_histories(game, prompt, most=10_000) == num
    assert num_histories(game, prompt, most=10) > 10


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """One batch of a small game by the start for games, trained with GiGPO."""
    path = tmp_path_factory.mktemp("runs") / "guess"
    config = {
        "run_dir": str(path),
        "model": "bundled_turns",
        "device": "cpu",
        "chat": False,
        "task": {"name": "guess", "n": 16, "turns": 2},
        "method": "gigpo",
        "num_batches": 1,
        "rollouts": {
            "prompts": 4,
            "group_size": 12,
            "max_new_tokens": 12,
            "max_turns": 2,
            "max_row_tokens": 32,
        },
        "optimizer": {"updates_per_batch": 1},
        "eval": {"every": 0},
        "ledger": {"every": 0},
        "keep_every": 1,
        "trackers": [],
    }
    train(parse_config(config))
    return path


def test_through_the_command(run_dir, capsys):
    """Every default rule has its numbers; credit is that of the method on the saved batch."""
    with pytest.raises(SystemExit) as end:
        run_command("probe", [str(run_dir), "--probe", "turns"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "turns against their exact advantage" in printed and "gigpo" in printed
    summary = json.loads(
        (run_dir / "probes" / "turns" / "batch_000000" / "summary.json").read_text()
    )
    rules = summary["numbers"]["rules"]
    assert set(rules) == set(methods_of(METHODS)) and summary["numbers"]["has_belief"]
    assert all(one["slope"]["mean"] is not None for one in rules.values())
    scene = open_scene(run_dir, 0)
    values = pd.DataFrame(scene_values(scene, 1000))
    batch = scene.collected.batch
    assert len(values) == int(turns(batch).mask_NU.sum())
    hit = values["turn"].eq(0) & (batch.reward_N[values["rollout"]].numpy() == 1)
    first = hit & (turns(batch).mask_NU.sum(1)[values["rollout"]].numpy() == 1)
    assert first.any() and (values["advantage"][first] > 0).all(), "a hit is worth 1, V is less"
    credits = pd.DataFrame(scene_credits(scene, "gigpo"))
    expected_NU = scene.method.assign(batch).advantage_NU
    np.testing.assert_allclose(
        credits["rule/gigpo"], expected_NU[turns(batch).mask_NU].double(), rtol=1e-5, atol=1e-6
    )


def test_scores_are_in_the_folder(run_dir):
    """1 over the numbers that are left, and 1 for the hit."""
    batch = open_scene(run_dir, 0).collected.batch
    score_NU, mask_NU = batch.turn_score_NU, batch.turn_mask_NU
    assert not score_NU[mask_NU].isnan().any() and score_NU[~mask_NU].isnan().all()
    is_end_NU = mask_NU & (mask_NU.cumsum(1) == mask_NU.sum(1, keepdim=True))
    assert torch.equal(score_NU[is_end_NU], batch.reward_N)
    assert ((score_NU[mask_NU & ~is_end_NU] > 0) & (score_NU[mask_NU & ~is_end_NU] < 1)).all()


@pytest.mark.parametrize("method", ["igpo", "turn_credit"])
def test_methods_that_read_scores_need_an_environment(method, tmp_path):
    with pytest.raises(ConfigError, match="reads a score of the state after each turn"):
        train(parse_config({"run_dir": str(tmp_path), "method": method, "model": "nowhere"}))


def test_tasks_without_exact_values_are_refused(run_dir):
    scene = open_scene(run_dir, 0)
    plain = scene._replace(task=Arithmetic())
    with pytest.raises(ValueError, match="has no exact values. Take a run of a game that has"):
        check_game(plain)
    cut = scene.config.model_copy(
        update={"rollouts": scene.config.rollouts.model_copy(update={"max_turns": 1})}
    )
    with pytest.raises(ValueError, match="max_turns 1 ends episodes of 2 turns early"):
        check_game(scene._replace(config=cut))
