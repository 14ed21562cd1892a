"""Updates to try losses on, and what is measured on them."""

from __future__ import annotations

import math

import torch

from counterpoise.advantages import group_mean
from counterpoise.reductions import constant_length
from counterpoise.types import Rows

INF = math.inf


def rows_of(batch, credit_NT=None, advantage_N=None) -> Rows:
    """A batch of all rollouts of a batch, constant-length scale."""
    if advantage_N is None:
        advantage_N = group_mean(batch.reward_N, batch.group_N)
    credit_NT = (
        torch.where(batch.mask_NT, advantage_N[:, None], 0) if credit_NT is None else credit_NT
    )
    return Rows(
        row_R=torch.arange(batch.num_rollouts),
        mask_NT=batch.mask_NT,
        group_N=batch.group_N,
        reward_N=batch.reward_N,
        advantage_N=advantage_N,
        credit_NT=credit_NT,
        sampler_logp_NT=batch.sampler_logp_NT,
        scale_NT=constant_length(batch.mask_NT, credit_NT, advantage_N, length=5),
        ref_logp_NT=batch.ref_logp_NT,
        ref_kl_NT=(batch.sampler_logp_NT - batch.ref_logp_NT).square(),
        rollout_scale_N=torch.full_like(advantage_N, 1 / batch.num_rollouts),
    )


def random_rows(
    seed=0, n=6, width=5, spread=0.5, num_groups=2, uniform=False
) -> tuple[torch.Tensor, Rows]:
    """Trainer log-probs and a batch in float64: ragged lengths, credit of both signs with zeros in
    it (or advantage * mask).
    """
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    mask_NT = torch.arange(width) < torch.randint(1, width + 1, (n, 1), generator=gen)
    mask_NT[0] = True
    group_N, reward_N = torch.arange(n) % num_groups, (torch.arange(n) // num_groups % 2).double()
    advantage_N = group_mean(reward_N, group_N)
    credit_NT = (
        normal(n, width) * (torch.rand(n, width, generator=gen) > 0.2)
        if not uniform
        else advantage_N[:, None].expand(n, width)
    )
    credit_NT = torch.where(mask_NT, credit_NT, 0)
    sampler_NT = -normal(n, width).abs()
    scale_NT = constant_length(mask_NT, credit_NT, advantage_N, length=width)
    ref_NT = sampler_NT + 0.3 * normal(n, width)
    rows = Rows(
        torch.arange(n),
        mask_NT,
        group_N,
        reward_N,
        advantage_N,
        credit_NT,
        sampler_NT,
        scale_NT,
        ref_NT,
        ref_kl_NT=(sampler_NT - ref_NT).square(),
        rollout_scale_N=torch.full_like(advantage_N, 1 / n),
    )
    return sampler_NT + spread * normal(n, width), rows


def one_token(ratio: float, credit: float, sampler=-1.0, ref=-1.0) -> tuple[torch.Tensor, Rows]:
    cell = torch.ones(1, 1, dtype=torch.float64)
    rows = Rows(
        torch.tensor([0]),
        cell.bool(),
        torch.tensor([0]),
        cell[0],
        credit * cell[0],
        credit * cell,
        sampler * cell,
        cell,
        ref * cell,
    )
    return sampler * cell + math.log(ratio), rows


def value_and_gradient(
    total: torch.Tensor, leaf_NT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return total.detach(), torch.autograd.grad(total, leaf_NT)[0]


def gradient(loss, logp_NT, rows: Rows) -> torch.Tensor:
    """Of the reduced loss by the log-probs."""
    leaf_NT = logp_NT.clone().requires_grad_()
    return value_and_gradient((loss(leaf_NT, rows).loss_NT * rows.scale_NT).sum(), leaf_NT)[1]


def assert_close(got, expected, rtol=1e-12, atol=1e-12):
    torch.testing.assert_close(
        got, torch.as_tensor(expected, dtype=got.dtype), rtol=rtol, atol=atol
    )
