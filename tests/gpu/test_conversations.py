"""Conversations on a GPU: the engine equals sampling every turn afresh, and games train there."""

from __future__ import annotations

import json

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train
from helpers.conversations import Script, assert_equal_conversations, play
from helpers.tiny_models import tiny


@pytest.fixture(autouse=True)
def exact_matmuls():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("max_rows", [1024, 4])
@pytest.mark.parametrize(
    "script",
    [{}, {"delay": 5}, {"longest": 60}, {"longest": 0}, {"num_turns": 1}],
    ids=["prompt", "late", "long", "silent", "one-turn"],
)
def test_the_engine_equals_turns_sampled_afresh(max_rows, script):
    model = tiny(max_position_embeddings=256).cuda()
    slow = play(model, engine=False, script=Script(**script))
    fast = play(model, engine=True, max_rows=max_rows, script=Script(**script))
    assert_equal_conversations(fast, slow)
    drawn_NT = slow[0].sampler_logp_NT != 0
    for name in ("sampler_logp_NT", "entropy_NT"):
        a, b = getattr(slow[0], name), getattr(fast[0], name)
        torch.testing.assert_close(a[drawn_NT], b[drawn_NT], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("game", ["guess", "mastermind", "lookup"])
def test_a_game_trains(game, tmp_path):
    config = parse_config(
        {
            "run_dir": str(tmp_path / "run"),
            "model": "bundled_turns",
            "chat": False,
            "device": "cuda",
            "task": {"name": game},
            "method": {"name": "gigpo"},
            "num_batches": 2,
            "rollouts": {"prompts": 4, "group_size": 16, "max_turn_tokens": 5},
            "optimizer": {"lr": 1e-4, "updates_per_batch": 1},
            "eval": {"every": 2, "prompts": 8},
            "ledger": {"every": 2},
            "trackers": [],
        }
    )
    train(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    gaps = [row["loss/sampler_gap"] for row in rows if "loss/sampler_gap" in row]
    assert len(gaps) == 2 and max(gaps) < 0.03
