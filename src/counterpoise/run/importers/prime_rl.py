"""prime-rl's token export, ``token_exports/step_*/rank_*.jsonl`` (its schema_version 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from counterpoise.run.importers.dump import (
    Encode,
    Imported,
    first_true,
    objects,
    require,
    rollout_advantage,
    token_part,
)

NAMES = {  # prime-rl's name -> ours
    "token_ids": "token_ids",
    "loss_mask": "loss_mask",
    "advantages": "credit",
    "inference_logprobs": "sampler_logp",
    "trainer_logprobs": "trainer_logp",
    "entropy": "entropy",
    "importance_ratio": "ratio",
    "is_masked": "is_clipped",
}


def read(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """One object per sequence, every field one value per token of prompt and response."""
    for where, row in objects(files):
        require(where, row, ("token_ids", "loss_mask"))
        start, size = first_true(where, row["loss_mask"]), len(row["token_ids"])
        columns = {
            ours: token_part(where, row, theirs, start, size)
            for theirs, ours in NAMES.items()
            if _has_values(row.get(theirs))
        }
        reward = next((r for r in (row.get("rewards") or [])[start:] if r is not None), None)
        step = row.get("export_step", row.get("step"))
        if not isinstance(step, int):
            raise ValueError(f"import: {where}: step must be a whole number, got {step!r}.")
        advantage = rollout_advantage(columns)
        yield Imported(step, None, row["token_ids"][:start], None, reward, advantage, columns)


def _has_values(value: object) -> bool:
    return isinstance(value, list) and any(x is not None for x in value)
