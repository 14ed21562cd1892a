"""A rollout of a dump, and the checks that all formats share.

A reader is ``read(files, encode, rewards) -> Iterator[Imported]``. A dump is somebody else's file:
every value passes one of the checks below, so that a wrong one is a line with file, place, got and
expected. Nothing is unpickled beyond tensors and plain values.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from counterpoise.text import shorten, visible

Encode = Callable[[str], tuple[list[int], list[str]]]
Row = Mapping[str, Any]
NUM_IDS, NUM_BATCHES = 2**32, 10**9  # more than any tokenizer and any run has


class Imported(NamedTuple):
    """One rollout; ``group``, else ``prompt``, else ``prompt_ids`` tell its group.

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
    answer: str | None = None
    group: str | None = None


Reader = Callable[[Sequence[Path], Encode | None, Sequence[str]], Iterator[Imported]]


def objects(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Objects of jsonl files, each with the words for where it stands."""
    for file in files:
        with file.open("rb") as lines:
            for at, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line.decode("utf-8"))
                except (ValueError, RecursionError) as error:
                    raise ValueError(
                        f"import: {file} line {at} is not JSON ({visible(error)})."
                    ) from None
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


def wrong(where: str, name: str, expected: str, got: object) -> ValueError:
    """The error for a value of another kind."""
    is_short = isinstance(got, (str, float, type(None))) or (
        isinstance(got, int) and abs(got) < 10**20
    )
    shown = shorten(visible(repr(got)), 40) if is_short else type(got).__name__
    return ValueError(f"import: {where}: {visible(name)} must be {expected}, got {shown}.")


def whole(where: str, name: str, value: object, top: int) -> int:
    """A whole number from 0, below ``top``."""
    value = unwrap(plain(value))
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(where, name, "a whole number", value)
    if not 0 <= value < top:
        raise wrong(where, name, f"from 0 to {top - 1}", value)
    return value


def number(where: str, name: str, value: object) -> float | None:
    """A number, or a tensor or list of one; None stays None."""
    value = unwrap(plain(value))
    if value is None:
        return None
    if not isinstance(value, (int, float)) or (isinstance(value, int) and abs(value) > 10**300):
        raise wrong(where, name, "a number", value)
    return float(value)


def text(where: str, name: str, value: object) -> str:
    """A text; half characters, which no file can hold, become question marks."""
    if not isinstance(value, str):
        raise wrong(where, name, "a text", value)
    return value.encode("utf-8", "replace").decode("utf-8")


def values(where: str, name: str, value: object) -> list[Any]:
    """A list, or a tensor or array as one."""
    value = plain(value)
    if not isinstance(value, list):
        raise wrong(where, name, "a list", value)
    return value


def token_ids(where: str, name: str, value: object) -> list[int]:
    """A list of token ids."""
    return [whole(where, name, one, NUM_IDS) for one in values(where, name, value)]


def numbers(where: str, name: str, value: object) -> list[float | None]:
    """A list of numbers, None where one is missing."""
    return [number(where, name, one) for one in values(where, name, value)]


def flags(where: str, name: str, value: object) -> list[bool]:
    """A list of 0 and 1, or False and True."""
    return [bool(number(where, name, one)) for one in values(where, name, value)]


def part(where: str, name: str, given: list[Any], start: int, end: int) -> list[Any]:
    """A list's values from the first response token on."""
    if len(given) < end:
        raise ValueError(
            f"import: {where}: {name} must be a list of {end} values, got {len(given)}."
        )
    return given[start:end]


def first_true(where: str, mask: list[bool]) -> int:
    """Where the response begins: the first token of the loss mask."""
    if not any(mask):
        raise ValueError(
            f"import: {where}: the loss mask holds no token, so there is no response to show."
        )
    return mask.index(True)


def rollout_advantage(columns: Mapping[str, list[Any]]) -> float | None:
    """A rollout's advantage from its tokens' credit: their common value, or the mean over tokens in
    the loss.
    """
    kept = [
        v
        for v, keep in zip(columns.get("credit", []), columns["loss_mask"])
        if keep and v is not None
    ]
    if not kept:
        return None
    return kept[0] if len(set(kept)) == 1 else sum(kept) / len(kept)


def text_columns(response: str, encode: Encode | None) -> dict[str, list[Any]]:
    """A dump of texts: tokens are those of a tokenizer if one is given, else words."""
    ids, texts = (encode or word_tokens)(response)
    return {"token_ids": ids, "text": texts, "loss_mask": [True] * len(ids)}


def word_tokens(text: str) -> tuple[list[int], list[str]]:
    """Words with the space before them, numbered by their text.

    >>> word_tokens("a b")[1]
    ['a', ' b']
    """
    texts = re.findall(r"\s*\S+|\s+$", text)
    return [zlib.crc32(word.encode()) for word in texts], texts


def unwrap(value: Any) -> Any:
    """The entry of a list of one; anything else as it is."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def plain(value: Any) -> Any:
    """Tensors and arrays as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
