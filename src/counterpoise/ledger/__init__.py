"""The ledger: what an update did to every token, and why."""

from counterpoise.ledger.account import Account, account
from counterpoise.ledger.book import Book, Settings, within_memory
from counterpoise.ledger.categories import CATEGORIES, categories, load_categories
from counterpoise.ledger.changes import cancellation, change_sign, is_flip
from counterpoise.ledger.classes import DECOMPOSITIONS, Facts, token_classes
from counterpoise.ledger.decompose import Decomposition, change_along, class_gradients, decompose, forward_mode, own_exact
from counterpoise.ledger.drift import drift, filled
from counterpoise.ledger.head_change import HeadChange, HeadResponse, HeadState, head_change
from counterpoise.ledger.head_kernel import HeadKernel, coupling_table, head_cancellation, head_kernel
from counterpoise.ledger.jitter import jitter
from counterpoise.ledger.logprobs import LogProbs, Params, Texts, at, copied, of_model, trainable
from counterpoise.ledger.nodes import Sharing, sharing
from counterpoise.ledger.optimizers import response
from counterpoise.ledger.residual import residuals
from counterpoise.ledger.snapshot import Snapshot, restore, snapshot

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
    "copied",
    "coupling_table",
    "decompose",
    "drift",
    "filled",
    "forward_mode",
    "head_cancellation",
    "head_change",
    "head_kernel",
    "is_flip",
    "jitter",
    "load_categories",
    "of_model",
    "own_exact",
    "residuals",
    "response",
    "restore",
    "sharing",
    "snapshot",
    "token_classes",
    "trainable",
    "within_memory",
]
