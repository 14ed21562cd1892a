"""A batch with every column, for tests that run every method."""

from __future__ import annotations

import torch

import counterpoise as cp

V, D, K = 9, 5, 4


def make_batch(num_groups: int = 4, size: int = 4, width: int = 7, seed: int = 0) -> cp.TokenBatch:
    """Ragged rollouts in float64 with every column; group 0 is constant, the others are mixed, rows
    are interleaved.
    """
    gen = torch.Generator().manual_seed(seed)
    n = num_groups * size
    length_N = torch.randint(2, width + 1, (n,), generator=gen)
    length_N[0] = width
    mask_NT = torch.arange(width) < length_N[:, None]
    group_N = torch.arange(n) % num_groups
    reward_N = (torch.arange(n) // num_groups % 2 == 0).double()
    reward_N[group_N == 0] = 1.0
    hidden_NTD = torch.randn(n, width, D, dtype=torch.float64, generator=gen)
    head_VD = torch.randn(V, D, dtype=torch.float64, generator=gen)
    logp_NTV = (hidden_NTD @ head_VD.T).log_softmax(-1)
    ids_NT = torch.randint(0, V, (n, width), generator=gen) % 3
    sampler_NT = logp_NTV.gather(2, ids_NT[..., None]).squeeze(2)
    top = logp_NTV.topk(K, -1)
    noise = [0.2 * torch.randn(n, width, dtype=torch.float64, generator=gen) for _ in range(2)]
    zero = torch.zeros(())
    return cp.TokenBatch(
        token_ids_NT=torch.where(mask_NT, ids_NT, 0),
        mask_NT=mask_NT,
        group_N=group_N,
        reward_N=reward_N,
        sampler_logp_NT=torch.where(mask_NT, sampler_NT, zero),
        entropy_NT=torch.where(mask_NT, -(logp_NTV.exp() * logp_NTV).sum(-1), zero),
        trainer_logp_NT=torch.where(mask_NT, (sampler_NT + noise[0]).clamp(max=0), zero),
        ref_logp_NT=torch.where(mask_NT, (sampler_NT + noise[1]).clamp(max=0), zero),
        hidden_NTD=hidden_NTD,
        topk_ids_NTK=top.indices,
        topk_logp_NTK=top.values,
        head_VD=head_VD,
    )
