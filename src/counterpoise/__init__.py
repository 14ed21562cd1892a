"""counterpoise: see and steer the credit that every token gets in critic-free RL of language models."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from counterpoise import advantages, batches, controllers, credit, losses
from counterpoise.batches import audit, shard
from counterpoise.build import Control, Stateful, bindable, needs
from counterpoise.families import (
    register_advantage,
    register_controller,
    register_loss,
    register_plan,
    register_reduction,
    register_rule,
)
from counterpoise.losses.token_loss import token_loss
from counterpoise.methods import Method
from counterpoise.numerics import LOCAL, Reduce, over_ranks
from counterpoise.presets import method, methods, register_method
from counterpoise.types import Credit, Plan, Prompt, Rows, TokenBatch, TokenLoss

if TYPE_CHECKING:
    from counterpoise import plot as plot
    from counterpoise.tables import load_run as load_run

__version__ = "0.1.0"

__all__ = [
    "LOCAL",
    "Control",
    "Credit",
    "Method",
    "Plan",
    "Prompt",
    "Reduce",
    "Rows",
    "Stateful",
    "TokenBatch",
    "TokenLoss",
    "advantages",
    "audit",
    "batches",
    "bindable",
    "controllers",
    "credit",
    "losses",
    "method",
    "methods",
    "needs",
    "over_ranks",
    "register_advantage",
    "register_controller",
    "register_loss",
    "register_method",
    "register_plan",
    "register_reduction",
    "register_rule",
    "shard",
    "token_loss",
]


def __getattr__(name: str) -> Any:
    """The notebook door, imported when it is asked for: the core needs torch alone."""
    if name == "plot":
        return importlib.import_module("counterpoise.plot")
    if name == "load_run":
        return importlib.import_module("counterpoise.tables").load_run
    raise AttributeError(f"module 'counterpoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), "load_run", "plot"]
