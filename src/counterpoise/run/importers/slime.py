"""slime's training data of one rank, ``--save-debug-train-data`` (.pt)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from counterpoise.run.importers.dump import (
    Encode,
    Imported,
    Row,
    number,
    plain,
    require,
    rollout_advantage,
)

NAMES = {  # slime's name -> ours
    "rollout_log_probs": "sampler_logp",
    "log_probs": "trainer_logp",
    "advantages": "credit",
    "entropy": "entropy",
}


def read(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """A dict of lists, one entry per sample; log-probs, masks and advantages cover the response
    alone.
    """
    for file in files:
        data = _load(file)
        rows = data.get("rollout_data", data)
        require(str(file), rows, ("tokens", "response_lengths"))
        total = len(rows["tokens"])
        raw = _of_rank(rows, "raw_reward", total)
        for at in range(total):
            ids, size = plain(rows["tokens"][at]), int(rows["response_lengths"][at])
            start = len(ids) - size
            columns = {"token_ids": ids[start:], **_columns(rows, at, size)}
            given = number(rows["rewards"][at]) if "rewards" in rows else None
            stop = ("length" if rows["truncated"][at] else "stop") if "truncated" in rows else None
            yield Imported(
                batch=int(data.get("rollout_id", 0)),
                prompt=None,
                prompt_ids=ids[:start],
                text=None,
                reward=given if raw is None else number(raw[at]),
                advantage=rollout_advantage(columns) if "credit" in columns else given,
                columns=columns,
                stop_reason=stop,
            )


def _columns(rows: Row, at: int, size: int) -> dict[str, list[Any]]:
    mask = plain(rows["loss_masks"][at]) if "loss_masks" in rows else [True] * size
    columns: dict[str, list[Any]] = {"loss_mask": [bool(x) for x in mask]}
    for theirs, ours in NAMES.items():
        value = plain(rows[theirs][at]) if theirs in rows else None
        if isinstance(value, list) and len(value) == size:
            columns[ours] = value
    return columns


def _of_rank(rows: Row, name: str, total: int) -> list[Any] | None:
    """A list that may cover all ranks: then ``partition`` says which entries are this rank's."""
    value = plain(rows.get(name))
    if value is None or len(value) == total:
        return value
    partition = plain(rows.get("partition"))
    if partition is None or len(partition) != total:
        return None
    return [value[k] for k in partition]


def _load(file: Path) -> dict[str, Any]:
    import pickle

    import torch

    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"import: {file} holds more than tensors, numbers and texts, or is broken ({reason})."
            " Nothing else is unpickled."
        ) from None
    if not isinstance(data, dict):
        raise ValueError(f"import: {file} must hold a dict, got {type(data).__name__}.")
    return data
