"""Log-prob, entropy and top-k of a language-model head, a few tokens at a time.

A head turns a hidden state into logits; over a whole batch those are [tokens, vocabulary], by far
the largest tensor of a training batch. Everything here walks over chunks of tokens, so that no more
than ``chunk`` rows of logits exist at any moment, in the forward and in the backward.

Axes: M response tokens laid end to end, V vocabulary, D hidden size, K candidates kept of V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.maths.wide import wide_product

# logits alive at once by default: 64 MiB in float32; four times as many on a GPU, which small
# chunks leave idle
CHUNK_LOGITS = 2**24


class Head(NamedTuple):
    """What a model does to the last hidden state: ``z = cap(scale * (h W^T + b))``, ``cap(z) = c
    tanh(z / c)`` where there is a cap.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


class HeadScores(NamedTuple):
    """Columns of one pass over the head; the ones not asked for are None."""

    logp_M: Tensor
    entropy_M: Tensor | None = None
    topk_ids_MK: Tensor | None = None
    topk_logp_MK: Tensor | None = None


def head_logits(
    hidden_MD: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    product: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Logits of the sampling distribution before truncation, ``z / temperature``, float32 or wider.

    Half-precision weights are multiplied with float32 sums and never rounded back: a logit of 20 in
    bfloat16 is off by up to 0.06.

    Args:
        hidden_MD: final hidden states, one row per token.
        head: the model's head.
        product: ``(h, W) -> h W^T``, where it is another one.

    >>> head = Head(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), scale=0.5)
    >>> head_logits(torch.tensor([[3.0, 4.0]]), head).tolist()
    [[1.5, 4.0]]
    """
    head = _autocast(head, hidden_MD)
    logits_MV = (product or wide_product)(hidden_MD.to(head.weight_VD.dtype), head.weight_VD)
    if head.bias_V is not None:
        logits_MV = logits_MV + head.bias_V
    if head.scale != 1.0:
        logits_MV = logits_MV * head.scale
    if head.softcap is not None:
        logits_MV = head.softcap * torch.tanh(logits_MV / head.softcap)
    return logits_MV if temperature == 1.0 else logits_MV / temperature


def logits_scores(
    logits_MV: Tensor, target_M: Tensor, *, with_entropy: bool = False, topk: int = 0
) -> HeadScores:
    """Log-prob of the targets, entropy and the ``topk`` largest log-probs of logits that are
    already there; plain operations.

    >>> out = logits_scores(torch.tensor([[0.2, 0.5, 0.3]]).log(), torch.tensor([2]), topk=2)
    >>> round(out.logp_M.exp().item(), 4), out.topk_ids_MK.tolist()
    (0.3, [[1, 2]])
    """
    logp_MV = torch.log_softmax(logits_MV, dim=-1)
    best = logp_MV.topk(min(topk, logp_MV.shape[-1]), dim=-1) if topk else None
    return HeadScores(
        logp_MV.gather(-1, target_M[:, None]).squeeze(-1),
        -(logp_MV.exp() * logp_MV).sum(-1) if with_entropy else None,
        None if best is None else best.indices,
        None if best is None else best.values,
    )


@torch.no_grad()
def head_scores(
    hidden_MD: Tensor,
    target_M: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
    topk: int = 0,
) -> HeadScores:
    """Log-prob of the targets and, if asked for, entropy and the ``topk`` largest log-probs; no
    gradient.

    ``logp_m = log softmax(z_m / temperature)[target_m]``, ``entropy_m = -sum_v p_mv log p_mv``.

    Args:
        hidden_MD: final hidden states, one row per token.
        target_M: token ids.
        chunk: tokens whose logits are alive at once (default: 64 MiB of them, 256 MiB on a GPU).
        topk: K; the candidates come in order, largest first.

    >>> head = Head(torch.eye(2))
    >>> out = head_scores(
    ...     torch.zeros(3, 2), torch.tensor([0, 1, 1]), head, with_entropy=True, chunk=2
    ... )
    >>> [round(x, 4) for x in out.logp_M.tolist()], round(out.entropy_M[0].item(), 4)
    ([-0.6931, -0.6931, -0.6931], 0.6931)
    """
    head = _autocast(head, hidden_MD)
    with torch.autocast(hidden_MD.device.type, enabled=False):
        return _by_chunk(
            hidden_MD, target_M, head, temperature, chunk, with_entropy=with_entropy, topk=topk
        )


def logits_kl(logits_MV: Tensor, ref_logits_MV: Tensor) -> Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) of each row, [M], p of the first logits; >= 0.

    >>> p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.8, 0.2]])
    >>> round(logits_kl(p.log(), q.log()).item(), 5)
    0.22314
    """
    logp_MV = torch.log_softmax(logits_MV, dim=-1)
    gap_MV = logp_MV - torch.log_softmax(ref_logits_MV, dim=-1)
    prob_MV = logp_MV.exp()
    return torch.where(prob_MV > 0, prob_MV * gap_MV, 0).sum(-1).clamp(min=0)


@torch.no_grad()
def head_kl(
    hidden_MD: Tensor,
    head: Head,
    ref_hidden_MD: Tensor,
    ref_head: Head,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """Exact KL over the vocabulary of two heads on their own hidden states, [M]; no gradient.

    >>> one = Head(torch.eye(2))
    >>> head_kl(torch.ones(3, 2), one, torch.zeros(3, 2), one, chunk=2).tolist()
    [0.0, 0.0, 0.0]
    """
    heads = _autocast(head, hidden_MD), _autocast(ref_head, ref_hidden_MD)
    with torch.autocast(hidden_MD.device.type, enabled=False):
        parts = []
        for rows in _chunks(len(hidden_MD), head, chunk):
            pair = zip((hidden_MD[rows], ref_hidden_MD[rows]), heads)
            parts.append(logits_kl(*(head_logits(h, w, temperature=temperature) for h, w in pair)))
    return torch.cat(parts)


def head_logp(
    hidden_MD: Tensor,
    target_M: Tensor,
    head: Head,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    fused: bool = True,
) -> Tensor:
    """Differentiable log-prob of the targets, [M].

    ``fused`` keeps only the hidden states and computes each chunk's logits again in the backward:
    ``d logp_m / d z_mv = 1[v = target_m] - p_mv``.

    Without it the derivative stands in the value, ``logp + <u, z> - <u, z>`` with ``u = d logp / d
    z`` held constant, so that any mode of differentiation finds it: a direction of forward mode
    then costs one product of ``u`` with the direction of the weight, and nothing of the
    vocabulary's size is differentiated. First derivatives only.

    >>> head = Head(torch.eye(2, requires_grad=True))
    >>> round(head_logp(torch.zeros(1, 2), torch.tensor([0]), head).item(), 4)
    -0.6931
    """
    head = _autocast(head, hidden_MD)
    if not fused:
        return _first_order(hidden_MD, target_M, head, temperature, chunk)
    spec = (head.scale, head.softcap, temperature, chunk)
    return _ChunkedHead.apply(hidden_MD, head.weight_VD, head.bias_V, target_M, spec)  # pyright: ignore[reportReturnType]


def head_logp_change(
    hidden_MAD: Tensor,
    target_M: Tensor,
    head: Head,
    weight_CVD: Tensor | None,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> Tensor:
    """First-order change of the targets' log-prob, [C, M]: ``<u, dh W^T + h dW^T>`` with u = d logp
    / d(h W^T). The bias stays.

    Args:
        hidden_MAD: hidden states (slot 0) and their C changes.
        head: in the dtype of the products.
        weight_CVD: changes of the head's weight; None where it stays.

    >>> hidden_MAD = torch.tensor(
    ...     [[[0.0, 0.0], [1.0, 0.0]]]
    ... )  # probabilities 1/2, the first logit grows
    >>> head_logp_change(hidden_MAD, torch.tensor([0]), Head(torch.eye(2)), None).tolist()
    [[0.5]]
    """
    dtype = head.weight_VD.dtype
    wide = torch.promote_types(dtype, torch.float32)
    weights = [] if weight_CVD is None else list(weight_CVD.to(dtype))
    parts = []
    for rows in _chunks(len(target_M), head, chunk):
        hidden_MD, change_MCD = hidden_MAD[rows, 0], hidden_MAD[rows, 1:].to(wide)
        logits_MV = head_logits(hidden_MD, head, temperature=temperature)
        one_M = torch.ones(len(hidden_MD), dtype=wide, device=hidden_MD.device)
        u_MV = _through_head(
            _logit_grad(logits_MV, target_M[rows], one_M), logits_MV, head, temperature
        )
        change_MC = (change_MCD @ (u_MV @ head.weight_VD).to(wide)[:, :, None])[..., 0]
        for c, weight_VD in enumerate(weights):
            change_MC[:, c] += ((u_MV @ weight_VD).to(wide) * hidden_MD.to(wide)).sum(-1)
        parts.append(change_MC)
    return torch.cat(parts).T


def _by_chunk(
    hidden_MD: Tensor,
    target_M: Tensor,
    head: Head,
    temperature: float,
    chunk: int | None,
    *,
    with_entropy: bool,
    topk: int,
) -> HeadScores:
    parts = []
    for rows in _chunks(len(target_M), head, chunk):
        logits_MV = head_logits(hidden_MD[rows], head, temperature=temperature)
        parts.append(logits_scores(logits_MV, target_M[rows], with_entropy=with_entropy, topk=topk))
    return HeadScores(*(None if column[0] is None else torch.cat(column) for column in zip(*parts)))  # pyright: ignore[reportArgumentType]


def _chunks(num_tokens: int, head: Head, chunk: int | None) -> Iterator[slice]:
    size = chunk or max(
        1, (4 if head.weight_VD.is_cuda else 1) * CHUNK_LOGITS // head.weight_VD.shape[0]
    )
    for start in range(0, max(num_tokens, 1), size):
        yield slice(start, start + size)


def _first_order(
    hidden_MD: Tensor, target_M: Tensor, head: Head, temperature: float, chunk: int | None
) -> Tensor:
    bias_V = None if head.bias_V is None else head.bias_V.detach()
    still = head._replace(weight_VD=head.weight_VD.detach(), bias_V=bias_V)
    parts = []
    for rows in _chunks(len(target_M), head, chunk):
        logits_MV = head_logits(hidden_MD[rows].detach(), still, temperature=temperature)
        logp_M = logits_scores(logits_MV, target_M[rows]).logp_M
        u_MV = _logit_grad(logits_MV, target_M[rows], torch.ones_like(logp_M))
        u_MV = _through_head(u_MV, logits_MV, head, temperature)
        parts.append(logp_M + _moving(u_MV, hidden_MD[rows], head))
    return torch.cat(parts)


def _through_head(dz_MV: Tensor, logits_MV: Tensor, head: Head, temperature: float) -> Tensor:
    """A gradient at the logits as one at ``h W^T + b``, in the weight's dtype."""
    if head.softcap is not None:
        dz_MV = dz_MV * (1 - (logits_MV * (temperature / head.softcap)) ** 2)
    return (dz_MV * (head.scale / temperature)).to(head.weight_VD.dtype)


def _moving(u_MV: Tensor, hidden_MD: Tensor, head: Head) -> Tensor:
    """``<u, h W^T + b>`` minus its own value: 0 that moves with hidden states, weight and bias."""
    with torch.autocast(hidden_MD.device.type, enabled=False):
        wide = torch.promote_types(u_MV.dtype, torch.float32)
        product_M = ((u_MV @ head.weight_VD).to(wide) * hidden_MD.to(wide)).sum(-1)
        if head.bias_V is not None:
            product_M = product_M + u_MV.to(wide) @ head.bias_V.to(wide)
    return product_M - product_M.detach()


def _autocast(head: Head, hidden_MD: Tensor) -> Head:
    # a custom backward runs outside the autocast context: the matmul's dtype is fixed here, once
    # for both directions
    device = hidden_MD.device.type
    if not torch.is_autocast_enabled(device):
        return head
    return head._replace(weight_VD=head.weight_VD.to(torch.get_autocast_dtype(device)))


class _ChunkedHead(torch.autograd.Function):
    """logp_M of a head; saves the inputs alone and recomputes logits in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        spec: tuple,
    ) -> Tensor:
        scale, softcap, temperature, chunk = spec
        head = Head(weight_VD, bias_V, scale, softcap)
        ctx.save_for_backward(hidden_MD, weight_VD, bias_V, target_M)
        ctx.spec = spec
        with torch.autocast(hidden_MD.device.type, enabled=False):
            return head_scores(
                hidden_MD, target_M, head, temperature=temperature, chunk=chunk
            ).logp_M

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logp_M: Tensor) -> Any:
        hidden_MD, weight_VD, bias_V, target_M = ctx.saved_tensors
        scale, softcap, temperature, chunk = ctx.spec
        head = Head(weight_VD, bias_V, scale, softcap)
        grads = _zero_grads(ctx.needs_input_grad, hidden_MD, weight_VD, bias_V)
        for rows in _chunks(len(target_M), head, chunk):
            logits_MV = head_logits(hidden_MD[rows], head, temperature=temperature)
            dz_MV = _logit_grad(logits_MV, target_M[rows], grad_logp_M[rows])
            dz_MV = _through_head(dz_MV, logits_MV, head, temperature)
            _add_grads(grads, rows, dz_MV, hidden_MD, weight_VD)
        inputs = (hidden_MD, weight_VD, bias_V)
        return (*(None if g is None else g.to(x.dtype) for g, x in zip(grads, inputs)), None, None)


def _zero_grads(needed: tuple[bool, ...], *inputs: Tensor | None) -> list[Tensor | None]:
    # sums over chunks are kept in float32: many small terms in half precision would be lost
    return [
        (
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
            if need and x is not None
            else None
        )
        for need, x in zip(needed, inputs)
    ]


def _add_grads(
    grads: list[Tensor | None], rows: slice, dz_MV: Tensor, hidden_MD: Tensor, weight_VD: Tensor
) -> None:
    grad_MD, grad_VD, grad_V = grads
    if grad_MD is not None:
        grad_MD[rows] = (dz_MV @ weight_VD).to(grad_MD.dtype)
    if grad_VD is not None:
        grad_VD += dz_MV.T @ hidden_MD[rows].to(weight_VD.dtype)
    if grad_V is not None:
        grad_V += dz_MV.sum(0)


def _logit_grad(logits_MV: Tensor, target_M: Tensor, grad_logp_M: Tensor) -> Tensor:
    prob_MV = torch.log_softmax(logits_MV, dim=-1).exp_()
    out_MV = prob_MV.mul_(-grad_logp_M[:, None])
    return out_MV.scatter_add_(-1, target_M[:, None], grad_logp_M[:, None].to(out_MV.dtype))
