"""A run whose rollouts have turns, made by the trainer itself."""

from __future__ import annotations

from pathlib import Path

from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train

TINY = {
    "model": "bundled_turns",
    "chat": False,
    "method": {"name": "turn_rloo"},
    "num_batches": 2,
    "rollouts": {
        "prompts": 4,
        "group_size": 4,
        "max_turns": 4,
        "max_turn_tokens": 4,
        "max_new_tokens": 16,
        "max_row_tokens": 200,
    },
    "optimizer": {"updates_per_batch": 2},
    "eval": {"every": 2, "prompts": 4},
    "ledger": {"every": 2},
}


def turns_run(folder: Path, task: dict[str, object], **keys: object) -> Path:
    """The folder of a tiny run with an environment; batch 0 has a ledger, batch 1 has none."""
    train(parse_config({**TINY, "task": task, "run_dir": str(folder), **keys}))
    return folder
