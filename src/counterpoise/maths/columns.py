"""Which tokens are meant: flips, signs, kinds of context. Operators alone, so a column may be a
tensor, an array or a pandas column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import Tensor

Column = TypeVar("Column", "Tensor", "np.ndarray", "pd.Series")


def is_flip(change: Column, advantage: Column) -> Column:
    """Moved against the sign of its own advantage; False for unchanged tokens and advantage 0.

    Args:
        change: +1 boosted, -1 suppressed, 0 unchanged.
        advantage: of the token's rollout, or its sign.
    """
    return change * advantage < 0  # pyright: ignore[reportReturnType]


def residual_of(total: Column, size: Column) -> Column:
    """What is left of numbers that may cancel: |sum| / sum of absolute values; 0 where nothing
    enters.

    Args:
        total: sum of the numbers.
        size: sum of their absolute values.
    """
    return abs(total) / (size + (size == 0))  # pyright: ignore[reportReturnType]


def by_sign(advantage: Column) -> dict[str, Column]:
    """Tokens of rollouts with positive and with negative advantage."""
    return {"positive": advantage > 0, "negative": advantage < 0}  # pyright: ignore[reportReturnType]


def by_context(is_full: Column, is_both: Column, is_fork: Column) -> dict[str, Column]:
    """Tokens by the kind of their context, each in exactly one.

    ``shared``: every rollout of the prompt, of both signs, is there and takes this token;
    ``discriminating``: rollouts of both signs are there and not all take the same token (a fork);
    ``both_signs``: some rollouts of the prompt, of both signs, are there and all take this token;
    ``other``: none of these.
    """
    is_shared, is_some = is_full & is_both, is_both & ~is_full & ~is_fork
    return {
        "shared": is_shared,
        "both_signs": is_some,
        "discriminating": is_fork,
        "other": ~(is_shared | is_some | is_fork),  # pyright: ignore[reportReturnType]
    }
