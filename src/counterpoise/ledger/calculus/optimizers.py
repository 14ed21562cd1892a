"""The response of an optimizer: how far a parameter moves for a unit of gradient of this update,
second moments fixed at their value after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoise.maths.adamw import SECOND, AdamW, moment
from counterpoise.maths.many import divided, roots

Response = dict[str, "Tensor | float"]


class UnknownOptimizer(ValueError):
    """An optimizer whose update is not known to be linear in the gradient."""


def response(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    count_P: Sequence[float] | None = None,
) -> Response:
    """P of ``dtheta = -P g + (what the gradient of this update did not cause)``, per parameter.

    Args:
        optimizer: after its update.
        parameters: the live parameters by name; those that the optimizer did not move have response
            0.
        count_P: ``update_counts``, where the host has read them.

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
    if count_P is None:
        count_P = update_counts(optimizer, parameters).tolist()
    count_of = dict(zip(parameters, count_P))
    rates: Response = dict.fromkeys(parameters, 0.0)
    for group in optimizer.param_groups:
        own = {id(p) for p in group["params"]}
        states = {n: optimizer.state.get(p, {}) for n, p in parameters.items() if id(p) in own}
        rates |= zip(states, rule(group, list(states.values()), [count_of[n] for n in states]))
    return rates


def update_counts(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> Tensor:
    """Updates that each parameter has had, [P], on the device where the optimizer counts them; 0
    where it does not.
    """
    if type(optimizer) not in RESPONSES or not parameters:
        return torch.zeros(len(parameters))
    counts = [optimizer.state.get(p, {}).get("step", 0.0) for p in parameters.values()]
    device = next((count.device for count in counts if isinstance(count, Tensor)), None)
    return torch.stack(
        [
            count if isinstance(count, Tensor) else torch.full((), float(count), device=device)
            for count in counts
        ]
    )


def adam_response(
    group: dict[str, Any], states: list[dict[str, Any]], counts: list[float]
) -> list[Tensor | float]:
    """Adam and AdamW: P = lr (1 - b1) / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    Momentum of earlier updates and weight decay are not in it, nor is the rounding of weights in
    bfloat16; moments of 8 bits are read as they are kept.
    """
    (beta1, beta2), live = group["betas"], [state for state in states if state]
    name = "max_exp_avg_sq" if group["amsgrad"] else SECOND
    seconds = [second for state in live if (second := moment(state, name)) is not None]
    assert len(seconds) == len(live), "Adam has no state without a second moment"
    num_updates = [count for state, count in zip(states, counts) if state]
    root_of = roots(seconds, [1 - beta2**t for t in num_updates], group["eps"])
    sign = -1 if group["maximize"] else 1
    above = [float(group["lr"]) * (1 - beta1) / (1 - beta1**t) * sign for t in num_updates]
    rates = iter(divided(above, root_of))
    return [next(rates) if state else 0.0 for state in states]


def sgd_response(
    group: dict[str, Any], states: list[dict[str, Any]], counts: list[float]
) -> list[Tensor | float]:
    """SGD: P = lr, times 1 + momentum with Nesterov's.

    Momentum of earlier updates and weight decay are not in it.
    """
    if group["dampening"]:
        raise UnknownOptimizer(
            "no response is known for SGD with dampening; only the predicted change is told."
        )
    rate = (
        float(group["lr"])
        * (1 + group["momentum"] * group["nesterov"])
        * (-1 if group["maximize"] else 1)
    )
    return [rate] * len(states)


Rule = Callable[[dict[str, Any], list[dict[str, Any]], list[float]], list[Tensor | float]]
RESPONSES: dict[type, Rule] = {
    torch.optim.AdamW: adam_response,
    AdamW: adam_response,
    torch.optim.Adam: adam_response,
    torch.optim.SGD: sgd_response,
}
