"""Reductions: the denominator of a loss, as a column over a whole update.

``REDUCTIONS`` is the table of names.
"""

from __future__ import annotations

from counterpoise.reductions.denominators import (
    constant_length,
    per_sequence,
    per_token,
    side_means,
)
from counterpoise.stage import Stage

REDUCTIONS: dict[str, Stage] = {
    "per_token": per_token,
    "per_sequence": per_sequence,
    "constant_length": constant_length,
    "side_means": side_means,
}

__all__ = ["REDUCTIONS", "constant_length", "per_sequence", "per_token", "side_means"]
