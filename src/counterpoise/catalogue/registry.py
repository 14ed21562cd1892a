"""The six axes, each a table name -> stage.

A family's own dict is the table; ``register_*`` adds to it from outside.
"""

from __future__ import annotations

from typing import Any

from counterpoise.advantages import ADVANTAGES
from counterpoise.controllers import CONTROLLERS
from counterpoise.credit import RULES
from counterpoise.losses import LOSSES
from counterpoise.plans import PLANS
from counterpoise.reductions import REDUCTIONS
from counterpoise.stage import Stage, Stateful, base, bindable

FAMILIES: dict[str, dict[str, Any]] = {
    "advantage": ADVANTAGES,
    "credit": RULES,
    "loss": LOSSES,
    "reduction": REDUCTIONS,
    "plan": PLANS,
    "controller": CONTROLLERS,
}


def register(axis: str, name: str, stage: Any) -> Any:
    """Add a stage of your own to an axis; returns it.

    The same function may be registered twice, another one under a taken name may not.
    """
    taken = FAMILIES[axis].get(name)
    if taken is not None and base(taken) is not base(stage):
        raise ValueError(
            f"register: {axis} {name!r} is taken by"
            f" {base(taken).__module__}.{base(taken).__name__}. Choose another name."
        )
    if taken is None:
        FAMILIES[axis][name] = stage
    return stage


def register_advantage(name: str, fn: Stage) -> Stage:
    """``fn(reward_N, group_N, *, params) -> advantage_N`` becomes ``method(..., advantage=name)``."""
    return register("advantage", name, bindable(fn))


def register_rule(name: str, rule: Any) -> Any:
    """``rule(credit_NT, batch, *, params) -> credit_NT`` (or a ``Stateful``) becomes ``method(...,
    credit=[name])``.
    """
    return register("credit", name, rule if isinstance(rule, Stateful) else bindable(rule))


def register_loss(name: str, loss: Stage) -> Stage:
    """A function decorated with ``counterpoise.token_loss`` becomes ``method(..., loss=name)``."""
    if not hasattr(base(loss), "prepare"):
        raise ValueError(
            f"register_loss: {name!r} is a plain function. Decorate it with"
            " @counterpoise.token_loss, which derives coef_NT."
        )
    return register("loss", name, loss)


def register_reduction(name: str, fn: Stage) -> Stage:
    """``fn(mask_NT, credit_NT, advantage_N, *, params) -> scale_NT`` becomes ``method(...,
    reduction=name)``.
    """
    return register("reduction", name, bindable(fn))


def register_plan(name: str, fn: Stage) -> Stage:
    """``fn(group_N, reward_N, length_N, *, num_updates, generator, params) -> [row_R, ...]`` becomes
    ``method(..., plan=name)``.
    """
    return register("plan", name, bindable(fn))


def register_controller(name: str, controller: Stateful) -> Stateful:
    """``Stateful(init, apply)`` with ``apply(state, batch, *, params) -> Control`` becomes
    ``method(..., controller=name)``.
    """
    return register("controller", name, controller)
