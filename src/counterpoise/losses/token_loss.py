"""The shape of a loss: one value a token, and its coefficient by construction the derivative of that value.

A loss is written as ``fn(trainer_logp_NT, rows, *, params) -> (loss_NT, ratio_NT, clipped_NT)``. Its law: ``loss_NT[i, t]`` depends
differentiably on ``trainer_logp_NT[i, t]`` alone; the log-probs of other tokens (a sequence ratio, a group's weights) enter detached. So a
token's gradient enters the update with ``coef_NT * scale_NT`` and nothing else, and any cut of a step gives the same gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from counterpoise.build import Stage, bindable
from counterpoise.types import Rows, TokenLoss

Parts = tuple[Tensor, Tensor, Tensor]


def token_loss(fn: Callable[..., Parts] | None = None, *, prepare: Stage | None = None) -> Stage:
    """Turn ``fn`` into a loss: padding is masked and ``coef_NT`` is taken by differentiating ``fn`` itself.

    ``prepare(step_logp_NT, rows, *, params) -> step_NT`` is what a loss must know of the whole optimizer step before it is cut (detached).
    ``fn`` reads it as ``rows.step_NT``. Where the caller has not prepared the rows, they are taken to be the whole step.
    """
    if fn is None:
        return functools.partial(token_loss, prepare=prepare)

    @bindable
    @functools.wraps(fn)
    def loss(trainer_logp_NT: Tensor, rows: Rows, **params) -> TokenLoss:
        if prepare is not None and rows.step_NT is None:
            rows = rows._replace(step_NT=prepare(trainer_logp_NT.detach(), rows, **params))
        trainer_logp_NT = wide(trainer_logp_NT)
        loss_NT, ratio_NT, clipped_NT = fn(trainer_logp_NT, rows, **params)
        mask_NT = rows.mask_NT
        return TokenLoss(
            loss_NT=torch.where(mask_NT, loss_NT, 0),
            ratio_NT=torch.where(mask_NT, ratio_NT.detach(), 1),
            clipped_NT=clipped_NT & mask_NT,
            coef_NT=torch.where(mask_NT, _coef(fn, trainer_logp_NT, rows, params), 0),
        )

    loss.prepare = prepare  # pyright: ignore[reportFunctionMemberAccess]
    return loss


def wide(value: Tensor) -> Tensor:
    """float32 at least."""
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def log_ratio(trainer_logp_NT: Tensor, rows: Rows) -> Tensor:
    """log r = trainer - sampler log-prob, 0 on padding (so that sums over a row are sums over its tokens)."""
    return torch.where(rows.mask_NT, trainer_logp_NT - rows.sampler_logp_NT, 0)


def _coef(fn: Callable[..., Parts], trainer_logp_NT: Tensor, rows: Rows, params: dict) -> Tensor:
    with torch.enable_grad():
        own_NT = trainer_logp_NT.detach().requires_grad_()
        total = fn(own_NT, rows, **params)[0].sum()
        if not total.requires_grad:
            return torch.zeros_like(own_NT)
        (grad_NT,) = torch.autograd.grad(total, own_NT, allow_unused=True)
    return torch.zeros_like(own_NT) if grad_NT is None else -grad_NT
