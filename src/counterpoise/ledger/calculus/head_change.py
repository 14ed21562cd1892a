"""What a update did at the head: log-probs before and after, entropy, KL, and the head's own part,
from hidden states kept of two forwards.

Full distributions are [tokens, vocabulary]; only ``chunk`` rows of them exist at any moment.

Axes: M response tokens laid end to end, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.maths.head import CHUNK_LOGITS, Head, head_logits
from counterpoise.maths.wide import wide_product
from counterpoise.policy.split import can_split, product_by

Product = Callable[[Tensor], Tensor]


class HeadState(NamedTuple):
    """What feeds the head, and the head, at one set of parameters."""

    hidden_MD: Tensor
    head: Head


class HeadChange(NamedTuple):
    """``entropy_M`` is before the update; ``kl_M`` is KL(after || before); ``own_head_M`` is the
    part of the change that a token's own gradient brings through the head, for a coefficient of 1.
    """

    logp_before_M: Tensor
    logp_after_M: Tensor
    entropy_M: Tensor
    kl_M: Tensor | None
    own_head_M: Tensor | None


class HeadResponse(NamedTuple):
    """The optimizer's response at the head's weight and bias: tensors of their shape, or one
    number.
    """

    weight: Tensor | float
    bias: Tensor | float = 0.0


@torch.no_grad()
def head_change(
    before: HeadState,
    after: HeadState,
    target_M: Tensor,
    *,
    temperature: float = 1.0,
    response: HeadResponse | None = None,
    chunk: int | None = None,
    fused: bool = False,
) -> HeadChange:
    """Compare the distributions of two parameter settings at the same tokens.

    In float32 or wider.

    Args:
        before, after: hidden states and heads.
        target_M: token ids.
        response: see ``own_head``.
        chunk: tokens whose distributions are alive at once (default: 64 MiB of logits; fused on a
            GPU four times as many).
        fused: one kernel over the logits (Triton) instead of plain operations, where ``can_fuse``.

    >>> z = torch.tensor([[0.5, 0.5]]).log()
    >>> after = torch.tensor([[0.8, 0.2]]).log()
    >>> out = head_change(
    ...     HeadState(z, Head(torch.eye(2))),
    ...     HeadState(after, Head(torch.eye(2))),
    ...     torch.tensor([0]),
    ... )
    >>> (
    ...     round(out.kl_M.item(), 4),
    ...     round((out.logp_after_M - out.logp_before_M).item(), 4),
    ... )  # 0.8 log 1.6 + 0.2 log 0.4; log 1.6
    (0.1927, 0.47)
    """
    many = 4 if fused and before.hidden_MD.is_cuda else 1
    size = chunk or max(1, many * CHUNK_LOGITS // before.head.weight_VD.shape[0])
    compare = (
        partial(_compare_fused, _products(before, after, response))
        if fused and can_fuse(before)
        else _compare
    )
    parts = [
        compare(
            HeadState(before.hidden_MD[start : start + size], before.head),
            HeadState(after.hidden_MD[start : start + size], after.head),
            target_M[start : start + size],
            temperature,
            response,
        )
        for start in range(0, len(target_M), size)
    ]
    return HeadChange(*(None if column[0] is None else torch.cat(column) for column in zip(*parts)))  # pyright: ignore[reportArgumentType]


def can_fuse(state: HeadState) -> bool:
    """Whether there is a kernel for it: float32, and no more than a weight and a scale."""
    hidden_MD, head = state
    is_wide = hidden_MD.dtype == torch.float32 and head.weight_VD.dtype == torch.float32
    return is_wide and head.bias_V is None and head.softcap is None


def _compare(
    before: HeadState,
    after: HeadState,
    target_M: Tensor,
    temperature: float,
    response: HeadResponse | None,
) -> HeadChange:
    logits_MV = head_logits(before.hidden_MD, before.head, temperature=temperature)
    logp_MV, token_M1 = logits_MV.log_softmax(-1), target_M[:, None]
    after_MV = head_logits(after.hidden_MD, after.head, temperature=temperature).log_softmax(-1)
    return HeadChange(
        logp_MV.gather(1, token_M1)[:, 0],
        after_MV.gather(1, token_M1)[:, 0],
        -(logp_MV.exp() * logp_MV).sum(-1),
        kl(after_MV, logp_MV),
        None if response is None else own_head(before, logits_MV, token_M1, temperature, response),
    )


class Products(NamedTuple):
    """``x W^T`` for the heads before and after, and for the response where it is a tensor; each
    weight is made ready once for all tokens.
    """

    before: Product
    after: Product
    response: Product | None


def _products(before: HeadState, after: HeadState, response: HeadResponse | None) -> Products:
    def product(weight_VD: Tensor) -> Product:
        if can_split(before.head.weight_VD):
            return product_by(weight_VD)
        return partial(wide_product, weight_VD=weight_VD)

    rate = None if response is None else response.weight
    return Products(
        product(before.head.weight_VD),
        product(after.head.weight_VD),
        product(rate) if isinstance(rate, Tensor) else None,
    )


def _ready(product: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """As ``head_logits`` calls it, with a weight that is ready already."""
    return lambda x_MD, _: product(x_MD)


def _compare_fused(
    products: Products,
    before: HeadState,
    after: HeadState,
    target_M: Tensor,
    temperature: float,
    response: HeadResponse | None,
) -> HeadChange:
    from counterpoise.ledger.calculus.kernels.triton_head import compare_logits

    first_MV = head_logits(*before, temperature=temperature, product=_ready(products.before))
    second_MV = head_logits(*after, temperature=temperature, product=_ready(products.after))
    rate, square_MD = None if response is None else response.weight, before.hidden_MD.square()
    rate_MV = None if products.response is None else products.response(square_MD)
    logp_M, after_M, entropy_M, kl_M, own_M = compare_logits(first_MV, second_MV, target_M, rate_MV)
    if rate is not None and rate_MV is None:
        own_M = own_M * rate * square_MD.sum(1)
    own_M = own_M * (before.head.scale / temperature) ** 2
    return HeadChange(logp_M, after_M, entropy_M, kl_M, None if response is None else own_M)


def kl(after_MV: Tensor, before_MV: Tensor) -> Tensor:
    """KL(after || before) = sum_v p'_v (log p'_v - log p_v) of log-probs, as sum_v p'_v (exp(-x_v)
    - 1 + x_v) with x = log p' - log p.

    Both are the same, because p and p' add up to 1; but every term of the second is at least 0,
    where those of the first are of the order of x, cancel down to x^2, and leave rounding behind:
    with the small updates of RL float32 would give noise of either sign.

    >>> a = torch.linspace(-3, 3, 50000)[None].log_softmax(-1)
    >>> b = (a + 1e-4 * torch.linspace(0, 99, 50000).sin()).log_softmax(-1)
    >>> exact = kl(b.double().log_softmax(-1), a.double().log_softmax(-1))
    >>> bool((kl(b, a) - exact).abs() < 0.01 * exact)
    True
    """
    x_MV, p_MV = after_MV - before_MV, after_MV.exp()
    near_MV = p_MV * (torch.expm1(-x_MV) + x_MV)
    far_MV = before_MV.exp() + p_MV * (
        x_MV - 1
    )  # the same, for tokens that all but vanished: there exp(-x) overflows
    return torch.where(x_MV < -1, far_MV, near_MV).sum(-1)


def own_head(
    state: HeadState,
    logits_MV: Tensor,
    token_M1: Tensor,
    temperature: float,
    response: HeadResponse,
) -> Tensor:
    """<g_j, P g_j> over the head's weight and bias: how far a unit coefficient on token j's own
    gradient moves its own log-prob there.

    sum_vd P_vd u_v^2 h_d^2 with u = d logp_j / d(h W^T + b). Under SGD P is the learning rate and
    it is eta phi_jj |h_j|^2 (at temperature 1, plain head); under AdamW it is one more head
    product, h^2 P^T."""
    hidden_MD, head = state
    square_MV = logit_slope(logits_MV, token_M1, head, temperature).square()
    squares_MD = hidden_MD.to(square_MV.dtype).square()
    if isinstance(response.weight, Tensor):
        own_M = (square_MV * (squares_MD @ response.weight.to(square_MV.dtype).T)).sum(-1)
    else:
        own_M = response.weight * square_MV.sum(-1) * squares_MD.sum(-1)
    return own_M if head.bias_V is None else own_M + (square_MV * response.bias).sum(-1)


def logit_slope(logits_MV: Tensor, token_M1: Tensor, head: Head, temperature: float) -> Tensor:
    """u = d logp_j / d(h W^T + b) of each token: ``e_a - pi`` for a plain head at temperature 1."""
    u_MV = -logits_MV.softmax(-1)
    u_MV.scatter_add_(1, token_M1, torch.ones_like(token_M1, dtype=u_MV.dtype))
    if head.softcap is not None:
        u_MV = u_MV * (1 - (logits_MV * (temperature / head.softcap)).square())
    return u_MV * (head.scale / temperature)
