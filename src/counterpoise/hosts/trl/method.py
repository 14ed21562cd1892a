"""A method in TRL's terms: what TRL computes itself when its settings say so, and what counterpoise
brings.

Where TRL has the method's loss and reduction, they become TRL's own settings and TRL's own
arithmetic runs on our credit. All others (DFPO, GMPO, side means, your own) are computed by
``counterpoise.losses``. ``uniform`` switches all of it off: TRL's advantages, loss and order of
rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import counterpoise as cp
from counterpoise.catalogue.method import AXES, Method
from counterpoise.catalogue.registry import unknown_method
from counterpoise.errors import nearest

OFF = "uniform"
Fields = dict[str, Any]  # settings of a stage, or of GRPOConfig

# reduction -> TRL's loss type that reduces so; constant_length of 1 is luspo
LOSS_TYPES = {"per_token": "dapo", "per_sequence": "grpo", "constant_length": "dr_grpo"}
# and back, for the ledger's column `scale`; TRL's other loss types are means over tokens
REDUCTIONS = {
    "grpo": "per_sequence",
    "sapo": "per_sequence",
    "dr_grpo": "constant_length",
    "luspo": {"name": "constant_length", "length": 1},
}


class Setup(NamedTuple):
    """A method as TRL runs it.

    Attributes:
        method: the point on the six axes.
        trl_fields: settings of ``GRPOConfig`` that say what the method says; empty where TRL's stay
            as they are.
        is_uniform: TRL's advantages and loss, untouched.
        has_own_loss: the loss is counterpoise's, not TRL's.
        has_own_plan: the method's plan chooses the rows of each update, not TRL's shuffle.
        has_own_advantage: the advantage is the method's, not TRL's.
    """

    method: Method
    trl_fields: Fields
    is_uniform: bool
    has_own_loss: bool
    has_own_plan: bool
    has_own_advantage: bool


def setup(
    name: str,
    axes: Fields,
    *,
    own_advantage: bool,
    own_loss: bool,
    loss_type: str,
    success: float | None = None,
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
        return _uniform(axes, loss_type, success)
    if name not in cp.methods():
        form = "method='dapo', method_axes={{{axis}: {value}}}"
        raise ValueError(unknown_method(name, [OFF, *cp.methods()], form))
    # of TRL's own loss the reduction is read by the ledger alone
    axes = axes if own_loss else axes | {"reduction": REDUCTIONS.get(loss_type, "per_token")}
    method, beta = _split_kl(cp.method(name, success=success, **axes))
    method.check_sampling("TRL")
    fields = trl_fields(method) if own_loss else {}
    is_ours = fields is None
    if fields is None:  # TRL's loss type then says only how its terms beside the loss are reduced
        fields = {"loss_type": _loss_type(method.describe()["reduction"]) or "grpo"}
    fields |= beta if own_loss else {}
    return Setup(
        method=method,
        trl_fields=fields,
        is_uniform=False,
        has_own_loss=is_ours,
        has_own_plan=is_ours or not method.planner.has("shuffles_rows"),
        has_own_advantage=own_advantage,
    )


def trl_fields(method: Method) -> Fields | None:
    """The settings with which TRL's own loss is the method's, None if it has none.

    >>> trl_fields(cp.method("gspo"))["importance_sampling_level"]
    'sequence'
    >>> trl_fields(cp.method("gspo", credit=["top_entropy"])) is None
    True
    """
    (first, *others), reduction = method.describe()["loss"], method.describe()["reduction"]
    if reduction.get("count", "mask") != "mask" or reduction.get("length") not in (None, 1):
        return None
    loss_type = _loss_type(reduction)
    if others or first["name"] not in TRL_LOSSES or loss_type is None:
        return None
    return TRL_LOSSES[first["name"]](method, method.terms[0].settings, loss_type)


def _clip(method: Method, loss: Fields, loss_type: str) -> Fields:
    ceiling = loss.get("dual_clip", math.inf)
    return {
        "loss_type": loss_type,
        "importance_sampling_level": "token",
        "epsilon": loss["clip_low"],
        "epsilon_high": loss["clip_high"],
        "delta": ceiling if math.isfinite(ceiling) else None,
    }


def _sequence_clip(method: Method, loss: Fields, loss_type: str) -> Fields | None:
    """TRL's sequence level is ours only while the tokens of a rollout share one credit; its ratio
    is the mean one.
    """
    if method.rules or not loss["mean"]:
        return None
    return {**_clip(method, loss, loss_type), "importance_sampling_level": "sequence"}


def _cispo(method: Method, loss: Fields, loss_type: str) -> Fields | None:
    if loss_type != "dapo" or loss["clip_low"] != math.inf:
        return None
    return {
        "loss_type": "cispo",
        "importance_sampling_level": "token",
        "epsilon_high": 1 + loss["clip_high"],
    }


def _sapo(method: Method, loss: Fields, loss_type: str) -> Fields | None:
    if loss_type != "grpo":
        return None
    return {
        "loss_type": "sapo",
        "importance_sampling_level": "token",
        "sapo_temperature_pos": loss["tau_pos"],
        "sapo_temperature_neg": loss["tau_neg"],
    }


# loss -> TRL's settings that compute the same, from the loss's parameters and the loss type of the
# reduction; a loss that is not here is computed by us
TRL_LOSSES: dict[str, Callable[[Method, Fields, str], Fields | None]] = {
    "clipped": _clip,
    "dual_clip": _clip,
    "contrastive": _clip,
    "sequence_ratio": _sequence_clip,
    "detached_ratio": _cispo,
    "soft_gate": _sapo,
}


def _loss_type(reduction: Fields) -> str | None:
    """TRL's loss type that reduces so, None if there is none."""
    return "luspo" if reduction.get("length") == 1 else LOSS_TYPES.get(reduction["name"])


def _uniform(axes: Fields, loss_type: str, success: float | None) -> Setup:
    extra = sorted(set(axes) - {"plan"})
    if extra:
        raise ValueError(
            f"method='uniform' leaves everything but the plan to TRL, got method_axes {extra}. Name"
            " a preset, for example method='dapo'."
        )
    reduction = REDUCTIONS.get(loss_type, "per_token")
    method = cp.method("dapo", success=success, reduction=reduction, **axes)
    return Setup(
        method=dataclasses.replace(method, name=OFF),
        trl_fields={},
        is_uniform=True,
        has_own_loss=False,
        has_own_plan=not method.planner.has("shuffles_rows"),
        has_own_advantage=False,
    )


def _split_kl(method: Method) -> tuple[Method, dict[str, float]]:
    """TRL has the k3 term itself (``beta``) and the reference model for it: a ``kl`` term of the
    method becomes that setting.
    """
    names = [term["name"] for term in method.describe()["loss"]]
    kl = [term for name, term in zip(names, method.terms) if name == "kl"]
    if not kl:
        return method, {}
    settings = kl[0].settings
    if settings["estimator"] != "k3" or len(kl) > 1:
        raise ValueError(
            f"TRL has the k3 estimator of the KL term alone, got {settings['estimator']!r}. Use"
            " {'name': 'kl', 'coef': ...}."
        )
    terms = tuple(term for term in method.terms if term is not kl[0])
    return dataclasses.replace(method, terms=terms), {"beta": settings["coef"]}
