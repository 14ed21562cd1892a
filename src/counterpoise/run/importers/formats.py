"""Dumps of other trainers as rollouts.

Each reader gives one ``Imported`` a rollout; nothing is unpickled beyond tensors and plain values.

Fields as the trainers write them: prime-rl ``token_exports/step_*/rank_*.jsonl`` (schema_version
1), NeMo-RL ``train_data_step*.jsonl``, slime
``--save-debug-train-data`` (.pt), TRL ``completions/completions_*.parquet``
(``log_completions=True``)."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from counterpoise.text import visible

Encode = Callable[[str], tuple[list[int], list[str]]]


class Imported(NamedTuple):
    """One rollout; ``prompt`` or ``prompt_ids`` tell its group.

    ``columns``: lists named as in ``counterpoise.run.schema``, one value a token.
    """

    batch: int
    prompt: str | None
    prompt_ids: list[int]
    text: str | None
    reward: float | None
    advantage: float | None
    columns: dict[str, list[Any]]
    stop_reason: str | None = None


def prime_rl(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """prime-rl's token export: one object a sequence, every field one value a token of prompt and
    response.
    """
    names = {
        "token_ids": "token_ids",
        "loss_mask": "loss_mask",
        "advantages": "credit",
        "inference_logprobs": "sampler_logp",
        "trainer_logprobs": "trainer_logp",
        "entropy": "entropy",
        "importance_ratio": "ratio",
    }
    for where, row in _objects(files):
        _need(where, row, ("token_ids", "loss_mask"))
        start = _first_true(where, row["loss_mask"])
        size = len(row["token_ids"])
        columns = {
            ours: _part(where, row, theirs, start, size)
            for theirs, ours in names.items()
            if _known(row.get(theirs))
        }
        if _known(row.get("is_masked")):
            columns["is_clipped"] = _part(where, row, "is_masked", start, size)
        reward = next((r for r in (row.get("rewards") or [])[start:] if r is not None), None)
        batch = row.get("export_step", row.get("step"))
        yield Imported(
            _whole(where, "batch", batch),
            None,
            row["token_ids"][:start],
            None,
            reward,
            _shared_value(columns),
            columns,
        )


def nemo_rl(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """NeMo-RL's training data: one object a sample, padded to the longest, values wrapped in a list
    of one.
    """
    for where, row in _objects(files):
        row = {key: _unwrapped(value) for key, value in row.items()}
        _need(where, row, ("token_ids", "token_loss_mask"))
        size = int(row.get("input_lengths") or len(row["token_ids"]))
        mask = [bool(x) for x in row["token_loss_mask"]]
        start = _first_true(where, mask)
        columns = {
            "token_ids": _part(where, row, "token_ids", start, size),
            "loss_mask": mask[start:size],
        }
        for theirs, ours in (
            ("generation_logprobs", "sampler_logp"),
            ("prev_logprobs", "trainer_logp"),
            ("advantages", "credit"),
        ):
            if isinstance(row.get(theirs), list) and len(row[theirs]) >= size:
                columns[ours] = _part(where, row, theirs, start, size)
        if row.get("sample_loss_mask") in (0, 0.0):
            columns["loss_mask"] = [False] * (size - start)
        advantage = (
            _shared_value(columns) if "credit" in columns else _scalar(row.get("advantages"))
        )
        batch = re.search(r"step(\d+)", Path(where.partition(":")[0]).name)
        number = int(batch[1]) if batch else 0
        yield Imported(
            number,
            None,
            row["token_ids"][:start],
            None,
            _scalar(row.get("rewards")),
            advantage,
            columns,
        )


def slime(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """slime's training data of one rank: a dict of lists, one entry a sample; log-probs, masks and
    advantages cover the response alone.
    """
    for file in files:
        data = _torch_file(file)
        rows = data.get("rollout_data", data)
        _need(str(file), rows, ("tokens", "response_lengths"))
        batch, total = int(data.get("rollout_id", 0)), len(rows["tokens"])
        raw = _of_rank(rows, "raw_reward", total)
        for at in range(total):
            ids, size = _plain(rows["tokens"][at]), int(rows["response_lengths"][at])
            columns: dict[str, list[Any]] = {"token_ids": ids[len(ids) - size :]}
            columns["loss_mask"] = (
                [bool(x) for x in _plain(rows["loss_masks"][at])]
                if "loss_masks" in rows
                else [True] * size
            )
            for theirs, ours in (
                ("rollout_log_probs", "sampler_logp"),
                ("log_probs", "trainer_logp"),
                ("advantages", "credit"),
                ("entropy", "entropy"),
            ):
                value = _plain(rows[theirs][at]) if theirs in rows else None
                if isinstance(value, list) and len(value) == size:
                    columns[ours] = value
            advantage = (
                _shared_value(columns)
                if "credit" in columns
                else _scalar(rows["rewards"][at] if "rewards" in rows else None)
            )
            reward = _scalar(
                raw[at] if raw is not None else rows["rewards"][at] if "rewards" in rows else None
            )
            stop = ("length" if rows["truncated"][at] else "stop") if "truncated" in rows else None
            yield Imported(
                batch, None, ids[: len(ids) - size], None, reward, advantage, columns, stop
            )


def trl(files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]) -> Iterator[Imported]:
    """TRL's logged completions: text only, so tokens are those of a tokenizer if one is given, else
    words.
    """
    for file in files:
        table = pq.read_table(file)
        _need(str(file), table.column_names, ("prompt", "completion"))
        names = list(rewards) or _reward_columns(table)
        missing = [name for name in names if name not in table.column_names]
        if missing:
            raise ValueError(
                f"import: {file} has no column {missing[0]!r}. It has:"
                f" {visible(', '.join(table.column_names))}."
            )
        for row in table.to_pylist():
            text = _message_text(row["completion"])
            ids, texts = (encode or word_tokens)(text)
            columns: dict[str, list[Any]] = {
                "token_ids": ids,
                "text": texts,
                "loss_mask": [True] * len(ids),
            }
            advantage = _scalar(row.get("advantage"))
            columns |= (
                {} if advantage is None else {"credit": [advantage] * len(ids)}
            )  # TRL gives it to every token
            found = [row[name] for name in names if row[name] is not None]
            yield Imported(
                int(row.get("step") or 0),
                _message_text(row["prompt"]),
                [],
                text,
                float(sum(found)) if found else None,
                advantage,
                columns,
            )


def word_tokens(text: str) -> tuple[list[int], list[str]]:
    """Words with the space before them, numbered by their text.

    >>> word_tokens("a b")[1]
    ['a', ' b']
    """
    texts = re.findall(r"\s*\S+|\s+$", text)
    return [zlib.crc32(word.encode()) for word in texts], texts


FORMATS: dict[str, tuple[Callable[..., Iterator[Imported]], str]] = {
    "prime-rl": (prime_rl, "rank_*.jsonl"),
    "nemo-rl": (nemo_rl, "train_data_step*.jsonl"),
    "slime": (slime, "*.pt"),
    "trl": (trl, "*.parquet"),
}


def _objects(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in files:
        with file.open(encoding="utf-8") as lines:
            for at, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"import: {file} line {at} is not JSON ({error}).") from None
                if not isinstance(row, dict):
                    raise ValueError(
                        f"import: {file} line {at} must be an object, got {type(row).__name__}."
                    )
                yield f"{file}: line {at}", row


def _need(where: str, row: Any, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in row]
    if missing:
        raise ValueError(
            f"import: {where} has no {', '.join(missing)}. It has:"
            f" {visible(', '.join(map(str, list(row)[:20])))}."
        )


def _part(where: str, row: dict[str, Any], name: str, start: int, end: int) -> list[Any]:
    value = row[name]
    if not isinstance(value, list) or len(value) < end:
        raise ValueError(
            f"import: {where}: {name} must be a list of {end} values, got"
            f" {len(value) if isinstance(value, list) else type(value).__name__}."
        )
    return value[start:end]


def _first_true(where: str, mask: Any) -> int:
    if not isinstance(mask, list) or not any(mask):
        raise ValueError(
            f"import: {where}: the loss mask holds no token, so there is no response to show."
        )
    return next(at for at, keep in enumerate(mask) if keep)


def _known(value: Any) -> bool:
    return isinstance(value, list) and any(x is not None for x in value)


def _shared_value(columns: dict[str, list[Any]]) -> float | None:
    """A rollout's advantage from its tokens' credit: their common value, or the mean over tokens in
    the loss.
    """
    values = [
        float(v)
        for v, keep in zip(columns.get("credit", []), columns["loss_mask"])
        if keep and v is not None
    ]
    if not values:
        return None
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)


def _unwrapped(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _scalar(value: Any) -> float | None:
    value = _unwrapped(_plain(value))
    return float(value) if isinstance(value, (int, float)) else None


def _whole(where: str, name: str, value: Any) -> int:
    if not isinstance(value, int):
        raise ValueError(f"import: {where}: {name} must be a whole number, got {value!r}.")
    return value


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _of_rank(rows: Any, name: str, total: int) -> list[Any] | None:
    """A list that may cover all ranks: then ``partition`` says which entries are this rank's."""
    value = _plain(rows.get(name))
    if value is None or len(value) == total:
        return value
    partition = _plain(rows.get("partition"))
    return (
        [value[k] for k in partition] if partition is not None and len(partition) == total else None
    )


def _torch_file(file: Path) -> dict[str, Any]:
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


def _reward_columns(table: Any) -> list[str]:
    if "reward" in table.column_names:
        return ["reward"]
    import pyarrow as pa

    return [
        f.name
        for f in table.schema
        if f.name not in ("step", "advantage")
        and (pa.types.is_floating(f.type) or pa.types.is_integer(f.type))
    ]


def _message_text(value: Any) -> str:
    """A text, or the contents of chat messages with their roles where there are several."""
    if isinstance(value, list):
        parts = [(m.get("role", ""), m.get("content")) for m in value if isinstance(m, dict)]
        texts = [
            content if isinstance(content, str) else json.dumps(content) for _, content in parts
        ]
        return (
            texts[0]
            if len(texts) == 1
            else "\n".join(f"{role}: {text}" for (role, _), text in zip(parts, texts))
        )
    return "" if value is None else str(value)
