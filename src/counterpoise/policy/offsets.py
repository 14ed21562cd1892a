"""From a character of a text to the token that wrote it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

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
