"""Standard normal numbers by place: each depends on a seed and its place alone, so that tokens may
be cut into forwards, put in any order and computed on any device.

SplitMix64 (Steele, Lea and Flood 2014) of the place, then Box and Muller.

Axes: K places, D numbers of each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIXES = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
ROWS = 1 << 24  # numbers between two rows: more than a row has tokens


def normal_at(seed_K: Tensor, row_K: Tensor, column_K: Tensor, size: int) -> Tensor:
    """[K, D], float64; equal on every device up to the rounding of log and cosine.

    >>> seed, row, column = torch.tensor([7, 7]), torch.tensor([0, 3]), torch.tensor([5, 2])
    >>> both = normal_at(seed, row, column, 2)
    >>> torch.equal(both[1:], normal_at(seed[1:], row[1:], column[1:], 2))
    True
    """
    place_K1 = ((row_K * ROWS + column_K) * size)[:, None]
    place_KD = place_K1 + torch.arange(1, size + 1, device=row_K.device)
    bits_KD = mixed_bits(place_KD.mul_(GOLDEN).add_(mixed_bits(seed_K)[:, None]))
    low_KD = (bits_KD & 0xFFFFFFFF).to(torch.float64).add_(0.5).mul_(2.0**-32)
    turn_KD = _shifted(bits_KD, 32).to(torch.float64).mul_(math.tau * 2.0**-32)
    return low_KD.log_().mul_(-2).sqrt_().mul_(turn_KD.cos_())


def mixed_bits(value: Tensor) -> Tensor:
    """64 bits, of which each depends on all of the value's; int64 as unsigned numbers."""
    for shift, factor in MIXES:
        value = (value ^ _shifted(value, shift)).mul_(factor)
    return value ^ _shifted(value, 31)


def _shifted(value: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (value >> by).bitwise_and_((1 << (64 - by)) - 1)
