"""What a stage returned: one check for every axis whose result is a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoise.stage import Stage, describe


def check_own_log_prob(name: str, loss_NT: Tensor, logp_NT: Tensor) -> None:
    """The law of a loss: that of a token depends on its own log-prob alone, or the credit of a
    token would be no longer what enters the update for it.
    """
    width = loss_NT.shape[1]
    for at, one in enumerate(loss_NT.flatten()):
        if not one.requires_grad:
            continue
        (grad_NT,) = torch.autograd.grad(one, logp_NT, retain_graph=True, allow_unused=True)
        others = [] if grad_NT is None else grad_NT.flatten().nonzero().flatten().tolist()
        other = next((k for k in others if k != at), None)
        if other is not None:
            raise ValueError(
                f"loss {name}: the loss of token {at % width} of rollout {at // width} also changes"
                f" with the log-prob of token {other % width} of rollout {other // width}, expected"
                " with its own alone. Detach the log-probs of other tokens"
                " (trainer_logp_NT.detach())."
            )


def check_returned(where: str, value: Any, shape: Sequence[int], meaning: str) -> Tensor:
    """The tensor that a stage returned; one of another kind, shape or type is an error.

    >>> check_returned("credit rule mine", None, [2, 3], "one number per token")
    Traceback (most recent call last):
    ValueError: credit rule mine returned None, expected a tensor [2, 3]: one number per token.
    """
    expected = f"{list(shape)}: {meaning}."
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} returned {kind(value)}, expected a tensor {expected}")
    if list(value.shape) != list(shape):
        raise ValueError(f"{where} returned shape {list(value.shape)}, expected {expected}")
    if not value.dtype.is_floating_point:
        raise ValueError(f"{where} returned {value.dtype}, expected floating point {expected}")
    return value


def path(known: Mapping[str, Stage], stage: Stage) -> str:
    """The name of a stage; of one that is not in the table ``module:function``."""
    return describe(known, stage)["name"]


def kind(value: object) -> str:
    """What a value is, for a message: ``None``, ``a list``."""
    return "None" if value is None else f"a {type(value).__name__}"
