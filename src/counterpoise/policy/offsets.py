"""From a character of a text to the token that wrote it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

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


def positions_at(
    tokenizer: Any, token_ids_NT: Tensor, mask_NT: Tensor, offsets: Sequence[int | None]
) -> Tensor:
    """The position in each row of the token that completes a character of what the model wrote,
    [N]; -1 where there is none (``token_at``).

    Args:
        mask_NT: True on tokens that the model wrote.
        offsets: a character of ``decode`` of those tokens per row, or None.
    """
    out_N = torch.full_like(token_ids_NT[:, 0], -1)
    for row, offset in enumerate(offsets):
        position = mask_NT[row].nonzero()[:, 0]
        ids = token_ids_NT[row, position].tolist()
        token = None if offset is None else token_at(tokenizer, ids, offset)
        if token is not None:
            out_N[row] = position[token]
    return out_N


def tokens_from(
    tokenizer: Any,
    token_ids: Sequence[Sequence[int]],
    texts: Sequence[str],
    offsets: Sequence[Sequence[int]],
) -> list[list[int]]:
    """For characters of each text the index of the first token that begins there or behind; the
    number of tokens where none does.

    Tokens are decoded one by one, each id once; a text that its tokens do not add up to (parts of
    a character, spaces that a tokenizer puts between tokens) is decoded by prefixes.

    Args:
        texts: ``decode(ids, skip_special_tokens=True)`` of every row.
    """
    distinct = sorted({token for ids in token_ids for token in ids})
    decoded = tokenizer.batch_decode([[token] for token in distinct], skip_special_tokens=True)
    piece_of = dict(zip(distinct, decoded))
    out = []
    for ids, text, places in zip(token_ids, texts, offsets, strict=True):
        pieces = [piece_of[token] for token in ids]
        if "".join(pieces) == text:
            starts = [0, *accumulate(map(len, pieces))][: len(ids)]
            out.append([bisect_left(starts, offset) for offset in places])
        else:
            out.append([_from_prefixes(tokenizer, ids, text, offset) for offset in places])
    return out


def _from_prefixes(tokenizer: Any, token_ids: Sequence[int], text: str, offset: int) -> int:
    token = token_at(tokenizer, token_ids, offset)
    if token is None:
        return len(token_ids)
    before = tokenizer.decode(token_ids[:token], skip_special_tokens=True)
    return token if shared_length(text, before) >= offset else token + 1
