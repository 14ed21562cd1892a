"""Axes along which an update is taken apart: each cuts the tokens of a update into classes, every
token in exactly one.

Axes as in ``types``; ``facts`` are columns of the update's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from counterpoise.errors import nearest
from counterpoise.ledger.calculus.head_kernel import CONFIDENT
from counterpoise.ledger.measures.sharing import Sharing

Classes = dict[str, Tensor]


class Facts(NamedTuple):
    """What is known of the tokens before anything is differentiated.

    ``advantage_NT`` is [N, 1], or [N, T] where a rule tells turns apart. ``category_NT`` indexes
    ``category_names``.
    """

    mask_NT: Tensor
    advantage_NT: Tensor
    sampler_logp_NT: Tensor
    category_NT: Tensor
    category_names: Sequence[str]
    sharing: Sharing

    def select(self, row_R: Tensor) -> Facts:
        return Facts(
            self.mask_NT[row_R],
            self.advantage_NT[row_R],
            self.sampler_logp_NT[row_R],
            self.category_NT[row_R],
            self.category_names,
            self.sharing.select(row_R),
        )


def by_sign(facts: Facts) -> Classes:
    """Tokens with positive, negative and zero advantage, of their turn or rollout."""
    sign_NT = facts.advantage_NT.sign()
    return {
        name: (sign_NT == value) & facts.mask_NT
        for name, value in (("positive", 1), ("negative", -1), ("zero", 0))
    }


def by_category(facts: Facts) -> Classes:
    """Tokens by their category."""
    return {
        name: (facts.category_NT == k) & facts.mask_NT
        for k, name in enumerate(facts.category_names)
    }


def by_sharing(facts: Facts) -> Classes:
    """Tokens whose trie node rollouts of both signs pass through, and the others."""
    is_both_NT = facts.sharing.is_both_NT
    return {"both_signs": is_both_NT & facts.mask_NT, "not_both": ~is_both_NT & facts.mask_NT}


def by_confidence(facts: Facts) -> Classes:
    """Tokens that the sampler gave a probability of 0.9 or more, and the others."""
    is_confident_NT = facts.sampler_logp_NT.exp() >= CONFIDENT
    return {
        "confident": is_confident_NT & facts.mask_NT,
        "unsure": ~is_confident_NT & facts.mask_NT,
    }


DECOMPOSITIONS: dict[str, Callable[[Facts], Classes]] = {
    "sign": by_sign,
    "category": by_category,
    "sharing": by_sharing,
    "confidence": by_confidence,
}


def check_axes(axes: Sequence[str]) -> None:
    """An unknown axis is an error that names the nearest."""
    for axis in axes:
        if axis not in DECOMPOSITIONS:
            raise ValueError(
                f"ledger.decompose: unknown axis {axis!r}. {nearest(axis, DECOMPOSITIONS)}"
            )


def token_classes(axes: Sequence[str], facts: Facts) -> dict[str, Classes]:
    """Axis -> class -> mask of the update's tokens.

    >>> import torch
    >>> nothing = torch.zeros(2, 1)
    >>> one = Sharing(*[nothing.bool()] * 5)
    >>> facts = Facts(
    ...     torch.ones(2, 1).bool(),
    ...     torch.tensor([[1.0], [-1.0]]),
    ...     nothing,
    ...     nothing.long(),
    ...     ["other"],
    ...     one,
    ... )
    >>> token_classes(["sign"], facts)["sign"]["negative"].tolist()
    [[False], [True]]
    """
    check_axes(axes)
    return {axis: DECOMPOSITIONS[axis](facts) for axis in axes}
