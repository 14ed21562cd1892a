"""The KL term: a second loss beside the first, ``loss=[{"name": "clipped"}, {"name": "kl", "coef":
0.04}]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.losses.token_loss import Parts, bounded_exp, log_ratio, token_loss
from counterpoise.maths.kl import kl_estimator
from counterpoise.types import Rows


@token_loss(needs="ref_logp_NT")
def kl(trainer_logp_NT: Tensor, rows: Rows, *, estimator: str = "k3", coef: float = 0.04) -> Parts:
    """L = coef * k(trainer_logp, ref_logp), with the gradient through the estimator.

    Reads no credit; the reduction is that of the method.

    Args:
        estimator: ``k1`` logp - ref, ``k2`` (logp - ref)^2 / 2, ``k3`` exp(ref - logp) - 1 - (ref -
            logp).
        coef: strength; GRPO's beta.

    The token's gradient enters with -coef (k1), -coef (logp - ref) (k2), -coef (1 - exp(ref -
    logp)) (k3). In expectation over the policy's own samples only k2's is the gradient of KL(policy
    || ref); k1's is 0, k3's that of KL(ref || policy).

    Reference: arXiv 2402.03300, Eq. 4 (k3); J. Schulman, "Approximating KL Divergence" (2020).
    """
    check_number("kl", least=0, coef=coef)
    if rows.ref_logp_NT is None:
        raise ValueError(
            "kl: the rows have no ref_logp_NT. Score the rollouts with the frozen reference model:"
            " batch.replace(ref_logp_NT=...)."
        )
    value_NT = kl_estimator(estimator)(trainer_logp_NT, rows.ref_logp_NT)
    return (
        coef * value_NT,
        bounded_exp(log_ratio(trainer_logp_NT, rows)),
        torch.zeros_like(rows.mask_NT),
    )
