"""The recipes of docs/results/regimes.md: each trains, and its start is what the page says."""

from __future__ import annotations

import json
import math

import pytest
import torch

from counterpoise.arena.batch import bench_of, train_batch
from counterpoise.arena.crew import Crew
from counterpoise.arena.member import Member
from counterpoise.arena.stack import stack_of
from counterpoise.catalogue.registry import method as make_method
from counterpoise.maths.trie import prefix_nodes
from counterpoise.models import BUNDLED
from counterpoise.policy import load_model
from counterpoise.rollouts import RolloutBatch
from counterpoise.tasks import task
from counterpoise.trainer.collect import RolloutSampler
from counterpoise.trainer.config import Config, ConfigError, load_config, parse_config
from counterpoise.trainer.loop import train

SMALL = {
    "task": {"name": "arithmetic", "difficulty": "easy"},
    "rollouts": {"prompts": 3, "group_size": 4, "max_new_tokens": 48},
    "optimizer": {"updates_per_batch": 1},
}
REGIMES = ("fixed_phrasing", "varied_phrasing", "rare_success", "long_answers")


def rollouts_of(config: Config) -> RolloutBatch:
    """One batch of the recipe's start, before training."""
    return RolloutSampler(load_model(config.model), task(**config.task), config, 0).more()


def shared_tokens(rollouts: RolloutBatch, group_size: int) -> float:
    """How many first tokens all answers of a prompt share, mean over prompts."""
    batch = rollouts.batch
    nodes = prefix_nodes(batch.token_ids_NT, batch.mask_NT, batch.group_N)
    return float((nodes.size_NT == group_size).sum() / len(batch.group_N))


@pytest.mark.parametrize("name", REGIMES)
def test_regime_trains_two_batches(name, tmp_path):
    overrides = [
        "num_batches=2",
        f"run_dir={tmp_path / name}",
        "rollouts.prompts=8",
        "rollouts.group_size=4",
        "eval.every=0",
    ]
    result = train(load_config(name, overrides))
    lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert result.is_finished and len(rows) == 2
    assert all(math.isfinite(row["loss/grad_norm"]) for row in rows)
    assert all(row["rollouts/cut_frac"] < 0.1 for row in rows)


def test_one_wording_shares_its_beginning_and_varied_words_do_not():
    overrides = ["rollouts.prompts=16", "rollouts.group_size=4"]
    fixed, varied = (
        rollouts_of(load_config(f"{name}_phrasing", overrides)) for name in ("fixed", "varied")
    )
    # "Let us work it out step by step. Start with 7. Then 7"
    assert shared_tokens(fixed, 4) > 12
    assert shared_tokens(varied, 4) < 2
    entropy = [
        float(one.batch.entropy_NT[one.batch.mask_NT].mean())  # pyright: ignore
        for one in (fixed, varied)
    ]
    assert entropy[0] < 0.15 < 0.25 < entropy[1]


def test_long_answers_have_a_spread_of_lengths_within_a_prompt():
    overrides = ["rollouts.prompts=16", "rollouts.group_size=8"]
    free, varied = (
        rollouts_of(load_config(name, overrides)).batch.mask_NT.sum(1).view(16, 8).float()
        for name in ("long_answers", "varied_phrasing")
    )
    assert free.std(1).mean() > 4 * varied.std(1).mean()
    assert (free.max(1).values / free.min(1).values).median() > 2


def test_a_rare_success_is_rare_and_no_luck():
    config = load_config("rare_success", ["rollouts.prompts=32"])
    rollouts = rollouts_of(config)
    lucky = task(**{**config.task, "grade_steps": False})
    asked = [rollouts.prompts[at] for at in rollouts.batch.group_N.tolist()]
    closing = [lucky.reward(*one) for one in zip(asked, rollouts.texts)]
    assert 0 < rollouts.batch.reward_N.mean() < 0.05
    assert rollouts.batch.reward_N.sum() < sum(closing) / 2  # most right closings are luck


@pytest.mark.parametrize("name", [name for name in BUNDLED if name != "bundled_turns"])
def test_every_bundled_start_has_the_same_tokenizer_and_is_small(name):
    policy, first = load_model(name), load_model("bundled")
    assert policy.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    assert sum(p.numel() for p in policy.model.parameters()) < 800_000
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in policy.model.parameters())


def test_a_forked_group_draws_its_opening_together() -> None:
    plain = parse_config(SMALL)
    forked = parse_config({**SMALL, "rollouts": {**SMALL["rollouts"], "fork_tokens": 6}})
    before, after = rollouts_of(plain).batch, rollouts_of(forked).batch
    groups = after.token_ids_NT.view(3, 4, -1)
    assert (groups[:, :, :6] == groups[:, :1, :6]).all()
    assert all(len(group[:, 6:].unique(dim=0)) > 1 for group in groups)
    torch.testing.assert_close(
        after.sampler_logp_NT.view(3, 4, -1)[:, :, :6],
        after.sampler_logp_NT.view(3, 4, -1)[:, :1, :6].expand(-1, 4, -1),
    )
    firsts = before.token_ids_NT.view(3, 4, -1)[:, 0]
    width = min(firsts.shape[1], groups.shape[2])
    assert (firsts[:, :width] == groups[:, 0, :width]).all()  # the first of each group is as it was


def test_members_of_a_stack_fork_as_the_trainer_does() -> None:
    config = parse_config(
        {**SMALL, "device": "cpu", "rollouts": {**SMALL["rollouts"], "fork_tokens": 6}}
    )
    policy, method = load_model("bundled"), make_method(**config.method)
    crew = Crew(policy, task(**config.task), config, 0)
    outcome = train_batch(bench_of(stack_of(policy.model, 1), crew), [Member(config, method)], 0)
    crew.close()
    texts, batch = outcome.collected.texts, rollouts_of(config).batch
    own = [ids[m].tolist() for ids, m in zip(texts.response_SNT[0], texts.mask_SNT[0])]
    assert own == [ids[m].tolist() for ids, m in zip(batch.token_ids_NT, batch.mask_NT)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollouts": {"fork_tokens": 96}}, "fork_tokens must be below max_new_tokens"),
        (
            {"task": "guess", "rollouts": {"fork_tokens": 2, "max_new_tokens": 8}},
            "turns are drawn apart",
        ),
    ],
)
def test_forks_that_cannot_be_are_refused(tmp_path, changes, message) -> None:
    config = parse_config({"run_dir": str(tmp_path / "run"), **changes})
    with pytest.raises(ConfigError, match=message):
        train(config)
