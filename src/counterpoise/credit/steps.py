"""Where the steps of a response begin: in its text, or at tokens that might have been others."""

from __future__ import annotations

import math
import re

from torch import Tensor

SPLITS = ("sentences", "lines", "improbable")
_LINES = re.compile(r"\n+")
_SENTENCES = re.compile(r"\n+|[.!?]+(?=[^\S\n])")  # a mark before a line break ends with the line


def step_starts(text: str, split: str = "sentences") -> list[int]:
    """The character with which each step after the first begins.

    A step ends with its line, or (``sentences``) with a full stop, question or exclamation mark
    before a space, which opens the next step. A step has a letter: the number of an item and its
    full stop stay with the sentence behind them.

    >>> text = "1. Start with 7. Then add 3.5.\\n\\nSo 10.5."
    >>> [text[a:b] for a, b in zip([0, *step_starts(text)], [*step_starts(text), None])]
    ['1. Start with 7.', ' Then add 3.5.\\n\\n', 'So 10.5.']
    """
    out, begin = [], 0
    for mark in (_LINES if split == "lines" else _SENTENCES).finditer(text):
        has_word = any(map(str.isalpha, text[begin : mark.end()]))
        if has_word and text[mark.end() :].strip():
            out.append(mark.end())
            begin = mark.end()
    return out


def improbable_starts(logp_T: Tensor, every: int, max_prob: float) -> list[int]:
    """Every so many-th token that the sampler gave less than ``max_prob``; positions of a response.

    >>> import torch
    >>> improbable_starts(torch.tensor([-1.0, 0.0, -1.0, -1.0, -1.0]), every=2, max_prob=0.9)
    [2, 4]
    """
    is_rare_T = logp_T.double() < math.log(max_prob)
    return is_rare_T.nonzero()[:, 0].tolist()[every - 1 :: every]
