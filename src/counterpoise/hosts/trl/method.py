"""A method in TRL's terms: what TRL computes itself when its settings say so, and what counterpoise
brings.

Where TRL has the method's loss and reduction, they become TRL's own settings and TRL's own
arithmetic runs on our credit. The others (DFPO, GMPO, side means, ...) are computed from
``counterpoise.losses``. ``uniform`` switches all of it off: TRL's advantages, loss and order of
rows."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import counterpoise as cp
from counterpoise.catalogue.method import AXES, Method
from counterpoise.catalogue.registry import FAMILIES
from counterpoise.errors import nearest
from counterpoise.stage import Stage, describe

OFF = "uniform"

# the reduction of TRL's loss types, for the ledger's column `scale`
REDUCTION = {
    "grpo": "per_sequence",
    "sapo": "per_sequence",
    "dr_grpo": "constant_length",
    "luspo": {"name": "constant_length", "length": 1},
}
LOSS_TYPE = {
    "per_token": "dapo",
    "per_sequence": "grpo",
    "constant_length": "dr_grpo",
    "sum": "luspo",
}


class Setup(NamedTuple):
    """A method as TRL runs it.

    Attributes:
        method: the point on the six axes.
        trl_fields: settings of ``GRPOConfig`` that say what the method says; empty where TRL's stay
            as they are.
        is_uniform: TRL's advantages and loss, untouched.
        has_own_loss: the loss is counterpoise's, not TRL's.
        has_own_plan: the rows of each update are chosen by the method's plan instead of
            TRL's shuffle.
        has_own_advantage: the advantage is the method's, not TRL's.
    """

    method: Method
    trl_fields: dict[str, Any]
    is_uniform: bool
    has_own_loss: bool
    has_own_plan: bool
    has_own_advantage: bool


def setup(
    name: str, axes: dict[str, Any], *, own_advantage: bool, own_loss: bool, loss_type: str
) -> Setup:
    """Build the method and say who computes what.

    >>> setup("delta", {}, own_advantage=True, own_loss=True, loss_type="dapo").trl_fields["delta"]
    10.0
    >>> setup("dfpo_min", {}, own_advantage=True, own_loss=True, loss_type="dapo").has_own_loss
    True
    """
    for axis in axes:
        if axis not in AXES:
            raise ValueError(f"method_axes: unknown axis {axis!r}. {nearest(axis, AXES)}")
    if name == OFF:
        return _uniform(axes, loss_type)
    if name not in cp.methods():
        raise ValueError(f"unknown method {name!r}. {nearest(name, [OFF, *cp.methods()])}")
    made, beta = _without_kl(cp.method(name, **axes))
    fields = trl_fields(made) if own_loss else {}
    is_ours = own_loss and fields is None
    fields = (regulariser_fields(made) if is_ours else fields or {}) | (beta if own_loss else {})
    return Setup(
        made,
        fields,
        False,
        is_ours,
        is_ours or not made.planner.has("shuffles_rows"),
        own_advantage,
    )


def trl_fields(method: Method) -> dict[str, Any] | None:
    """The settings with which TRL's own loss is the method's, None if it has none.

    ``sequence_ratio`` is TRL's sequence level only while a rollout's tokens share one credit: with
    credit rules the token form is ours.

    >>> trl_fields(cp.method("gspo"))["importance_sampling_level"]
    'sequence'
    >>> trl_fields(cp.method("gspo", credit=["top_entropy"])) is None
    True
    """
    if len(method.terms) != 1:
        return None
    (loss, on), (reduction, how) = (
        _named("loss", method.terms[0]),
        _named("reduction", method.reduction),
    )
    if how.get("count", "mask") != "mask" or how.get("length") not in (None, 1):
        return None
    loss_type = LOSS_TYPE.get("sum" if how.get("length") == 1 else reduction)
    level = "sequence" if loss == "sequence_ratio" else "token"
    if loss in ("clipped", "dual_clip", "contrastive") or (
        loss == "sequence_ratio" and not method.rules
    ):
        if loss_type is None:
            return None
        ceiling = on.get("dual_clip", math.inf)
        clip = {
            "epsilon": on["clip_low"],
            "epsilon_high": on["clip_high"],
            "delta": ceiling if math.isfinite(ceiling) else None,
        }
        return {"loss_type": loss_type, "importance_sampling_level": level, **clip}
    if loss == "detached_ratio" and reduction == "per_token" and on["clip_low"] == math.inf:
        return {
            "loss_type": "cispo",
            "importance_sampling_level": level,
            "epsilon_high": 1 + on["clip_high"],
        }
    if loss == "soft_gate" and reduction == "per_sequence":
        gate = {"sapo_temperature_pos": on["tau_pos"], "sapo_temperature_neg": on["tau_neg"]}
        return {"loss_type": "sapo", "importance_sampling_level": level, **gate}
    return None


def regulariser_fields(method: Method) -> dict[str, Any]:
    """With a loss of ours TRL's ``loss_type`` only says how its terms beside it (KL) are reduced:
    as the method reduces, or the nearest.
    """
    reduction, how = _named("reduction", method.reduction)
    return {"loss_type": LOSS_TYPE.get("sum" if how.get("length") == 1 else reduction, "grpo")}


def _uniform(axes: dict[str, Any], loss_type: str) -> Setup:
    extra = sorted(set(axes) - {"plan"})
    if extra:
        raise ValueError(
            f"method='uniform' leaves everything but the plan to TRL, got method_axes {extra}. Name"
            " a preset, for example method='dapo'."
        )
    made = cp.method("dapo", reduction=REDUCTION.get(loss_type, "per_token"), **axes)
    return Setup(
        dataclasses.replace(made, name=OFF),
        {},
        True,
        False,
        not made.planner.has("shuffles_rows"),
        False,
    )


def _without_kl(method: Method) -> tuple[Method, dict[str, Any]]:
    """TRL has the k3 term itself (``beta``) and the reference model for it; a ``kl`` term of the
    method becomes that setting.
    """
    kl = [term for term in method.terms if _named("loss", term)[0] == "kl"]
    if not kl:
        return method, {}
    settings = _named("loss", kl[0])[1]
    if settings["estimator"] != "k3" or len(kl) > 1:
        raise ValueError(
            f"TRL has the k3 estimator of the KL term alone, got {settings['estimator']!r}. Use"
            " {'name': 'kl', 'coef': ...}."
        )
    return dataclasses.replace(method, terms=tuple(t for t in method.terms if t is not kl[0])), {
        "beta": settings["coef"]
    }


def _named(axis: str, stage: Stage) -> tuple[str, dict[str, Any]]:
    return describe(FAMILIES[axis], stage)["name"], {**stage.parameters, **stage.params}
