"""prime-rl's token export, ``token_exports/step_*/rank_*.jsonl`` (its schema_version 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from counterpoise.run.importers.dump import (
    NUM_BATCHES,
    Encode,
    Imported,
    first_true,
    flags,
    numbers,
    objects,
    part,
    require,
    rollout_advantage,
    token_ids,
    whole,
)

NAMES = {  # prime-rl's name -> ours, and how it is read
    "loss_mask": ("loss_mask", flags),
    "advantages": ("credit", numbers),
    "inference_logprobs": ("sampler_logp", numbers),
    "trainer_logprobs": ("trainer_logp", numbers),
    "entropy": ("entropy", numbers),
    "importance_ratio": ("ratio", numbers),
    "is_masked": ("is_clipped", flags),
}


def read(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """One object per sequence, every field one value per token of prompt and response."""
    for where, row in objects(files):
        require(where, row, ("token_ids", "loss_mask"))
        ids = token_ids(where, "token_ids", row["token_ids"])
        start = first_true(where, flags(where, "loss_mask", row["loss_mask"]))
        columns = {"token_ids": part(where, "token_ids", ids, start, len(ids))}
        for theirs, (ours, kind) in NAMES.items():
            if _has_values(row.get(theirs)):
                columns[ours] = part(
                    where, theirs, kind(where, theirs, row[theirs]), start, len(ids)
                )
        given = numbers(where, "rewards", row.get("rewards") or [])[start:]
        yield Imported(
            batch=whole(where, "step", row.get("export_step", row.get("step")), NUM_BATCHES),
            prompt=None,
            prompt_ids=ids[:start],
            text=None,
            reward=next((value for value in given if value is not None), None),
            advantage=rollout_advantage(columns),
            columns=columns,
        )


def _has_values(value: object) -> bool:
    return any(x is not None for x in value) if isinstance(value, list) else value is not None
