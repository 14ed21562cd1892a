"""VIMPO's value loss: the log-ratio of a rollout to the reference, fitted to its advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.losses.token_loss import Parts, bounded_exp, log_ratio, token_loss
from counterpoise.types import Rows

READS = ("ref_logp_NT", "ref_kl_NT")


@token_loss(needs=READS, values_rollouts=True)
def implied_value(trainer_logp_NT: Tensor, rows: Rows, *, beta: float = 5e-4) -> Parts:
    """L_i = 1/2 [sum_t beta (logp_t - ref_logp_t - sg KL_t) - A_i]^2, the mean over rollouts.

    A_i is the rollout's advantage, R - group mean with ``group_mean``. Reads no credit. With e_i
    the bracket, every token of the rollout has coef -beta e_i and the value e_i^2 / (2 n_i), both
    divided by what the method's reduction multiplies them with: whatever that is, the total is
    (1 / N) sum_i L_i. Tokens that the reduction leaves out (scale 0) have neither.

    Args:
        beta: > 0, reward per nat of log-ratio.

    Reference: VIMPO, arXiv 2606.20008 (beta 5e-4). Departs: the code takes the KL of the weights
        at each update; here it is ``ref_kl_NT``, of those before the first update of the batch.
    """
    check_number("implied_value", above=0, beta=beta)
    if rows.ref_logp_NT is None or rows.ref_kl_NT is None:
        raise ValueError(
            f"implied_value: the rows have no {' or no '.join(READS)}. Measure them with the frozen"
            " reference model: batch.replace(ref_logp_NT=..., ref_kl_NT=...)."
        )
    if rows.rollout_scale_N is None:
        raise ValueError(
            "implied_value: the rows have no rollout_scale_N, 1 / (rollouts of the update). Take"
            " them from method.rows(batch, credit, row_R)."
        )
    gap_NT = (trainer_logp_NT - rows.ref_logp_NT - rows.ref_kl_NT).detach()
    error_N1 = beta * gap_NT.sum(1, keepdim=True) - rows.advantage_N[:, None]
    value_NT = error_N1.square() / (2 * rows.mask_NT.sum(1, keepdim=True).clamp(min=1))
    moving_NT = beta * error_N1 * (trainer_logp_NT - trainer_logp_NT.detach())
    has_scale_NT = rows.scale_NT != 0
    undo_NT = rows.rollout_scale_N[:, None] / torch.where(has_scale_NT, rows.scale_NT, 1)
    return (
        torch.where(has_scale_NT, undo_NT, 0) * (value_NT + moving_NT),
        bounded_exp(log_ratio(trainer_logp_NT, rows)),
        torch.zeros_like(rows.mask_NT),
    )
