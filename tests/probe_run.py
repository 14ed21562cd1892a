"""A small real run with checkpoints, rollouts and ledger of every step, for tests of what probes it."""

from __future__ import annotations

from pathlib import Path

from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train


def small_run(path: Path, *, num_steps: int = 2, ledger_every: int = 1) -> Path:
    """Two prompts of six rollouts a batch, two optimizer steps a batch, bundled model. Seed 1: both prompts of step 1 have both signs."""
    config = {
        "seed": 1,
        "run_dir": str(path),
        "model": "bundled",
        "device": "cpu",
        "task": {"name": "arithmetic"},
        "method": {"name": "dapo", "plan": "query_preserved"},
        "num_steps": num_steps,
        "rollouts": {"prompts": 2, "group_size": 6, "max_new_tokens": 96},
        "optimizer": {"lr": 3e-4, "steps_per_batch": 2, "clip_norm": None},
        "eval": {"every": 0},
        "ledger": {"every": ledger_every, "decompose": ["sign"]},
        "keep_every": 1,
        "trackers": [],
    }
    train(parse_config(config))
    return path
