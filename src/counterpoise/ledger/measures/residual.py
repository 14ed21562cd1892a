"""What is left at tokens that good and bad rollouts share, and what broke their cancellation.

At a trie node every rollout brings the same gradient, with A_i alpha_i = coef * scale in front.
Exchangeable weights cancel there as far as the advantages do. The residual of a node is |sum_i A_i
alpha_i| / sum_i |A_i alpha_i|: 0 cancels, 1 nothing cancels. Each cause is measured by switching it
off alone and taking the difference, from the tensors that the loss returned.

Axes as in ``types``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.maths.columns import residual_of
from counterpoise.maths.reduce import groups
from counterpoise.maths.trie import PrefixNodes, prefix_nodes
from counterpoise.types import Rows, TokenLoss


def residual(value_NT: Tensor, nodes: PrefixNodes) -> Tensor:
    """|sum| / sum of absolute values over each node, [M]; 0 where nothing enters.

    >>> nodes = prefix_nodes(
    ...     torch.tensor([[5], [5]]), torch.ones(2, 1).bool(), torch.tensor([0, 0])
    ... )
    >>> residual(torch.tensor([[3.0], [-1.0]]), nodes).tolist()
    [0.5]
    """
    return residual_of(nodes.sum(value_NT), nodes.sum(value_NT.abs()))


def entering(rows: Rows, loss: TokenLoss) -> dict[str, Tensor]:
    """A_i alpha_i of every token, and what it would be with one cause switched off (or all of
    them).

    ``no_clip``: cut tokens enter with credit * ratio. ``no_length``: one scale for all tokens, the
    update's mean. ``no_coupling``: the weight that the loss put on credit is 1 on tokens that were
    not cut. A weight that depends on the shared token alone (its own ratio) is the same for all
    rollouts of a node and changes nothing there; what is left is weights of whole rollouts and of
    signs. ``credit``: all three off. ``advantage``: without credit rules too.
    """
    mask_NT = rows.mask_NT
    credit_NT = torch.where(mask_NT, rows.credit_NT, 0)
    advantage_NT = rows.advantage_N[:, None] if rows.advantage_NT is None else rows.advantage_NT
    mean_scale = rows.scale_NT.sum() / mask_NT.sum().clamp(min=1)
    return {
        "full": loss.coef_NT * rows.scale_NT,
        "no_clip": (
            torch.where(loss.clipped_NT, credit_NT * loss.ratio_NT, loss.coef_NT) * rows.scale_NT
        ),
        "no_length": loss.coef_NT * mean_scale,
        "no_coupling": torch.where(loss.clipped_NT, loss.coef_NT, credit_NT) * rows.scale_NT,
        "credit": credit_NT,
        "advantage": torch.where(mask_NT, advantage_NT.to(credit_NT.dtype), 0),
    }


def residuals(token_ids_NT: Tensor, rows: Rows, loss: TokenLoss) -> dict[str, float]:
    """Mean residual over the nodes of an update that rollouts of both signs share, and what
    each cause adds to it.

    ``full`` as trained; ``clip``, ``length``, ``coupling``: full minus the residual with that cause
    switched off (negative if the cause helps);
    ``credit``: all three off; ``advantage``: from the advantages alone; ``fully_shared``: full,
    over nodes that a whole group shares. Empty without such nodes.

    Args:
        token_ids_NT: of the update's rows.
        rows, loss: what the update used and what its loss returned.
    """
    nodes = prefix_nodes(token_ids_NT, rows.mask_NT, rows.group_N)
    by_group = groups(rows.group_N)
    sign_NT = rows.sign_NT
    is_both_M = (nodes.sum(((sign_NT > 0) & rows.mask_NT).long()) > 0) & (
        nodes.sum(((sign_NT < 0) & rows.mask_NT).long()) > 0
    )
    if not is_both_M.any():
        return {}
    of = {name: residual(value_NT, nodes) for name, value_NT in entering(rows, loss).items()}
    mean = {name: float(value_M[is_both_M].mean()) for name, value_M in of.items()}
    out = {name: mean[name] for name in ("full", "credit", "advantage")}
    out |= {cause: mean["full"] - mean[f"no_{cause}"] for cause in ("clip", "length", "coupling")}
    group_size_N1 = by_group.size_P[by_group.index_N][:, None]
    group_size_M = nodes.size_M.new_zeros(len(nodes.size_M)).index_put(
        (nodes.node_NT[rows.mask_NT],), group_size_N1.expand_as(rows.mask_NT)[rows.mask_NT]
    )
    is_whole_M = is_both_M & (nodes.size_M == group_size_M)
    return out | (
        {"fully_shared": float(of["full"][is_whole_M].mean())} if is_whole_M.any() else {}
    )
