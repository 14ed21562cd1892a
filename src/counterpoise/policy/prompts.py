"""Prompts of many rows: the distinct ones, and as one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def distinct(prompt_ids: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The different prompts in their order, and for every row which one it has.

    >>> distinct([[7, 8], [9], [7, 8]])
    ([(7, 8), (9,)], [0, 1, 0])
    """
    number = {prompt: p for p, prompt in enumerate(dict.fromkeys(map(tuple, prompt_ids)))}
    return list(number), [number[tuple(prompt)] for prompt in prompt_ids]


def pad_prompts(
    prompt_ids: Sequence[Sequence[int]], device: torch.device, grain: int = 1
) -> Tensor:
    """Token ids [P, W], right-padded with 0 to the longest, or to the next multiple of ``grain``.

    >>> pad_prompts([[7, 8], [9]], torch.device("cpu"), grain=4).tolist()
    [[7, 8, 0, 0], [9, 0, 0, 0]]
    """
    width = -(-max(map(len, prompt_ids)) // grain) * grain
    return torch.tensor(
        [[*prompt, *[0] * (width - len(prompt))] for prompt in prompt_ids], device=device
    )
