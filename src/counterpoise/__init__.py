"""counterpoise: see and steer the credit that every token gets in critic-free RL of language models."""

from __future__ import annotations

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
