"""From logits to a token: the sampling distribution, and a random stream of its own for every row.

Axes: N rows, V vocabulary, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Draw(NamedTuple):
    """A token a row, its log-prob under the distribution it was drawn from, and that distribution's
    entropy.
    """

    token_N: Tensor
    logp_N: Tensor
    entropy_N: Tensor


def uniforms(seed: int | Tensor, streams: Sequence[int] | Tensor, num: int) -> Tensor:
    """Numbers in [0, 1), ``[len(streams), num]`` float64; row i depends on ``(seed, streams[i])``
    alone.

    Philox is counter-based: (seed, stream) is its key and no state is carried from row to row, so
    that neither the number of rows nor their order changes a stream.

    Args:
        seed: of all rows, or one per row.

    >>> bool((uniforms(0, [7, 3], 4)[1] == uniforms(0, [3], 2000)[0, :4]).all())
    True
    """
    stream_N = streams if isinstance(streams, Tensor) else _words(streams)
    seed_N = seed if isinstance(seed, Tensor) else _words([seed]).expand_as(stream_N)
    return ((philox(seed_N, stream_N, num) >> 11) & (1 << 53) - 1).double() * 2.0**-53


def share_openings(uniform_NT: Tensor, group_size: int, num: int) -> Tensor:
    """Random streams with which the rollouts of a prompt draw their first ``num`` tokens alike.

    Every opening is drawn from the policy as any other; it is the same for the whole group.

    >>> share_openings(torch.tensor([[0.1, 0.2], [0.3, 0.4]]), 2, 1)
    tensor([[0.1000, 0.2000],
            [0.1000, 0.4000]])
    """
    first_NF = uniform_NT[::group_size, :num].repeat_interleave(group_size, 0)
    return torch.cat([first_NF, uniform_NT[:, num:]], 1)


def _words(values: Sequence[int]) -> Tensor:
    """Whole numbers modulo 2^64, as the int64 with the same bits."""
    bits = [value & (1 << 64) - 1 for value in values]
    return torch.from_numpy(np.array(bits, np.uint64).view(np.int64))


def philox(key0_N: Tensor, key1_N: Tensor, num: int) -> Tensor:
    """The first ``num`` words of Philox4x64-10 for each key, [N, num]; int64 holds the bits.

    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; numpy's ``Philox`` counts
    blocks from 1.
    """
    block_B = torch.arange(1, -(-num // 4) + 1, device=key0_N.device)
    first_NB = block_B.expand(len(key0_N), -1)
    words = [first_NB, *(torch.zeros_like(first_NB) for _ in range(3))]
    key0_N1, key1_N1 = key0_N[:, None], key1_N[:, None]
    for _ in range(10):
        high0, low0 = _product(words[0], 0xD2E7470EE14C6C93 - (1 << 64))
        high1, low1 = _product(words[2], 0xCA5A826395121157 - (1 << 64))
        words = [high1 ^ words[1] ^ key0_N1, low1, high0 ^ words[3] ^ key1_N1, low0]
        key0_N1 = key0_N1 + (0x9E3779B97F4A7C15 - (1 << 64))
        key1_N1 = key1_N1 + (0xBB67AE8584CAA73B - (1 << 64))
    return torch.stack(words, -1).flatten(1)[:, :num]


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 64 bits of a 128-bit product of unsigned words."""
    half = (1 << 32) - 1
    a0, a1 = word & half, (word >> 32) & half
    b0, b1 = factor & half, (factor >> 32) & half
    middle = a1 * b0 + ((a0 * b0 >> 32) & half)
    cross = a0 * b1 + (middle & half)
    return a1 * b1 + ((middle >> 32) & half) + ((cross >> 32) & half), word * factor


def truncate(logits_NV: Tensor, *, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits with everything outside the top-k, then outside the nucleus, at -inf.

    Top-k keeps the k largest. The nucleus (Holtzman et al. 2020, arXiv 1904.09751) keeps the fewest
    tokens whose probability, renormalised after top-k, reaches ``top_p``. Tokens tied with the last
    one kept are kept.

    Args:
        logits_NV: logits, already divided by the temperature.
        top_k: 0 keeps all.
        top_p: 1 keeps all.

    >>> truncate(torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log(), top_p=0.7).exp().mul(
    ...     100
    ... ).round().tolist()[0]
    [50.0, 30.0, 0.0, 0.0]
    """
    num_tokens = logits_NV.shape[-1]
    if top_p >= 1.0 and not 0 < top_k < num_tokens:
        return logits_NV
    best_NK = logits_NV.topk(min(top_k or num_tokens, num_tokens), dim=-1).values
    prob_NK = torch.softmax(best_NK, dim=-1)
    mass_before_NK = prob_NK.cumsum(-1) - prob_NK
    num_kept_N = (
        (mass_before_NK < top_p).sum(-1).clamp_min(1)
        if top_p < 1.0
        else best_NK.new_full((len(best_NK),), best_NK.shape[1])
    )
    floor_N = best_NK.gather(-1, num_kept_N.long()[:, None] - 1)
    return logits_NV.masked_fill(logits_NV < floor_N, float("-inf"))


def draw(logits_NV: Tensor, uniform_N: Tensor) -> Draw:
    """The token at which the cumulative probability passes ``uniform_N``: ``min {v : sum_{w <= v}
    p_w > u}``.

    Args:
        logits_NV: logits of the sampling distribution (temperature and truncation done), float32 or
            wider.
        uniform_N: float64 in [0, 1).

    >>> draw(
    ...     torch.tensor([[0.2, 0.5, 0.3]]).log(), torch.tensor([0.65], dtype=torch.float64)
    ... ).token_N.tolist()
    [1]
    """
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    prob_NV = logp_NV.exp()
    mass_NV = prob_NV.cumsum(-1, dtype=torch.float64)
    # strictly under the total, or rounding up could pass the last token that has any mass
    total_N1 = mass_NV[:, -1:]
    threshold_N1 = torch.minimum(
        uniform_N[:, None] * total_N1, torch.nextafter(total_N1, torch.zeros_like(total_N1))
    )
    token_N1 = torch.searchsorted(mass_NV, threshold_N1, right=True).clamp_max_(
        logits_NV.shape[-1] - 1
    )
    return Draw(
        token_N1[:, 0], logp_NV.gather(-1, token_N1)[:, 0], torch.special.entr(prob_NV).sum(-1)
    )


def argmax(logits_NV: Tensor) -> Draw:
    """The likeliest token, its log-prob and the entropy under ``softmax(logits_NV)``."""
    logp_NV = torch.log_softmax(logits_NV, dim=-1)
    logp_N, token_N = logp_NV.max(-1)
    return Draw(token_N, logp_N, torch.special.entr(logp_NV.exp()).sum(-1))


def candidates(logits_BV: Tensor, temperature: float, num: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of the ``num`` likeliest tokens, largest first, before any truncation."""
    logits_BV = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / temperature
    best_BK, ids_BK = logits_BV.topk(num, dim=-1)
    return ids_BK, best_BK - logits_BV.logsumexp(-1, keepdim=True)
