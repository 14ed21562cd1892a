"""The ledger: what an update did to every token, and why.

Names are imported when they are first used (PEP 562): an importer of dumps needs the categories and
no model.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterpoise.ledger.account import Account
    from counterpoise.ledger.book import Book, Settings, within_memory
    from counterpoise.ledger.calculus.decompose import (
        Decomposition,
        change_along,
        class_gradients,
        decompose,
        forward_mode,
    )
    from counterpoise.ledger.calculus.head_change import (
        HeadChange,
        HeadResponse,
        HeadState,
        head_change,
    )
    from counterpoise.ledger.calculus.head_kernel import HeadKernel, coupling_table, head_kernel
    from counterpoise.ledger.calculus.logprobs import (
        LogProbs,
        Params,
        Texts,
        at,
        copy_params,
        of_model,
        trainable,
    )
    from counterpoise.ledger.calculus.optimizers import response
    from counterpoise.ledger.calculus.snapshot import Snapshot, restore, snapshot
    from counterpoise.ledger.measures.categories import CATEGORIES, categories, load_categories
    from counterpoise.ledger.measures.changes import cancellation, change_sign
    from counterpoise.ledger.measures.classes import DECOMPOSITIONS, Facts, token_classes
    from counterpoise.ledger.measures.drift import drift, fill_bank
    from counterpoise.ledger.measures.jitter import jitter
    from counterpoise.ledger.measures.residual import residuals
    from counterpoise.ledger.measures.sharing import Sharing, sharing
    from counterpoise.maths.columns import is_flip

# the module that has a name -> the names
_HOMES = {
    "counterpoise.ledger.account": ("Account",),
    "counterpoise.ledger.book": ("Book", "Settings", "within_memory"),
    "counterpoise.ledger.calculus.decompose": (
        "Decomposition",
        "change_along",
        "class_gradients",
        "decompose",
        "forward_mode",
    ),
    "counterpoise.ledger.calculus.head_change": (
        "HeadChange",
        "HeadResponse",
        "HeadState",
        "head_change",
    ),
    "counterpoise.ledger.calculus.head_kernel": ("HeadKernel", "coupling_table", "head_kernel"),
    "counterpoise.ledger.calculus.logprobs": (
        "LogProbs",
        "Params",
        "Texts",
        "at",
        "copy_params",
        "of_model",
        "trainable",
    ),
    "counterpoise.ledger.calculus.optimizers": ("response",),
    "counterpoise.ledger.calculus.snapshot": ("Snapshot", "restore", "snapshot"),
    "counterpoise.ledger.measures.categories": ("CATEGORIES", "categories", "load_categories"),
    "counterpoise.ledger.measures.changes": ("cancellation", "change_sign"),
    "counterpoise.ledger.measures.classes": ("DECOMPOSITIONS", "Facts", "token_classes"),
    "counterpoise.ledger.measures.drift": ("drift", "fill_bank"),
    "counterpoise.ledger.measures.jitter": ("jitter",),
    "counterpoise.ledger.measures.residual": ("residuals",),
    "counterpoise.ledger.measures.sharing": ("Sharing", "sharing"),
    "counterpoise.maths.columns": ("is_flip",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CATEGORIES",
    "DECOMPOSITIONS",
    "Account",
    "Book",
    "Decomposition",
    "Facts",
    "HeadChange",
    "HeadKernel",
    "HeadResponse",
    "HeadState",
    "LogProbs",
    "Params",
    "Settings",
    "Sharing",
    "Snapshot",
    "Texts",
    "at",
    "cancellation",
    "categories",
    "change_along",
    "change_sign",
    "class_gradients",
    "copy_params",
    "coupling_table",
    "decompose",
    "drift",
    "fill_bank",
    "forward_mode",
    "head_change",
    "head_kernel",
    "is_flip",
    "jitter",
    "load_categories",
    "of_model",
    "residuals",
    "response",
    "restore",
    "sharing",
    "snapshot",
    "token_classes",
    "trainable",
    "within_memory",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'counterpoise.ledger' has no attribute {name!r}")
