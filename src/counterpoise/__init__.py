"""counterpoise: see and steer the credit of every token in critic-free RL of language models.

Names are imported when they are first used (PEP 562): reading a run folder needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoise import advantages, controllers, credit, losses, plans, reductions
    from counterpoise.catalogue.method import Method
    from counterpoise.catalogue.registry import (
        method,
        methods,
        register_advantage,
        register_controller,
        register_loss,
        register_method,
        register_plan,
        register_reduction,
        register_rule,
    )
    from counterpoise.losses.token_loss import token_loss
    from counterpoise.maths.reduce import LOCAL, Reduce, over_ranks
    from counterpoise.plans import audit
    from counterpoise.report import charts as plot
    from counterpoise.run.tables import load_run
    from counterpoise.stage import Control, Stage, declare
    from counterpoise.types import Credit, Plan, Prompt, Rows, TokenBatch, TokenLoss

__version__ = "0.1.0"

# public name -> the module that has it; a module's own name stands for the module itself
_HOMES = {
    "counterpoise.catalogue.method": ("Method",),
    "counterpoise.catalogue.registry": (
        "method",
        "methods",
        "register_advantage",
        "register_controller",
        "register_loss",
        "register_method",
        "register_plan",
        "register_reduction",
        "register_rule",
    ),
    "counterpoise.losses.token_loss": ("token_loss",),
    "counterpoise.maths.reduce": ("LOCAL", "Reduce", "over_ranks"),
    "counterpoise.plans": ("audit",),
    "counterpoise.run.tables": ("load_run",),
    "counterpoise.stage": ("Control", "Stage", "declare"),
    "counterpoise.types": ("Credit", "Plan", "Prompt", "Rows", "TokenBatch", "TokenLoss"),
}
_MODULES = {
    **{
        axis: f"counterpoise.{axis}"
        for axis in ("advantages", "controllers", "credit", "losses", "plans", "reductions")
    },
    "plot": "counterpoise.report.charts",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LOCAL",
    "Control",
    "Credit",
    "Method",
    "Plan",
    "Prompt",
    "Reduce",
    "Rows",
    "Stage",
    "TokenBatch",
    "TokenLoss",
    "advantages",
    "audit",
    "controllers",
    "credit",
    "declare",
    "load_run",
    "losses",
    "method",
    "methods",
    "over_ranks",
    "plans",
    "plot",
    "reductions",
    "register_advantage",
    "register_controller",
    "register_loss",
    "register_method",
    "register_plan",
    "register_reduction",
    "register_rule",
    "token_loss",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'counterpoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
