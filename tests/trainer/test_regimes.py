"""The recipes of docs/results/regimes.md: each trains, and its start is what the page says."""

from __future__ import annotations

import json
import math

import pytest
import torch

from counterpoise.maths.trie import prefix_nodes
from counterpoise.policy import load_model
from counterpoise.policy.load import BUNDLED
from counterpoise.tasks import task
from counterpoise.trainer.collect import RolloutSampler
from counterpoise.trainer.config import Config, load_config
from counterpoise.trainer.loop import train
from counterpoise.types import RolloutBatch

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
