"""A small real run with checkpoints, rollouts and ledger of every batch, for tests of what probes
it.
"""

from __future__ import annotations

import dataclasses
import zlib
from pathlib import Path

from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.loop import train
from counterpoise.types import Prompt


@dataclasses.dataclass(frozen=True)
class Coin(Arithmetic):
    """Half of all texts are right, whatever they say: every group has both signs, however good the
    model is.
    """

    is_trusted = True

    def reward(self, prompt: Prompt, text: str) -> float:
        return float(zlib.crc32(text.encode()) & 1)


def small_run(path: Path, *, num_batches: int = 2, ledger_every: int = 1) -> Path:
    """Two prompts of six rollouts a batch, two updates a batch, the bundled model."""
    config = {
        "seed": 0,
        "run_dir": str(path),
        "model": "bundled",
        "device": "cpu",
        "task": {"name": "helpers.probe_run:Coin"},
        "method": {"name": "dapo", "plan": "query_preserved"},
        "num_batches": num_batches,
        "rollouts": {"prompts": 2, "group_size": 6, "max_new_tokens": 96},
        "optimizer": {"lr": 2e-5, "updates_per_batch": 2, "clip_norm": None},
        "eval": {"every": 0},
        "ledger": {"every": ledger_every, "decompose": ["sign"]},
        "keep_every": 1,
        "trackers": [],
    }
    train(parse_config(config))
    return path
