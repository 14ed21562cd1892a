"""The prefix trie of a batch, as tensors: which tokens of a group stand at the same place after the
same words.

A node is (group, the tokens up to and including this one). Two tokens of a batch are the same node
exactly when their rollouts answer the same prompt and agree on every token so far. Axes as in
``types``; ``M`` counts nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.maths.reduce import groups


class PrefixNodes(NamedTuple):
    """``node_NT`` is dense 0..M-1 and -1 on padding; ``size_M`` counts the rollouts that pass
    through a node.
    """

    node_NT: Tensor
    size_M: Tensor

    @property
    def size_NT(self) -> Tensor:
        """Rollouts of the group that share the prefix with this token; 0 on padding."""
        return torch.where(self.node_NT >= 0, self.size_M[self.node_NT.clamp(min=0)], 0)

    def sum(self, value_NT: Tensor) -> Tensor:
        """Sum of a token column over each node, [M]."""
        is_token_NT = self.node_NT >= 0
        return value_NT.new_zeros(len(self.size_M)).index_add(
            0, self.node_NT[is_token_NT], value_NT[is_token_NT]
        )


def pair_index(first_M: Tensor, second_M: Tensor) -> tuple[Tensor, int]:
    """A dense number for every distinct pair of integers, in order of the pair; and how many there
    are.

    >>> index, count = pair_index(torch.tensor([1, 0, 1]), torch.tensor([7, 9, 7]))
    >>> index.tolist(), count
    ([1, 0, 1], 2)
    """
    if first_M.numel() == 0:
        return first_M.long(), 0
    low, high = int(second_M.min()), int(second_M.max())
    distinct, index_M = torch.unique(
        first_M.long() * (high - low + 1) + (second_M.long() - low), return_inverse=True
    )
    return index_M, len(distinct)


def prefix_nodes(token_ids_NT: Tensor, mask_NT: Tensor, group_N: Tensor) -> PrefixNodes:
    """The trie node of every response token.

    One pass over positions: a node is numbered by (its parent's node, its token id), a sort of at
    most N keys at each position. A rollout that has parted from all others leaves the pass, since
    it stays alone; its later tokens are numbered at the end, all at once.

    Args:
        token_ids_NT: ids of any integer dtype.
        mask_NT: True on response tokens, which must be right-padded.
        group_N: which prompt each rollout answers.

    >>> nodes = prefix_nodes(
    ...     torch.tensor([[5, 6], [5, 7], [5, 6]]),
    ...     torch.ones(3, 2, dtype=torch.bool),
    ...     torch.tensor([0, 0, 0]),
    ... )
    >>> nodes.node_NT.tolist(), nodes.size_M.tolist()
    ([[0, 1], [0, 2], [0, 1]], [3, 2, 1])
    """
    if (mask_NT[:, 1:] & ~mask_NT[:, :-1]).any():
        raise ValueError(
            "prefix_nodes: mask_NT has a gap before a response token; responses must be"
            " right-padded."
        )
    node_NT = torch.full(mask_NT.shape, -1, dtype=torch.long, device=mask_NT.device)
    row_R, parent_R, num_nodes = (
        torch.arange(len(group_N), device=mask_NT.device),
        groups(group_N).index_N,
        0,
    )
    for t in range(mask_NT.shape[1]):
        is_there_R = mask_NT[row_R, t]
        row_R, parent_R = row_R[is_there_R], parent_R[is_there_R]
        if len(row_R) == 0:
            break
        node_R, count = pair_index(parent_R, token_ids_NT[row_R, t])
        node_NT[row_R, t] = node_R + num_nodes
        is_shared_R = torch.bincount(node_R)[node_R] > 1
        row_R, parent_R, num_nodes = row_R[is_shared_R], node_R[is_shared_R], num_nodes + count
    is_alone_NT = mask_NT & (node_NT < 0)
    node_NT[is_alone_NT] = num_nodes + torch.arange(int(is_alone_NT.sum()), device=mask_NT.device)
    return PrefixNodes(node_NT, torch.bincount(node_NT[mask_NT]))
