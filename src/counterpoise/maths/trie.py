"""The prefix trie of a batch, as tensors: which tokens of a group stand at the same place after the
same words.

A node is (group, the tokens up to and including this one). Two tokens of a batch are the same node
exactly when their rollouts answer the same prompt and agree on every token so far, those that an
environment said included. Axes as in ``types``; ``M`` counts nodes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from counterpoise.maths.reduce import groups


class PrefixNodes(NamedTuple):
    """``node_NT`` is dense 0..M-1 and -1 where the model wrote nothing; ``size_M`` counts the
    rollouts whose model wrote the token of a node.
    """

    node_NT: Tensor
    size_M: Tensor

    @property
    def size_NT(self) -> Tensor:
        """Rollouts of the group that share the prefix with this token; 0 without a node."""
        return torch.where(self.node_NT >= 0, self.size_M[self.node_NT.clamp(min=0)], 0)

    def sum(self, value_NT: Tensor) -> Tensor:
        """Sum of a token column over each node, [M]."""
        num = len(self.size_M)  # the number of what is no token: added up too, and dropped
        node_NT = torch.where(self.node_NT >= 0, self.node_NT, num)
        out_M = value_NT.new_zeros(num + 1).index_add_(0, node_NT.flatten(), value_NT.flatten())
        return out_M[:num]


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


def row_mask(mask_NT: Tensor) -> Tensor:
    """True up to the last model token of each row: what the model wrote and what it read.

    >>> row_mask(torch.tensor([[True, False, True, False]])).tolist()
    [[True, True, True, False]]
    """
    return mask_NT.flip(1).cumsum(1).flip(1) > 0


def prefix_nodes(token_ids_NT: Tensor, mask_NT: Tensor, group_N: Tensor) -> PrefixNodes:
    """The trie node of every model token.

    The trie runs over all tokens of a row; environment tokens are context, so that a prefix ends
    where replies differ, and have no node themselves.

    Args:
        token_ids_NT: ids of any integer dtype.
        mask_NT: True on model tokens.
        group_N: which prompt each rollout answers.

    >>> nodes = prefix_nodes(
    ...     torch.tensor([[5, 6], [5, 7], [5, 6]]),
    ...     torch.ones(3, 2, dtype=torch.bool),
    ...     torch.tensor([0, 0, 0]),
    ... )
    >>> nodes.node_NT.tolist(), nodes.size_M.tolist()
    ([[0, 1], [0, 2], [0, 1]], [3, 2, 1])
    """
    is_row_NT = row_mask(mask_NT)
    node_NT = _number(token_ids_NT, is_row_NT, group_N)
    if not torch.equal(is_row_NT, mask_NT):
        _, dense_M = torch.unique(node_NT[mask_NT], return_inverse=True)
        node_NT = torch.full_like(node_NT, -1).masked_scatter(mask_NT, dense_M)
    return PrefixNodes(node_NT, torch.bincount(node_NT[mask_NT]))


def _number(token_ids_NT: Tensor, is_row_NT: Tensor, group_N: Tensor) -> Tensor:
    """The number of every token's node, -1 on padding; rows are right-padded.

    One pass over positions: a node is numbered by (its parent's node, its token id), a sort of at
    most N keys at each position. A rollout that has parted from all others leaves the pass, since
    it stays alone; its later tokens are numbered at the end, all at once.
    """
    node_NT = torch.full(is_row_NT.shape, -1, dtype=torch.long, device=is_row_NT.device)
    row_R = torch.arange(len(group_N), device=is_row_NT.device)
    parent_R, num_nodes = groups(group_N).index_N, 0
    for t in range(is_row_NT.shape[1]):
        is_there_R = is_row_NT[row_R, t]
        row_R, parent_R = row_R[is_there_R], parent_R[is_there_R]
        if len(row_R) == 0:
            break
        node_R, count = pair_index(parent_R, token_ids_NT[row_R, t])
        node_NT[row_R, t] = node_R + num_nodes
        is_shared_R = torch.bincount(node_R)[node_R] > 1
        row_R, parent_R, num_nodes = row_R[is_shared_R], node_R[is_shared_R], num_nodes + count
    is_alone_NT = is_row_NT & (node_NT < 0)
    node_NT[is_alone_NT] = num_nodes + torch.arange(int(is_alone_NT.sum()), device=node_NT.device)
    return node_NT
