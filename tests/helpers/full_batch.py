"""A batch with every column, for tests that run every method."""

from __future__ import annotations

import torch

import counterpoise as cp

V, D, K = 9, 5, 4


def make_batch(
    num_groups: int = 4, size: int = 4, width: int = 7, seed: int = 0, turns: bool = False
) -> cp.TokenBatch:
    """Ragged rollouts in float64 with every column, those of turns if asked; group 0 is constant,
    the others are mixed, rows are interleaved.
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
    teacher_NT = sampler_NT + 0.5 * torch.randn(n, width, dtype=torch.float64, generator=gen)
    batch = cp.TokenBatch(
        token_ids_NT=torch.where(mask_NT, ids_NT, 0),
        mask_NT=mask_NT,
        group_N=group_N,
        reward_N=reward_N,
        sampler_logp_NT=torch.where(mask_NT, sampler_NT, zero),
        entropy_NT=torch.where(mask_NT, -(logp_NTV.exp() * logp_NTV).sum(-1), zero),
        trainer_logp_NT=torch.where(mask_NT, (sampler_NT + noise[0]).clamp(max=0), zero),
        ref_logp_NT=torch.where(mask_NT, (sampler_NT + noise[1]).clamp(max=0), zero),
        teacher_logp_NT=torch.where(mask_NT, teacher_NT.clamp(max=0), zero),
        has_teacher_N=torch.arange(n) % 5 > 0,
        ref_kl_NT=torch.where(mask_NT, noise[1].square() / 2, zero),
        importance_NT=torch.where(mask_NT, noise[0].abs() - 0.05, zero),
        hidden_NTD=hidden_NTD,
        topk_ids_NTK=top.indices,
        topk_logp_NTK=top.values,
        head_VD=head_VD,
    )
    batch = with_values(batch, seed)
    return with_turns(batch, seed) if turns else batch


def with_values(batch: cp.TokenBatch, seed: int = 0) -> cp.TokenBatch:
    """The same rollouts in segments of two tokens with values in ninths; every other rollout begins
    without a segment.
    """
    gen = torch.Generator().manual_seed(seed)
    n, width = batch.mask_NT.shape
    segment_NT = torch.arange(width) // 2 - torch.arange(n)[:, None] % 2
    value_NS = torch.randint(0, 10, (n, width), generator=gen).to(batch.reward_N.dtype) / 9
    return batch.replace(
        segment_NT=torch.where(batch.mask_NT, segment_NT, -1),
        value_NT=value_NS.gather(1, segment_NT.clamp(min=0)),
    )


def with_turns(batch: cp.TokenBatch, seed: int = 0) -> cp.TokenBatch:
    """The same rollouts played in one to three turns, with rewards, states (some that several
    turns share) and scores (some without).
    """
    gen = torch.Generator().manual_seed(seed)
    n, u, dtype = batch.num_rollouts, 3, batch.reward_N.dtype
    length_N1 = batch.length_N[:, None]
    num_N1 = torch.randint(1, u + 1, (n, 1), generator=gen).minimum(length_N1)
    turn_NT = (batch.mask_NT.cumsum(1) - 1) * num_N1 // length_N1
    mask_NU = torch.arange(u) < num_N1
    reward_NU = torch.randint(-2, 3, (n, u), generator=gen).to(dtype) / 4 * mask_NU
    rest_N1 = batch.reward_N[:, None] - reward_NU.sum(1, keepdim=True)
    score_NU = torch.rand(n, u, generator=gen, dtype=dtype)
    state_NU = torch.randint(0, 3, (n, u), generator=gen) + 10 * batch.group_N[:, None]
    return batch.replace(
        turn_NT=torch.where(batch.mask_NT, turn_NT, -1),
        turn_mask_NU=mask_NU,
        turn_reward_NU=reward_NU.scatter_add(1, num_N1 - 1, rest_N1),
        turn_score_NU=torch.where(score_NU < 0.2, torch.nan, score_NU),
        state_NU=torch.where(mask_NU, state_NU, -1),
    )
