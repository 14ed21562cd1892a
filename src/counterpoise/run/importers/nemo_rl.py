"""NeMo-RL's training data, ``train_data_step*.jsonl``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from counterpoise.run.importers.dump import (
    NUM_BATCHES,
    Encode,
    Imported,
    first_true,
    flags,
    number,
    numbers,
    objects,
    part,
    require,
    rollout_advantage,
    token_ids,
    unwrap,
    whole,
)

NAMES = {  # NeMo-RL's name -> ours
    "generation_logprobs": "sampler_logp",
    "prev_logprobs": "trainer_logp",
    "advantages": "credit",
}


def read(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """One object per sample, padded to the longest, values wrapped in a list of one."""
    for where, wrapped in objects(files):
        row = {key: unwrap(value) for key, value in wrapped.items()}
        require(where, row, ("token_ids", "token_loss_mask"))
        ids = token_ids(where, "token_ids", _listed(row["token_ids"]))
        mask = flags(where, "token_loss_mask", _listed(row["token_loss_mask"]))
        size = whole(where, "input_lengths", row.get("input_lengths") or len(ids), len(ids) + 1)
        start = first_true(where, mask)
        is_left_out = number(where, "sample_loss_mask", row.get("sample_loss_mask")) == 0
        kept = part(where, "token_loss_mask", mask, start, size)
        columns = {
            "token_ids": part(where, "token_ids", ids, start, size),
            "loss_mask": [False] * len(kept) if is_left_out else kept,
        }
        for theirs, ours in NAMES.items():
            if isinstance(row.get(theirs), list) and len(row[theirs]) >= size:
                columns[ours] = part(
                    where, theirs, numbers(where, theirs, row[theirs]), start, size
                )
        yield Imported(
            batch=_step(where),
            prompt=None,
            prompt_ids=ids[:start],
            text=None,
            reward=number(where, "rewards", row.get("rewards")),
            advantage=rollout_advantage(columns)
            if "credit" in columns
            else number(where, "advantages", row.get("advantages")),
            columns=columns,
        )


def _listed(value: Any) -> Any:
    """A sequence of one token was unwrapped to a number."""
    return [value] if isinstance(value, int) else value


def _step(where: str) -> int:
    """The number in the file's name."""
    match = re.search(r"step(\d+)", Path(where.rpartition(": line")[0]).name)
    return (
        whole(where, "the step in the file's name", int(match[1][:20]), NUM_BATCHES) if match else 0
    )
