"""The smallest real run: two prompts of four rollouts of eight tokens, the bundled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train

TINY = {
    "model": "bundled",
    "device": "cpu",
    "task": {"name": "helpers.probe_run:Coin"},
    "num_batches": 2,
    "rollouts": {"prompts": 2, "group_size": 4, "max_new_tokens": 8},
    "optimizer": {"lr": 1e-3, "updates_per_batch": 1},
    "eval": {"every": 0},
    "ledger": {"every": 0},
    "checkpoint_every": 1,
    "trackers": [],
}


def recipe(run_dir: Path, **more: Any) -> dict[str, Any]:
    return {**TINY, "run_dir": str(run_dir), **more}


def go(run_dir: Path, *, resume: bool = False, fresh: bool = False, **more: Any) -> None:
    train(parse_config(recipe(run_dir, **more)), resume=resume, fresh=fresh)
