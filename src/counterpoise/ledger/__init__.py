"""The ledger: what an update did to every token, and why."""

from counterpoise.ledger.account import Account, account
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
    "account",
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
