"""Three estimators of KL(policy || ref) from the log-probs of sampled tokens.

With x = ref_logp - logp and samples from the policy:

    k1 = -x                 unbiased, any sign
    k2 = x^2 / 2            biased, low variance, >= 0
    k3 = exp(x) - 1 - x     unbiased, >= 0

Reference: J. Schulman, "Approximating KL Divergence" (2020). Used by the credit rule ``kl_penalty``
    and by the loss term.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from counterpoise.errors import check_choice


def k1(logp_NT: Tensor, ref_logp_NT: Tensor) -> Tensor:
    """logp - ref_logp.

    >>> k1(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return logp_NT - ref_logp_NT


def k2(logp_NT: Tensor, ref_logp_NT: Tensor) -> Tensor:
    """(logp - ref_logp)^2 / 2.

    >>> k2(torch.tensor([-1.0]), torch.tensor([-3.0])).tolist()
    [2.0]
    """
    return (logp_NT - ref_logp_NT).square() / 2


def k3(logp_NT: Tensor, ref_logp_NT: Tensor) -> Tensor:
    """exp(ref_logp - logp) - 1 - (ref_logp - logp); the gap counts for at most 20, so that it stays
    finite.

    >>> round(k3(torch.tensor(-1.0), torch.tensor(-3.0)).item(), 4)
    1.1353
    """
    gap_NT = (ref_logp_NT - logp_NT).clamp(max=20.0)
    return torch.expm1(gap_NT) - gap_NT


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator of that name: ``fn(logp_NT, ref_logp_NT) -> kl_NT``.

    >>> kl_estimator("k2") is k2
    True
    """
    check_choice("kl", KL_ESTIMATORS, estimator=name)
    return KL_ESTIMATORS[name]
