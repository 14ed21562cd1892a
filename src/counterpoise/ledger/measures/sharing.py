"""Who shares a token: its trie node, how many rollouts of each sign pass through it, and what kind
of context it stands in.

Axes as in ``types``; M trie nodes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.maths.columns import by_context
from counterpoise.maths.reduce import groups
from counterpoise.maths.trie import prefix_nodes, row_mask


class Sharing(NamedTuple):
    """One entry per model token; False and 0 (node -1) elsewhere.

    ``is_full_NT``: every rollout of the group (two at least) is at this context and takes this
    token.
    ``is_fork_NT``: rollouts of both signs are at this context and not all of them take the same
    token (a discriminating context)."""

    node_NT: Tensor
    positive_NT: Tensor
    negative_NT: Tensor
    is_full_NT: Tensor
    is_fork_NT: Tensor

    @property
    def is_both_NT(self) -> Tensor:
        """Rollouts of both signs pass through the node."""
        return (self.positive_NT > 0) & (self.negative_NT > 0)

    @property
    def is_common_NT(self) -> Tensor:
        """Rollouts with an advantage, two at least, pass through the node."""
        return self.positive_NT + self.negative_NT > 1

    @property
    def contexts(self) -> dict[str, Tensor]:
        """Tokens by the kind of their context: shared, both_signs, discriminating, other."""
        return by_context(self.is_full_NT, self.is_both_NT, self.is_fork_NT)

    def select(self, row_R: Tensor) -> Sharing:
        return Sharing(*(column[row_R] for column in self))


def sharing(
    token_ids_NT: Tensor, mask_NT: Tensor, group_N: Tensor, advantage_NT: Tensor
) -> Sharing:
    """Multiplicities of every token's trie node.

    ``advantage_NT`` is [N, 1], one number per rollout, or [N, T], that of each token's turn. Where
    turns have signs of their own, a context has that of the turn of the token that follows it.

    >>> ids_NT = torch.tensor([[5, 6], [5, 7]])
    >>> out = sharing(
    ...     ids_NT, torch.ones(2, 2).bool(), torch.tensor([0, 0]), torch.tensor([[1.0], [-1.0]])
    ... )
    >>> out.positive_NT.tolist(), out.is_full_NT.tolist(), out.is_fork_NT.tolist()
    ([[1, 1], [1, 0]], [[True, False], [True, False]], [[False, True], [False, True]])
    """
    is_row_NT = row_mask(mask_NT)
    # environment tokens have a node here: they are the context of what follows
    nodes, by_group = prefix_nodes(token_ids_NT, is_row_NT, group_N), groups(group_N)
    num_nodes = len(nodes.size_M)
    node_NT = nodes.node_NT.clamp(min=0)
    sign_NT = advantage_NT.sign().expand_as(mask_NT)
    ahead_NT = _next(sign_NT, mask_NT)  # of the next model token, from each position on
    after_NT = torch.cat([ahead_NT[:, 1:], ahead_NT[:, -1:]], 1)

    def count(is_side_NT: Tensor) -> Tensor:
        return nodes.sum((is_side_NT & is_row_NT).long())

    positive_M, negative_M = count((sign_NT > 0) & mask_NT), count((sign_NT < 0) & mask_NT)
    size_M = nodes.sum(mask_NT.long())
    root_N1 = num_nodes + by_group.index_N[:, None]
    context_NT = torch.cat([root_N1, node_NT[:, :-1]], 1)
    # nodes, then one root a group: the context of its first tokens
    first_N = ahead_NT[:, 0]
    positive_C = torch.cat([count(after_NT > 0), by_group.sum((first_N > 0).long())])
    negative_C = torch.cat([count(after_NT < 0), by_group.sum((first_N < 0).long())])
    parent_M = context_NT.new_zeros(num_nodes).index_put((node_NT[mask_NT],), context_NT[mask_NT])
    children_C = torch.bincount(parent_M[size_M > 0], minlength=num_nodes + len(by_group.size_P))
    is_fork_C = (positive_C > 0) & (negative_C > 0) & (children_C > 1)
    group_size_N1 = by_group.size_P[by_group.index_N][:, None]
    return Sharing(
        node_NT=torch.where(mask_NT, nodes.node_NT, -1),
        positive_NT=positive_M[node_NT] * mask_NT,
        negative_NT=negative_M[node_NT] * mask_NT,
        is_full_NT=(size_M[node_NT] == group_size_N1) & (group_size_N1 > 1) & mask_NT,
        is_fork_NT=is_fork_C[context_NT] & mask_NT,
    )


def _next(value_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """The value at the next model token, this one included; behind the last one its own.

    >>> _next(torch.tensor([[1, 0, 2, 0]]), torch.tensor([[True, False, True, False]])).tolist()
    [[1, 2, 2, 2]]
    """
    place_NT = torch.arange(mask_NT.shape[1], device=mask_NT.device).expand_as(mask_NT)
    last_N1 = torch.where(mask_NT, place_NT, 0).amax(1, keepdim=True)
    ahead_NT = torch.where(mask_NT, place_NT, mask_NT.shape[1]).flip(1).cummin(1).values.flip(1)
    return value_NT.gather(1, ahead_NT.minimum(last_N1))
