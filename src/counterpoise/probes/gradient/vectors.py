"""Gradients of many methods on one batch: one forward, and one backward per distinct method.

On-policy the gradient of every method is ``sum_t c_t grad logp_t``: methods differ in the
coefficients ``c`` alone, and those come from the method's own loss.

Axes: N rollouts, T response tokens, K methods, P parameters, S numbers of a sketch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.catalogue.method import Method
from counterpoise.maths.adamw import SECOND, moment
from counterpoise.maths.reduce import seeded_generator
from counterpoise.policy import token_logp
from counterpoise.policy.backbone import backbone
from counterpoise.policy.logp import reads_prompts_once
from counterpoise.policy.pack import kernels_without_plans, response_lengths, row_buckets
from counterpoise.policy.precision import autocast
from counterpoise.probes.fresh import Forward
from counterpoise.rollouts import RolloutBatch
from counterpoise.types import Credit, TokenBatch

SAME = 1e-9  # 1 - cosine of coefficients below which two methods share a backward
SKETCH = 8191  # prime, so that no column of a weight matrix falls on one number
CPU_BYTES = 2**32  # for the gradients that are alive at once


def coefficients(method: Method, batch: TokenBatch, credit: Credit, seed: int = 0) -> Tensor:
    """The derivative of the method's total loss by every log-prob, [N, T]: the whole batch is one
    update, with the method's own loss, reduction and choice of rows.
    """
    row_R = method.plan(batch, num_updates=1, seed=seed).updates[0].to(batch.mask_NT.device)
    logp_RT = batch.column("trainer_logp_NT")[row_R].clone().requires_grad_()
    rows = method.prepare(logp_RT, method.rows(batch, credit, row_R))
    total = (method.loss(logp_RT, rows).loss_NT * rows.scale_NT).sum()
    (coef_RT,) = torch.autograd.grad(total, logp_RT)
    return coef_RT.new_zeros(batch.mask_NT.shape).index_add(0, row_R, coef_RT)


class Likeness(NamedTuple):
    """``like``: the method whose coefficients point the same way; ``scale``: how much longer."""

    like: str
    scale: float


def likenesses(coefs: Mapping[str, Tensor]) -> dict[str, Likeness]:
    """Which methods have the same coefficients up to a positive factor.

    >>> one, two = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> likenesses({"a": one, "b": 2 * one, "c": two})["b"]
    Likeness(like='a', scale=2.0)
    """
    flat = {name: coef_NT.double().flatten() for name, coef_NT in coefs.items()}
    norm = {name: float(value.norm()) for name, value in flat.items()}
    out: dict[str, Likeness] = {}
    for name in coefs:
        out[name] = Likeness(name, 1.0)
        for other in [key for key, known in out.items() if known.like == key != name]:
            size = norm[name] * norm[other]
            if size and 1 - float(flat[name] @ flat[other]) / size < SAME:
                out[name] = Likeness(other, norm[name] / norm[other])
                break
    return out


def parameters_of(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The trainable parameters, in the order of the vectors; a tied weight comes once."""
    return [p for p in model.parameters() if p.requires_grad]


def gradients(
    model: PreTrainedModel, collected: RolloutBatch, coef_KNT: Tensor, how: Forward
) -> Iterator[Tensor]:
    """The gradients ``sum_t c_t grad logp_t`` as vectors over the trainable parameters, one after
    another. As many as memory allows share a forward.
    """
    size = sum(p.numel() for p in parameters_of(model))
    at_once = max(1, _bytes(model) // (4 * size))
    for coef_JNT in coef_KNT.split(at_once):
        yield from joint_gradients(model, collected, coef_JNT, how)


def joint_gradients(
    model: PreTrainedModel, collected: RolloutBatch, coef_KNT: Tensor, how: Forward
) -> Tensor:
    """[K, P], with one forward per micro-batch. Rows without any coefficient are not read."""
    parameters = parameters_of(model)
    sizes = [p.numel() for p in parameters]
    wide = torch.promote_types(parameters[0].dtype, torch.float32)
    total_KP = parameters[0].new_zeros(len(coef_KNT), sum(sizes), dtype=wide)
    rows = coef_KNT.ne(0).any(2).any(0).nonzero().flatten()
    for pick_R in _micro_batches(model, collected, rows.tolist(), how.token_budget):
        with kernels_without_plans():
            with autocast(model):
                logp_RT = token_logp(
                    model,
                    [collected.prompt_ids[r] for r in pick_R],
                    collected.batch.token_ids_NT[pick_R],
                    collected.batch.mask_NT[pick_R],
                    temperature=how.temperature,
                )
            for k, coef_NT in enumerate(coef_KNT):
                parts = torch.autograd.grad(
                    logp_RT,
                    parameters,
                    coef_NT[pick_R].to(logp_RT.dtype),
                    retain_graph=k + 1 < len(coef_KNT),
                    allow_unused=True,
                )
                for sums, part in zip(total_KP[k].split(sizes), parts):
                    if part is not None:
                        sums += part.flatten()
    return total_KP


def _micro_batches(
    model: PreTrainedModel, collected: RolloutBatch, rows: list[int], token_budget: int
) -> list[list[int]]:
    """Rows of the batch that share a forward."""
    if not rows:
        return []
    cuts = row_buckets(
        [collected.prompt_ids[row] for row in rows],
        response_lengths(collected.batch.mask_NT[rows]),
        token_budget,
        share=reads_prompts_once(backbone(model)),
    )
    return [[rows[at] for at in cut] for cut in reversed(cuts)]


def _bytes(model: PreTrainedModel) -> int:
    """Memory for gradients: a quarter of what is free on a GPU."""
    is_cuda = model.device.type == "cuda"
    return torch.cuda.mem_get_info(model.device)[0] // 4 if is_cuda else CPU_BYTES


def sketch_signs(size: int, device: torch.device) -> Tensor:
    """Random signs, the same for every vector of a length, [P] int8."""
    sign_P = torch.randint(0, 2, (size,), generator=seeded_generator(0, 0, "gradient/sketch"))
    return (2 * sign_P - 1).to(torch.int8).to(device)


def sketch(vector_P: Tensor, sign_P: Tensor, size: int = SKETCH) -> Tensor:
    """A vector in ``size`` numbers that keep inner products up to ``|a| |b| / sqrt(size)`` (one
    standard deviation, and right on average); a vector that is no longer stays as it is.

    >>> sketch(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1, -1, 1]), size=2).tolist()
    [4.0, -2.0]
    """
    if len(vector_P) <= size:
        return vector_P
    padded = torch.nn.functional.pad(vector_P * sign_P, (0, -len(vector_P) % size))
    return padded.view(-1, size).sum(0)


class Moments(NamedTuple):
    """AdamW's second moments before an update, as a vector, and what it needs to apply them."""

    square_P: Tensor
    beta: float
    eps: float
    num_updates: int


def moments_of(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> Moments | None:
    """The second moments of an AdamW; None before its first update."""
    slots = [optimizer.state.get(p, {}) for p in parameters_of(model)]
    squares = [moment(slot, SECOND) for slot in slots]
    if any(square is None for square in squares):
        return None
    square_P = torch.cat([square.flatten() for square in squares if square is not None])
    group = optimizer.param_groups[0]
    return Moments(square_P, group["betas"][1], group["eps"], int(slots[0]["step"]))


def adamw_step(gradient_P: Tensor, moments: Moments) -> Tensor:
    """The direction in which AdamW moves on a gradient, momentum aside: ``g / (sqrt(v') + eps)``
    with ``v' = (beta v + (1 - beta) g^2) / (1 - beta^t)``, g at the length that gradients of the
    run had.

    The gradient is in its own preconditioner: without it a parameter that hardly ever moved would
    outweigh all others.

    >>> moments = Moments(torch.tensor([1.0, 4.0]), beta=1.0 - 1e-9, eps=0.0, num_updates=10**9)
    >>> step = adamw_step(torch.tensor([1.0, 1.0]), moments)
    >>> round((step[0] / step[1]).item(), 4)
    2.0
    """
    square_P, beta, eps, num_updates = moments
    usual = (square_P.sum() / (1 - beta**num_updates)).sqrt()
    gradient_P = gradient_P * (usual / gradient_P.norm().clamp_min(1e-30))
    new_P = (beta * square_P + (1 - beta) * gradient_P**2) / (1 - beta ** (num_updates + 1))
    return gradient_P / (new_P.sqrt() + eps)
