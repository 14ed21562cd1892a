"""verl's rollouts, ``trainer.rollout_data_dir`` (and ``validation_data_dir``): ``<step>.jsonl``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from counterpoise.run.importers.dump import (
    NUM_BATCHES,
    Encode,
    Imported,
    Row,
    number,
    objects,
    require,
    text,
    text_columns,
    whole,
)

KEY = re.compile(r"(.+)_\d+_\d+")  # <prompt>_<session>_<output> of verl's V1 trainers
FILLER = re.compile(r"pad[0-9a-f]{32}_\d+_0")  # rows that verl appends to fill up a batch


def read(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """One object per rollout: texts, the score and what the reward function returned beside it.

    verl writes no advantages, so there is no credit.
    """
    for where, row in objects(files):
        require(where, row, ("input", "output", "step", *(rewards or ("score",))))
        key = row.get("uid")
        if isinstance(key, str) and FILLER.fullmatch(key):
            continue
        response = text(where, "output", row["output"])
        yield Imported(
            batch=whole(where, "step", row["step"], NUM_BATCHES),
            prompt=text(where, "input", row["input"]),
            prompt_ids=[],
            text=response,
            reward=_reward(where, row, rewards or ("score",)),
            advantage=None,
            columns=text_columns(response, encode),
            answer=text(where, "gts", row["gts"]) if isinstance(row.get("gts"), str) else None,
            group=_prompt(key),
        )


def _reward(where: str, row: Row, names: Sequence[str]) -> float | None:
    given = [number(where, name, row[name]) for name in names]
    known = [value for value in given if value is not None]
    return sum(known) if known else None


def _prompt(key: object) -> str | None:
    match = KEY.fullmatch(key) if isinstance(key, str) else None
    return match[1] if match else None
