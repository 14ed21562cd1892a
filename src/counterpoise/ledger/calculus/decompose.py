"""First-order change of every token's log-prob along a parameter update, and the part of it that
each class of tokens brought.

``delta_j ~ <g_j, dtheta>`` is a Jacobian-vector product: one forward-mode pass gives it for all
tokens at once. With the second moments of the optimizer fixed, a update is linear in the gradient:
``dtheta = sum_c P g_c + rest``, where ``g_c = sum_{k in c} c_k grad logp_k`` is the gradient of
class c (c_k = coef * scale * clip factor), P the optimizer's response, and the rest its memory
(momentum, weight decay). So C classes cost C backwards and C forward-mode passes, never N^2 inner
products, and the parts add up to the predicted change.

Axes: N rollouts of the update, T response tokens, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.ledger.calculus.logprobs import LogProbs, Params
from counterpoise.ledger.calculus.optimizers import Response
from counterpoise.maths import many
from counterpoise.maths.transfer import send_all
from counterpoise.run.schema import REST


class Decomposition(NamedTuple):
    """``predicted_NT`` along the whole update, and ``parts["sign"]["positive"]`` of one class;
    those of an axis add up to it.
    """

    predicted_NT: Tensor
    parts: dict[str, dict[str, Tensor]]


def change_along(
    logprobs: LogProbs, params: Params, direction_C: Params, *, is_batched: bool = True
) -> Tensor:
    """d/ds logp(params + s direction) at s = 0 for every token and direction, [C, N, T]:
    forward-mode differentiation, chunked over rows.

    Args:
        logprobs: the tokens.
        params: where the derivative is taken.
        direction_C: one tensor a parameter, directions stacked along a first axis of C.
        is_batched: all directions share one pass over the primal values; False takes them one by
            one. Where changes are written out
            (``logprobs.along``) they always do.

    >>> half = LogProbs(
    ...     torch.ones(1, 2).bool(),
    ...     [2],
    ...     lambda p, r: p["w"][None],
    ...     lambda p, r: (p["w"] ** 2)[None],
    ... )
    >>> change_along(
    ...     half, {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([[1.0, 0.0], [0.5, 0.5]])}
    ... ).tolist()
    [[[2.0, 0.0]], [[1.0, 2.0]]]
    """
    num = len(next(iter(direction_C.values())))
    change = logprobs.along or partial(_differentiate, logprobs.forward, is_batched=is_batched)
    is_one_by_one = logprobs.along is None and not is_batched
    chunks = list(logprobs.forward_chunks(1 if is_one_by_one else num))
    parts = [change(params, direction_C, row_R) for row_R in chunks]
    out_CNT = parts[0].new_zeros((num, *logprobs.mask_NT.shape))
    for row_R, change_CRT in zip(send_all(chunks, out_CNT.device), parts):
        out_CNT[:, row_R] = change_CRT
    return torch.where(logprobs.mask_NT, out_CNT, 0)


@torch.no_grad()
def _differentiate(
    forward: Callable[[Params, Tensor], Tensor],
    params: Params,
    direction_C: Params,
    row_R: Tensor,
    *,
    is_batched: bool,
) -> Tensor:
    def along(direction: Params) -> Tensor:
        return torch.func.jvp(lambda p: forward(p, row_R), (params,), (direction,))[1]

    if is_batched:
        return torch.vmap(along)(direction_C)
    num = len(next(iter(direction_C.values())))
    return torch.stack([along({name: d[k] for name, d in direction_C.items()}) for k in range(num)])


def class_gradients(logprobs: LogProbs, params: Params, weight_CNT: Tensor) -> Params:
    """g_c = sum_{n,t} weight[c, n, t] grad logp[n, t], stacked along a first axis of C.

    Rows are grouped by the classes they take part in, so classes that share no row (signs of
    rollouts) cost one forward and backward together; a row without weight costs nothing; otherwise
    one forward and a backward a class. Weights on the CPU spare the host a wait."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    out = {name: value.new_empty((len(weight_CNT), *value.shape)) for name, value in params.items()}
    empty = set(range(len(weight_CNT)))  # classes that have no gradient so far
    cuts = [
        (classes, row_R)
        for classes, rows in _by_classes(weight_CNT).items()
        for row_R in logprobs.chunks(rows)
    ]
    weights = [weight_CNT[list(classes)][:, row_R] for classes, row_R in cuts]
    for (classes, row_R), weight_KRT in zip(cuts, send_all(weights, _device(params))):
        with torch.enable_grad():
            logp_RT = logprobs.reverse(leaves, row_R)
        for c, weight_RT in zip(classes, weight_KRT.to(logp_RT.dtype)):
            grads = torch.autograd.grad(
                logp_RT,
                list(leaves.values()),
                weight_RT,
                retain_graph=c != classes[-1],
                allow_unused=True,
            )
            _gather(_slot(out, c), grads, is_first=c in empty)
            empty.discard(c)
    for c in empty:
        many.zero_(_slot(out, c))
    return out


def _gather(targets: Sequence[Tensor], grads: Sequence[Tensor | None], *, is_first: bool) -> None:
    """Gradients added to what is there, or put there if they come first; None is 0."""
    used = [(target, grad) for target, grad in zip(targets, grads) if grad is not None]
    slots, given = [target for target, _ in used], [grad for _, grad in used]
    if not is_first:
        many.add_(slots, given)
        return
    many.copy_(slots, given)
    many.zero_([target for target, grad in zip(targets, grads) if grad is None])


def _device(params: Params) -> torch.device:
    return next(iter(params.values())).device


def decompose(
    logprobs: LogProbs,
    before: Params,
    after: Params,
    weight_NT: Tensor,
    classes: Mapping[str, Mapping[str, Tensor]],
    response: Response | None,
    gradient: Params | None = None,
    *,
    is_batched: bool = True,
) -> Decomposition:
    """The predicted change along ``after - before`` and its parts by class.

    Args:
        before, after: parameters around the update.
        weight_NT: coef * scale * clip factor: with what each token's gradient entered the update.
        classes: axis -> class -> mask [N, T]; the classes of an axis cover every token once. The
            host reads them and the weights: on the CPU that is no wait.
        response: the optimizer's response to a gradient; None gives the predicted change alone.
        gradient: of the loss, what the optimizer got. With it the largest class of each axis costs
            no backward: it is minus the gradient and minus the others, which is exact as long as
            nothing but the tokens of the update has a gradient.

    A class without weight has part 0 and costs nothing.
    """
    named = {
        (axis, name): weight_NT * mask_NT
        for axis, masks in classes.items()
        for name, mask_NT in masks.items()
    }
    named = {} if response is None else named
    live = [key for key, part_NT in named.items() if bool(part_NT.any())]
    direction_C, slots = _gradients(
        logprobs, before, weight_NT, {key: named[key] for key in live}, gradient
    )
    for slot in slots[1:]:
        assert response is not None
        many.multiply_(slot, [response[name] for name in direction_C])
    move = many.copy_(slots[0], [after[name].detach() for name in direction_C])
    many.subtract_(move, [before[name].detach() for name in direction_C])
    predicted_NT, *changes = change_along(logprobs, before, direction_C, is_batched=is_batched)
    change_of = dict(zip(live, changes))
    parts: dict[str, dict[str, Tensor]] = {}
    for axis, keys in _by_axis(list(named)).items():
        of_axis = {key[1]: change_of.get(key, torch.zeros_like(predicted_NT)) for key in keys}
        parts[axis] = of_axis | {REST: predicted_NT - sum(of_axis.values())}
    return Decomposition(predicted_NT, parts)


def forward_mode(logprobs: LogProbs, params: Params) -> tuple[bool | None, str]:
    """Whether forward mode works, tried on the shortest row: (True batched / False one by one /
    None not at all, why not).
    """
    shortest = min(range(len(logprobs.lengths)), key=lambda row: logprobs.lengths[row])
    along = logprobs.along
    one = logprobs._replace(
        mask_NT=logprobs.mask_NT[shortest : shortest + 1],
        lengths=[logprobs.lengths[shortest]],
        forward_cut=None,
        forward=lambda p, row_R: logprobs.forward(p, row_R + shortest),
        along=(
            None
            if along is None
            else lambda p, direction_C, row_R: along(p, direction_C, row_R + shortest)
        ),
    )
    direction_C = {
        name: torch.zeros_like(value)[None].expand(2, *value.shape)
        for name, value in params.items()
    }
    why = ""
    for is_batched in (True, False):
        try:
            change_along(one, params, direction_C, is_batched=is_batched)
            return is_batched, ""
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch has no narrower type for a missing forward mode
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
    return None, why


def _gradients(
    logprobs: LogProbs,
    params: Params,
    weight_NT: Tensor,
    named: dict[tuple[str, str], Tensor],
    gradient: Params | None,
) -> tuple[Params, list[list[Tensor]]]:
    """An empty slot, then the gradient of each named class; and the slots."""
    keys = list(named)
    largest = (
        {}
        if gradient is None
        else {
            axis: max(of, key=lambda key: int(named[key].any(1).sum()))
            for axis, of in _by_axis(keys).items()
        }
    )
    nothing_NT = torch.zeros_like(weight_NT)
    weight_CNT = torch.stack(
        [nothing_NT, *(nothing_NT if key in largest.values() else named[key] for key in keys)]
    )
    gradient_C = class_gradients(logprobs, params, weight_CNT)
    slots = [list(slot) for slot in zip(*(stack_C.unbind() for stack_C in gradient_C.values()))]
    for axis, key in largest.items():
        assert gradient is not None
        slot, others = (
            1 + keys.index(key),
            [1 + keys.index(other) for other in _by_axis(keys)[axis] if other != key],
        )
        largest_one = slots[slot]  # empty so far
        for other in others:
            many.add_(largest_one, slots[other])
        many.subtract_(many.negate_(largest_one), [gradient[name] for name in gradient_C])
    return gradient_C, slots


def _slot(stack_C: Params, c: int) -> list[Tensor]:
    return [stack[c] for stack in stack_C.values()]


def _by_axis(keys: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    return {axis: [key for key in keys if key[0] == axis] for axis, _ in keys}


def _by_classes(weight_CNT: Tensor) -> dict[tuple[int, ...], list[int]]:
    """Rows by the tuple of classes in which they have weight; rows without any are left out."""
    is_in_NC = (weight_CNT != 0).any(-1).T.cpu().tolist()
    out: dict[tuple[int, ...], list[int]] = {}
    for row, flags in enumerate(is_in_NC):
        classes = tuple(c for c, is_in in enumerate(flags) if is_in)
        if classes:
            out.setdefault(classes, []).append(row)
    return out
