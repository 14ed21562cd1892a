"""A rollout of a dump, and the checks that all formats share.

A reader is ``read(files, encode, rewards) -> Iterator[Imported]``. Nothing is unpickled beyond
tensors and plain values. Errors say file, line, got and expected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from counterpoise.text import visible

Encode = Callable[[str], tuple[list[int], list[str]]]
Row = Mapping[str, Any]


class Imported(NamedTuple):
    """One rollout; ``prompt`` or ``prompt_ids`` tell its group.

    ``columns``: lists named as in ``counterpoise.run.schema``, one value per token.
    """

    batch: int
    prompt: str | None
    prompt_ids: list[int]
    text: str | None
    reward: float | None
    advantage: float | None
    columns: dict[str, list[Any]]
    stop_reason: str | None = None


Reader = Callable[[Sequence[Path], Encode | None, Sequence[str]], Iterator[Imported]]


def objects(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of jsonl files, each with the words for where it stands."""
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


def require(where: str, row: Collection[str], names: Sequence[str]) -> None:
    """An error if the row lacks one of the names."""
    missing = [name for name in names if name not in row]
    if missing:
        raise ValueError(
            f"import: {where} has no {', '.join(missing)}. It has:"
            f" {visible(', '.join(map(str, list(row)[:20])))}."
        )


def token_part(where: str, row: Row, name: str, start: int, end: int) -> list[Any]:
    """A field's values from the first response token on."""
    value = row[name]
    if not isinstance(value, list) or len(value) < end:
        raise ValueError(
            f"import: {where}: {name} must be a list of {end} values, got"
            f" {len(value) if isinstance(value, list) else type(value).__name__}."
        )
    return value[start:end]


def first_true(where: str, mask: object) -> int:
    """Where the response begins: the first token of the loss mask."""
    if not isinstance(mask, list) or not any(mask):
        raise ValueError(
            f"import: {where}: the loss mask holds no token, so there is no response to show."
        )
    return next(at for at, keep in enumerate(mask) if keep)


def rollout_advantage(columns: Mapping[str, list[Any]]) -> float | None:
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


def unwrap(value: Any) -> Any:
    """The entry of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def plain(value: Any) -> Any:
    """Tensors and arrays as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def number(value: object) -> float | None:
    """A number, or a tensor or list of one; None for anything else."""
    value = unwrap(plain(value))
    return float(value) if isinstance(value, (int, float)) else None
