"""NeMo-RL's training data, ``train_data_step*.jsonl``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from counterpoise.run.importers.dump import (
    Encode,
    Imported,
    first_true,
    number,
    objects,
    require,
    rollout_advantage,
    token_part,
    unwrap,
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
        size = int(row.get("input_lengths") or len(row["token_ids"]))
        mask = [bool(x) for x in row["token_loss_mask"]]
        start = first_true(where, mask)
        is_left_out = row.get("sample_loss_mask") in (0, 0.0)
        columns = {
            "token_ids": token_part(where, row, "token_ids", start, size),
            "loss_mask": [False] * (size - start) if is_left_out else mask[start:size],
        }
        for theirs, ours in NAMES.items():
            if isinstance(row.get(theirs), list) and len(row[theirs]) >= size:
                columns[ours] = token_part(where, row, theirs, start, size)
        advantage = (
            rollout_advantage(columns) if "credit" in columns else number(row.get("advantages"))
        )
        reward, prompt_ids = number(row.get("rewards")), row["token_ids"][:start]
        yield Imported(_step(where), None, prompt_ids, None, reward, advantage, columns)


def _step(where: str) -> int:
    """The number in the file's name."""
    match = re.search(r"step(\d+)", Path(where.partition(":")[0]).name)
    return int(match[1]) if match else 0
