"""TRL's logged completions, ``completions/completions_*.parquet`` (``log_completions=True``)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from counterpoise.run.importers.dump import (
    NUM_BATCHES,
    Encode,
    Imported,
    Row,
    number,
    require,
    text,
    text_columns,
    whole,
    wrong,
)
from counterpoise.run.parquet import BROKEN
from counterpoise.text import visible

log = logging.getLogger("counterpoise.run")


def read(
    files: Sequence[Path], encode: Encode | None, rewards: Sequence[str]
) -> Iterator[Imported]:
    """Text only, so tokens are those of a tokenizer if one is given, else words.

    TRL writes a generation whenever it logs, once for each of its updates with ``logging_steps=1``:
    it is read once, under the step of its first file.
    """
    last: str | None = None
    for file in files:
        table = _table(file)
        require(str(file), table.column_names, ("prompt", "completion"))
        names = list(rewards) or _reward_columns(table)
        if last is None and not rewards and len(names) > 1:
            log.warning(
                "import: the reward is the sum of %s; TRL's reward_weights are not in the dump."
                " --reward names the columns to take.",
                visible(", ".join(names)),
            )
        missing = [name for name in names if name not in table.column_names]
        if missing:
            raise ValueError(
                f"import: {file} has no column {missing[0]!r}. It has:"
                f" {visible(', '.join(table.column_names))}."
            )
        others = [name for name in table.column_names if name != "step"]
        written = repr(table.select(others).to_pylist())  # NaN equals NaN there
        if written == last:
            continue
        last = written
        for at, row in enumerate(table.to_pylist()):
            yield _rollout(f"{file}: row {at}", row, encode, names)


def _table(file: Path) -> pa.Table:
    try:
        table = pq.ParquetFile(file).read()
        table.validate(full=True)
    except FileNotFoundError:
        raise
    except BROKEN as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"import: {file} is not a parquet file ({visible(reason)}).") from None
    twice = {name for name in table.column_names if table.column_names.count(name) > 1}
    if twice:
        raise ValueError(f"import: {file} has the column {visible(min(twice))!r} twice.")
    return table


def _rollout(where: str, row: Row, encode: Encode | None, rewards: Sequence[str]) -> Imported:
    response = _message_text(where, "completion", row["completion"])
    columns = text_columns(response, encode)
    advantage = number(where, "advantage", row.get("advantage"))
    if advantage is not None:  # TRL gives it to every token
        columns["credit"] = [advantage] * len(columns["token_ids"])
    given = [number(where, name, row[name]) for name in rewards]
    known = [value for value in given if value is not None]
    return Imported(
        batch=whole(where, "step", row.get("step") or 0, NUM_BATCHES),
        prompt=_message_text(where, "prompt", row["prompt"]),
        prompt_ids=[],
        text=response,
        reward=sum(known) if known else None,
        advantage=advantage,
        columns=columns,
    )


def _reward_columns(table: pa.Table) -> list[str]:
    if "reward" in table.column_names:
        return ["reward"]
    names = [
        f.name
        for f in table.schema
        if f.name not in ("step", "advantage")
        and (pa.types.is_floating(f.type) or pa.types.is_integer(f.type))
    ]
    return names


def _message_text(where: str, name: str, value: object) -> str:
    """A text, or the contents of chat messages with their roles where there are several."""
    if value is None:
        return ""
    if not isinstance(value, list):
        return text(where, name, value)
    if not all(isinstance(message, dict) for message in value):
        raise wrong(where, name, "a text or a list of messages", value)
    parts = [(message.get("role", ""), message.get("content")) for message in value]
    texts = [body if isinstance(body, str) else json.dumps(body, default=str) for _, body in parts]
    if len(texts) == 1:
        return texts[0]
    return "\n".join(f"{role}: {body}" for (role, _), body in zip(parts, texts))
