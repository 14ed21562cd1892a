"""From a character of a text to the token that wrote it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from torch import Tensor

from counterpoise.policy.load import decode_texts
from counterpoise.text import shared_length


def token_at(tokenizer: Any, token_ids: Sequence[int], offset: int) -> int | None:
    """The index of the token that completes the character at ``offset`` of the decoded text.

    Prefixes are decoded, since tokens hold several characters, parts of one (bytes), or none
    (special tokens, which the text leaves out). An offset behind the last character means the
    token that follows the whole text: the stop token, or None where there is none.

    Args:
        tokenizer: anything with ``decode(ids, skip_special_tokens=True)``.
        token_ids: the tokens of one response.
        offset: a character of ``tokenizer.decode(token_ids, skip_special_tokens=True)``.
    """
    text = tokenizer.decode(token_ids, skip_special_tokens=True)

    def num_settled(num_tokens: int) -> int:
        """Characters of the text that the first tokens settle; bytes of an open one do not."""
        part = tokenizer.decode(token_ids[:num_tokens], skip_special_tokens=True)
        return shared_length(text, part)

    counts = range(len(token_ids) + 1)
    if offset < len(text):
        return bisect_left(counts, offset + 1, key=num_settled) - 1
    last = bisect_left(counts, len(text), key=num_settled)
    return last if last < len(token_ids) else None


class Written(NamedTuple):
    """What the model wrote of each row: its tokens, their positions in the row, and their text."""

    token_ids: list[list[int]]
    positions: list[list[int]]
    texts: list[str]


def written(tokenizer: Any, token_ids_NT: Tensor, mask_NT: Tensor) -> Written:
    """The tokens where ``mask_NT`` is True, per row, and their text."""
    ends = mask_NT.sum(1).cumsum(0).tolist()
    rows = [slice(start, end) for start, end in pairwise([0, *ends])]
    position_K = mask_NT.nonzero()[:, 1].tolist()
    token_K = token_ids_NT[mask_NT].tolist()
    token_ids = [token_K[row] for row in rows]
    texts = decode_texts(tokenizer, token_ids)
    return Written(token_ids, [position_K[row] for row in rows], texts)


def positions_at(tokenizer: Any, written: Written, offsets: Sequence[int | None]) -> list[int]:
    """The position in each row of the token that completes a character of its text; -1 where there
    is none (``token_at``).

    Args:
        offsets: a character of the text per row, or None.
    """
    asked = [row for row, offset in enumerate(offsets) if offset is not None]
    token_ids = [written.token_ids[row] for row in asked]
    ends_of = _ends(tokenizer, token_ids, [written.texts[row] for row in asked])
    out = [-1] * len(offsets)
    for row, ids, ends in zip(asked, token_ids, ends_of):
        offset = offsets[row]
        assert offset is not None
        token = token_at(tokenizer, ids, offset) if ends is None else _completing(ends, offset)
        if token is not None:
            out[row] = written.positions[row][token]
    return out


def tokens_from(
    tokenizer: Any,
    token_ids: Sequence[Sequence[int]],
    texts: Sequence[str],
    offsets: Sequence[Sequence[int]],
) -> list[list[int]]:
    """For characters of each text the index of the first token that begins there or behind; the
    number of tokens where none does.

    Args:
        texts: ``decode(ids, skip_special_tokens=True)`` of every row.
    """
    out = []
    for ids, text, places, ends in zip(
        token_ids, texts, offsets, _ends(tokenizer, token_ids, texts), strict=True
    ):
        if ends is None:
            out.append([_from_prefixes(tokenizer, ids, text, offset) for offset in places])
        else:
            starts = [0, *ends][: len(ids)]
            out.append([bisect_left(starts, offset) for offset in places])
    return out


def _ends(
    tokenizer: Any, token_ids: Sequence[Sequence[int]], texts: Sequence[str]
) -> list[list[int] | None]:
    """Where in its text each token ends: tokens are decoded one by one, each id once. None for a
    text that its tokens do not add up to (parts of a character, spaces that a tokenizer puts
    between tokens).
    """
    distinct = sorted({token for ids in token_ids for token in ids})
    piece_of = dict(zip(distinct, decode_texts(tokenizer, [[token] for token in distinct])))
    rows = [[piece_of[token] for token in ids] for ids in token_ids]
    return [
        list(accumulate(map(len, pieces))) if "".join(pieces) == text else None
        for pieces, text in zip(rows, texts, strict=True)
    ]


def _completing(ends: list[int], offset: int) -> int | None:
    """``token_at`` of tokens that end there.

    >>> [_completing([2, 5, 5], offset) for offset in (0, 2, 4, 5)]
    [0, 1, 1, 2]
    """
    length = ends[-1] if ends else 0
    token = bisect_right(ends, offset) if offset < length else bisect_left([0, *ends], length)
    return token if token < len(ends) else None


def _from_prefixes(tokenizer: Any, token_ids: Sequence[int], text: str, offset: int) -> int:
    token = token_at(tokenizer, token_ids, offset)
    if token is None:
        return len(token_ids)
    before = tokenizer.decode(token_ids[:token], skip_special_tokens=True)
    return token if shared_length(text, before) >= offset else token + 1
