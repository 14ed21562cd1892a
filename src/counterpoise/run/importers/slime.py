"""slime's training data of one rank, ``--save-debug-train-data`` (.pt)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from counterpoise.run.importers.dump import (
    NUM_BATCHES,
    Encode,
    Imported,
    Row,
    flags,
    number,
    numbers,
    plain,
    require,
    rollout_advantage,
    token_ids,
    values,
    whole,
    wrong,
)
from counterpoise.text import visible

NAMES = {  # slime's name -> ours
    "rollout_log_probs": "sampler_logp",
    "log_probs": "trainer_logp",
    "advantages": "credit",
    "entropy": "entropy",
}
PER_SAMPLE = ("response_lengths", "rewards", "truncated", "loss_masks", *NAMES)


def read(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """A dict of lists, one entry per sample; log-probs, masks and advantages cover the response
    alone.
    """
    for file in files:
        where, data = str(file), _load(file)
        rows = data.get("rollout_data", data)
        if not isinstance(rows, dict):
            raise wrong(where, "rollout_data", "a dict", rows)
        require(where, rows, ("tokens", "response_lengths"))
        total = len(values(where, "tokens", rows["tokens"]))
        rows = rows | {k: _per_sample(where, rows, k, total) for k in PER_SAMPLE if k in rows}
        raw = _of_rank(where, rows, "raw_reward", total)
        batch = whole(where, "rollout_id", data.get("rollout_id", 0), NUM_BATCHES)
        for at in range(total):
            yield _rollout(f"{where}: sample {at}", rows, at, batch, raw)


def _rollout(where: str, rows: Row, at: int, batch: int, raw: list[Any] | None) -> Imported:
    ids = token_ids(where, "tokens", rows["tokens"][at])
    size = whole(where, "response_lengths", rows["response_lengths"][at], len(ids) + 1)
    start = len(ids) - size
    columns = {"token_ids": ids[start:], **_columns(where, rows, at, size)}
    given = number(where, "rewards", rows["rewards"][at]) if "rewards" in rows else None
    stop = ("length" if plain(rows["truncated"][at]) else "stop") if "truncated" in rows else None
    return Imported(
        batch=batch,
        prompt=None,
        prompt_ids=ids[:start],
        text=None,
        reward=given if raw is None else number(where, "raw_reward", raw[at]),
        advantage=rollout_advantage(columns) if "credit" in columns else given,
        columns=columns,
        stop_reason=stop,
    )


def _columns(where: str, rows: Row, at: int, size: int) -> dict[str, list[Any]]:
    mask = flags(where, "loss_masks", rows["loss_masks"][at]) if "loss_masks" in rows else None
    if mask is not None and len(mask) != size:
        raise ValueError(
            f"import: {where}: loss_masks must be a list of {size} values, got {len(mask)}."
        )
    columns: dict[str, list[Any]] = {"loss_mask": [True] * size if mask is None else mask}
    for theirs, ours in NAMES.items():
        value = plain(rows[theirs][at]) if theirs in rows else None
        if isinstance(value, list) and len(value) == size:
            columns[ours] = numbers(where, theirs, value)
    return columns


def _per_sample(where: str, rows: Row, name: str, total: int) -> list[Any]:
    """A field with one entry per sample."""
    given = values(where, name, rows[name])
    if len(given) != total:
        raise ValueError(
            f"import: {where}: {name} must be a list of {total} values, got {len(given)}."
        )
    return given


def _of_rank(where: str, rows: Row, name: str, total: int) -> list[Any] | None:
    """A list that may cover all ranks: then ``partition`` says which entries are this rank's."""
    if rows.get(name) is None:
        return None
    given = values(where, name, rows[name])
    if len(given) == total:
        return given
    partition = plain(rows.get("partition"))
    if not isinstance(partition, list) or len(partition) != total:
        return None
    return [given[whole(where, "partition", k, len(given))] for k in partition]


def _load(file: Path) -> dict[str, Any]:
    import torch

    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a broken pickle raises anything
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ValueError(
            f"import: {file} holds more than tensors, numbers and texts, or is broken"
            f" ({visible(reason)}). Nothing else is unpickled."
        ) from None
    if not isinstance(data, dict):
        raise ValueError(f"import: {file} must hold a dict, got {type(data).__name__}.")
    return data
