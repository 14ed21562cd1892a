"""AdamW and gradient clipping for every member on its own.

Axes: S members, P parameters of a member.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.trainer.config import Optimizer


class Moments(NamedTuple):
    """AdamW's state: first and second moment of every weight, and how many updates they saw."""

    first_SP: Tensor
    second_SP: Tensor
    count_S: Tensor


def zero_moments(theta_SP: Tensor) -> Moments:
    count_S = torch.zeros(len(theta_SP), dtype=torch.float64, device=theta_SP.device)
    return Moments(torch.zeros_like(theta_SP), torch.zeros_like(theta_SP), count_S)


def clip_(grad_SP: Tensor, clip_norm: float | None) -> Tensor:
    """Scale each member's gradient in place to a norm of at most ``clip_norm``; returns the norms
    before.
    """
    norm_S = torch.linalg.vector_norm(grad_SP, dim=1)
    if clip_norm is not None:
        grad_SP.mul_((clip_norm / (norm_S + 1e-6)).clamp_max(1)[:, None])
    return norm_S


@torch.no_grad()
def adamw_(
    theta_SP: Tensor, grad_SP: Tensor, moments: Moments, lr_S: Tensor, settings: Optimizer
) -> None:
    """One update of every member, in place (Loshchilov and Hutter 2019, Algorithm 2).

    m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2;
    theta -= lr (wd theta + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)).
    """
    first_SP, second_SP, count_S = moments
    beta1, beta2 = settings.betas
    count_S += 1
    rate_S1, corrected_S1, root_S1 = (
        column[:, None].to(theta_SP.dtype)
        for column in (lr_S, lr_S / (1 - beta1**count_S), (1 - beta2**count_S).sqrt())
    )
    if settings.weight_decay:
        theta_SP.mul_(1 - rate_S1 * settings.weight_decay)
    first_SP.lerp_(grad_SP, 1 - beta1)
    second_SP.mul_(beta2).addcmul_(grad_SP, grad_SP, value=1 - beta2)
    step_SP = second_SP.sqrt().div_(root_S1).add_(settings.eps)
    theta_SP.sub_(torch.div(first_SP, step_SP, out=step_SP).mul_(corrected_S1))
