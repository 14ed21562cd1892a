"""TRL's logged completions, ``completions/completions_*.parquet`` (``log_completions=True``)."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from counterpoise.run.importers.dump import Encode, Imported, number, require
from counterpoise.text import visible


def read(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """Text only, so tokens are those of a tokenizer if one is given, else words."""
    for file in files:
        table = pq.read_table(file)
        require(str(file), table.column_names, ("prompt", "completion"))
        names = list(rewards) or _reward_columns(table)
        missing = [name for name in names if name not in table.column_names]
        if missing:
            raise ValueError(
                f"import: {file} has no column {missing[0]!r}. It has:"
                f" {visible(', '.join(table.column_names))}."
            )
        for row in table.to_pylist():
            yield _rollout(row, encode or word_tokens, names)


def word_tokens(text: str) -> tuple[list[int], list[str]]:
    """Words with the space before them, numbered by their text.

    >>> word_tokens("a b")[1]
    ['a', ' b']
    """
    texts = re.findall(r"\s*\S+|\s+$", text)
    return [zlib.crc32(word.encode()) for word in texts], texts


def _rollout(row: dict[str, Any], encode: Encode, rewards: Sequence[str]) -> Imported:
    text = _message_text(row["completion"])
    ids, texts = encode(text)
    columns: dict[str, list[Any]] = {
        "token_ids": ids,
        "text": texts,
        "loss_mask": [True] * len(ids),
    }
    advantage = number(row.get("advantage"))
    if advantage is not None:  # TRL gives it to every token
        columns["credit"] = [advantage] * len(ids)
    given = [row[name] for name in rewards if row[name] is not None]
    reward = float(sum(given)) if given else None
    prompt = _message_text(row["prompt"])
    return Imported(int(row.get("step") or 0), prompt, [], text, reward, advantage, columns)


def _reward_columns(table: pa.Table) -> list[str]:
    if "reward" in table.column_names:
        return ["reward"]
    return [
        f.name
        for f in table.schema
        if f.name not in ("step", "advantage")
        and (pa.types.is_floating(f.type) or pa.types.is_integer(f.type))
    ]


def _message_text(value: object) -> str:
    """A text, or the contents of chat messages with their roles where there are several."""
    if not isinstance(value, list):
        return "" if value is None else str(value)
    parts = [(m.get("role", ""), m.get("content")) for m in value if isinstance(m, dict)]
    texts = [content if isinstance(content, str) else json.dumps(content) for _, content in parts]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{role}: {text}" for (role, _), text in zip(parts, texts))
