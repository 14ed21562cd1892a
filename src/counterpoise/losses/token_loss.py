"""The shape of a loss: one value a token, and its coefficient by construction the derivative of
that value.

A loss is written as ``fn(trainer_logp_NT, rows, *, params) -> (loss_NT, ratio_NT, clipped_NT)``.
Its law: ``loss_NT[i, t]`` depends differentiably on ``trainer_logp_NT[i, t]`` alone; the log-probs
of other tokens (a sequence ratio, a group's weights) enter detached. So a token's gradient enters
the update with ``coef_NT * scale_NT`` and nothing else, and any cut of a update gives the same
gradient."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from counterpoise.stage import Columns, Fact, Function, Stage
from counterpoise.types import Rows, TokenLoss

Parts = tuple[Tensor, Tensor, Tensor]
Bound = float | Tensor

# the largest log-ratio that counts, as in verl: e^20 is no ratio that a healthy run has
MAX_LOG_RATIO = 20.0


def token_loss(
    fn: Callable[..., Parts] | None = None,
    *,
    prepare: Function | None = None,
    needs: Columns = (),
    **facts: Fact,
) -> Any:
    """Turn ``fn`` into a loss: padding is zeroed before and after, and ``coef_NT`` is taken by
    differentiating ``fn`` itself.

    ``ratio_NT`` is the ratio that the loss works with (a token's own, a rollout's, a prefix's),
    ``clipped_NT`` where it was cut.
    ``prepare(update_logp_NT, rows, *, params) -> update_NT`` is what a loss must know of the whole
    update before it is cut; it names those parameters of ``fn`` that it uses and is never
    differentiated. ``fn`` reads its result as ``rows.update_NT``. Where the caller has not prepared
    the rows, they are taken to be the whole update.

    >>> @token_loss
    ... def squared(trainer_logp_NT, rows):
    ...     "L = -credit * logp^2 / 2"
    ...     nothing_cut_NT = torch.zeros_like(rows.mask_NT)
    ...     return (
    ...         -rows.credit_NT * trainer_logp_NT.square() / 2,
    ...         log_ratio(trainer_logp_NT, rows).exp(),
    ...         nothing_cut_NT,
    ...     )
    >>> one = torch.ones(1, 1)
    >>> rows = Rows(
    ...     torch.tensor([0]), one.bool(), torch.tensor([0]), one[0], one[0], 3 * one, -2 * one, one
    ... )
    >>> squared(-2 * one, rows).coef_NT.item()
    -6.0
    """
    if fn is None:
        return functools.partial(token_loss, prepare=prepare, needs=needs, **facts)
    before = None if prepare is None else _complete(prepare, fn)

    @functools.wraps(fn)
    def loss(trainer_logp_NT: Tensor, rows: Rows, **params: object) -> TokenLoss:
        if before is not None and rows.update_NT is None:
            rows = rows._replace(update_NT=before(trainer_logp_NT, rows, **params))
        mask_NT = rows.mask_NT
        trainer_logp_NT, rows = _without_padding(trainer_logp_NT, rows)
        loss_NT, ratio_NT, clipped_NT = _checked(fn, fn(trainer_logp_NT, rows, **params), mask_NT)
        coef_NT = torch.where(mask_NT, _coef(fn, trainer_logp_NT, rows, params), 0)
        return TokenLoss(
            loss_NT=torch.where(mask_NT, loss_NT, 0),
            ratio_NT=torch.where(mask_NT, ratio_NT.detach(), 1),
            clipped_NT=(clipped_NT | _is_beyond(trainer_logp_NT, rows, coef_NT)) & mask_NT,
            coef_NT=coef_NT,
        )

    return Stage(loss, columns=needs, prepare=before, facts=facts)


def log_ratio(trainer_logp_NT: Tensor, rows: Rows) -> Tensor:
    """log r = trainer - sampler log-prob, or that at which a rule anchors ratios; 0 on padding
    inside a loss, so that sums over a row are sums over its tokens.
    """
    return trainer_logp_NT - start_logp(rows)


def start_logp(rows: Rows) -> Tensor:
    """The log-probs that ratios start from: the sampler's, or the trainer's before the first update
    where a rule moves them there.
    """
    return rows.sampler_logp_NT if rows.anchor_logp_NT is None else rows.anchor_logp_NT


def bounded_exp(log_ratio_NT: Tensor) -> Tensor:
    """exp(log r), at most e^20: finite for every log-ratio, without a gradient beyond, and
    unchanged to the last bit below.

    >>> bounded_exp(torch.tensor([0.0, 200.0])).tolist()
    [1.0, 485165184.0]
    """
    return log_ratio_NT.clamp(max=MAX_LOG_RATIO).exp()


def own_gradient(value_NT: Tensor, log_ratio_NT: Tensor) -> Tensor:
    """sg(value) * r / sg(r): equal to ``value_NT``, with the derivative ``value_NT`` by the token's
    own log-prob and no other.
    """
    return value_NT.detach() * (log_ratio_NT - log_ratio_NT.detach()).exp()


def clamp_by_side(
    value_NT: Tensor, credit_NT: Tensor, low: Bound, high: Bound, ceiling: Bound = math.inf
) -> tuple[Tensor, Tensor]:
    """PPO's pessimistic clip: at most ``high`` where credit is positive, in [``low``, ``ceiling``]
    where it is negative.

    -min(v c, clip(v, low, high) c) = -c * clamp_by_side(v, c, low, high). Tokens without credit are
    clamped to [low, high]. Also returns where a token with credit was cut; its derivative is 0
    there. Bounds are numbers or [N, T].

    >>> value, credit = torch.tensor([[1.5, 0.5, 1.5, 0.5]]), torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    >>> [out.tolist() for out in clamp_by_side(value, credit, 0.8, 1.2)]
    [[[1.2000000476837158, 0.5, 1.5, 0.800000011920929]], [[True, False, False, True]]]
    """
    low_NT, high_NT, ceiling_NT = (
        torch.as_tensor(bound, dtype=value_NT.dtype, device=value_NT.device)
        for bound in (low, high, ceiling)
    )
    lower_NT = torch.where(credit_NT > 0, -math.inf, low_NT)
    upper_NT = torch.where(credit_NT < 0, ceiling_NT, high_NT)
    inner_NT = value_NT.clamp(lower_NT, upper_NT)
    return inner_NT, (inner_NT != value_NT) & (credit_NT != 0)


def _complete(prepare: Function, fn: Function) -> Function:
    """``prepare`` with the parameters it names, filled up with the defaults of the loss: a default
    is written once.
    """
    defaults = {
        name: p.default
        for name, p in inspect.signature(fn).parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }
    named = [
        name
        for name, p in inspect.signature(prepare).parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    ]

    @functools.wraps(prepare)
    def before(update_logp_NT: Tensor, rows: Rows, **params: object) -> Tensor:
        settings = {**defaults, **params}
        with torch.no_grad():
            update_logp_NT, clean = _without_padding(update_logp_NT.detach(), rows)
            update_NT = prepare(update_logp_NT, clean, **{name: settings[name] for name in named})
        return torch.where(rows.mask_NT, update_NT, 0)

    return before


def _without_padding(trainer_logp_NT: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
    """Log-probs in float32 at least, and 0 in every column's padding: what a caller left there
    reaches no sum and no gradient.
    """
    columns = {
        "credit_NT": rows.credit_NT,
        "sampler_logp_NT": rows.sampler_logp_NT,
        "ref_logp_NT": rows.ref_logp_NT,
        "ref_kl_NT": rows.ref_kl_NT,
        "anchor_logp_NT": rows.anchor_logp_NT,
    }
    clean = {
        name: torch.where(rows.mask_NT, value, 0)
        for name, value in columns.items()
        if value is not None
    }
    narrow = trainer_logp_NT.dtype not in (torch.float32, torch.float64)
    trainer_logp_NT = trainer_logp_NT.float() if narrow else trainer_logp_NT
    return torch.where(rows.mask_NT, trainer_logp_NT, 0), rows._replace(**clean)


def _is_beyond(trainer_logp_NT: Tensor, rows: Rows, coef_NT: Tensor) -> Tensor:
    """True on tokens with credit that lost their gradient to the bound of the log-ratio."""
    is_far_NT = log_ratio(trainer_logp_NT.detach(), rows) > MAX_LOG_RATIO
    return is_far_NT & (coef_NT == 0) & (rows.credit_NT != 0)


def _checked(fn: Callable[..., Parts], parts: Any, mask_NT: Tensor) -> Parts:
    """What a loss returned, if that is three tensors with a number per token."""
    where, shape = f"loss {fn.__module__}:{getattr(fn, '__name__', fn)}", list(mask_NT.shape)
    if not isinstance(parts, tuple) or len(parts) != 3:
        tensor = f"a tensor {list(parts.shape)}" if isinstance(parts, Tensor) else None
        got = f"{len(parts)} values" if isinstance(parts, tuple) else f"a {type(parts).__name__}"
        raise ValueError(
            f"{where} returned {tensor or got}, expected (loss_NT, ratio_NT, clipped_NT), each"
            f" {shape}: the loss per token, never reduced; the ratio it works with; where it was"
            " clipped. Without a clip: torch.zeros_like(rows.mask_NT)."
        )
    for name, value in zip(("loss_NT", "ratio_NT", "clipped_NT"), parts, strict=True):
        if not isinstance(value, Tensor) or list(value.shape) != shape:
            is_tensor = isinstance(value, Tensor)
            got = f"shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise ValueError(f"{where}: {name} is {got}, expected {shape}: one value per token.")
    if parts[2].dtype != torch.bool:
        raise ValueError(f"{where}: clipped_NT is {parts[2].dtype}, expected torch.bool.")
    return parts


def _coef(fn: Callable[..., Parts], trainer_logp_NT: Tensor, rows: Rows, params: dict) -> Tensor:
    with torch.enable_grad():
        own_NT = trainer_logp_NT.detach().requires_grad_()
        total = fn(own_NT, rows, **params)[0].sum()
        if not total.requires_grad:
            return torch.zeros_like(own_NT)
        (grad_NT,) = torch.autograd.grad(total, own_NT, allow_unused=True)
    return torch.zeros_like(own_NT) if grad_NT is None else -grad_NT
