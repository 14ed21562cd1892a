"""The covariance of a token: how much its log-prob and its credit rise above their batch means
together.

A policy's entropy falls, to first order, with the covariance of log-prob and advantage, and few
tokens carry most of it
(The Entropy Mechanism, arXiv 2505.22617). Clip-Cov and KL-Cov find those tokens with this function.
Axes as in ``types``."""

from __future__ import annotations

from torch import Tensor

from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean


def token_covariance(
    logp_NT: Tensor, credit_NT: Tensor, mask_NT: Tensor, reduce: Reduce = LOCAL
) -> Tensor:
    """cov_it = (logp_it - mean logp) (credit_it - mean credit), both means over all response tokens
    of all ranks.

    Args:
        logp_NT: log-prob of each token, of the sampler or of the trainer.
        credit_NT: credit (or advantage * mask) of each token.
        mask_NT: True on response tokens; padding gets 0.
        reduce: pools the two means over ranks.

    Reference: arXiv 2505.22617, the centred cross-product of log-prob and advantage.

    >>> import torch
    >>> logp, credit = torch.tensor([[-1.0, -3.0, 9.0]]), torch.tensor([[1.0, -1.0, 9.0]])
    >>> token_covariance(logp, credit, torch.tensor([[True, True, False]])).tolist()
    [[1.0, 1.0, 0.0]]
    """
    logp_mean, credit_mean = (
        masked_mean(logp_NT, mask_NT, reduce),
        masked_mean(credit_NT, mask_NT, reduce),
    )
    return ((logp_NT - logp_mean) * (credit_NT - credit_mean)).where(mask_NT, 0)
