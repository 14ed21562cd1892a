"""The response of an optimizer: how far a parameter moves for a unit of gradient of this update,
second moments fixed at their value after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from counterpoise.maths.adamw import SECOND, AdamW, moment

Response = dict[str, "Tensor | float"]


class UnknownOptimizer(ValueError):
    """An optimizer whose update is not known to be linear in the gradient."""


def response(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> Response:
    """P of ``dtheta = -P g + (what the gradient of this update did not cause)``, per parameter.

    Args:
        optimizer: after its update.
        parameters: the live parameters by name; those that the optimizer did not move have response
            0.

    >>> layer = torch.nn.Linear(1, 1)
    >>> response(torch.optim.SGD(layer.parameters(), lr=0.5), dict(layer.named_parameters()))
    {'weight': 0.5, 'bias': 0.5}
    """
    rule = RESPONSES.get(type(optimizer))
    if rule is None:
        known = ", ".join(dict.fromkeys(kind.__name__ for kind in RESPONSES))
        raise UnknownOptimizer(
            f"no response is known for the optimizer {type(optimizer).__name__} (known: {known});"
            " only the predicted change is told."
        )
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {
        name: rule(group_of[id(p)], optimizer.state.get(p, {})) if id(p) in group_of else 0.0
        for name, p in parameters.items()
    }


def adam_response(group: dict[str, Any], state: dict[str, Any]) -> Tensor | float:
    """Adam and AdamW: P = lr (1 - b1) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    Momentum of earlier updates and weight decay are not in it, nor is the rounding of weights in
    bfloat16; moments of 8 bits are read as they are kept.
    """
    if not state:
        return 0.0
    (beta1, beta2), t = group["betas"], float(state["step"])
    second = moment(state, "max_exp_avg_sq" if group["amsgrad"] else SECOND)
    assert second is not None, "Adam has no state without a second moment"
    size = float(group["lr"]) * (1 - beta1) / (1 - beta1**t) * (-1 if group["maximize"] else 1)
    return size / ((second / (1 - beta2**t)).sqrt() + group["eps"])


def sgd_response(group: dict[str, Any], state: dict[str, Any]) -> float:
    """SGD: P = lr, times 1 + momentum with Nesterov's.

    Momentum of earlier updates and weight decay are not in it.
    """
    if group["dampening"]:
        raise UnknownOptimizer(
            "no response is known for SGD with dampening; only the predicted change is told."
        )
    return (
        float(group["lr"])
        * (1 + group["momentum"] * group["nesterov"])
        * (-1 if group["maximize"] else 1)
    )


RESPONSES: dict[type, Callable[[dict[str, Any], dict[str, Any]], Tensor | float]] = {
    torch.optim.AdamW: adam_response,
    AdamW: adam_response,
    torch.optim.Adam: adam_response,
    torch.optim.SGD: sgd_response,
}
