"""Which tokens of a batch to value: drawn from strata, so that rare decisive ones are there.

Every token lies in one stratum and is drawn with the same chance as the others of it; its weight is
one over that chance, so that weighted numbers are those of all tokens of the batch. Axes: N
rollouts, T response tokens, S strata.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.probes.output import Columns
from counterpoise.types import TokenBatch

STRATA = ("first error", "surprising", "uncertain", "other", "sure")
SURE = 1e-4  # a token at most this far from probability 1 cannot change a value by more
SURPRISING, UNCERTAIN = 0.9, 0.5  # quantiles: of -logp, and of the entropy among the rest


def strata(batch: TokenBatch, first_error_N: Tensor) -> Tensor:
    """The stratum of every token (an index of ``STRATA``), -1 on padding.

    First errors of failed rollouts; sure tokens, whose probability is 1 within ``SURE``; of the
    others the tenth with the highest -logp; of the rest the half with the higher entropy.
    """
    surprise_NT = -batch.sampler_logp_NT
    stratum_NT = torch.where(batch.mask_NT, STRATA.index("other"), -1)
    stratum_NT[batch.mask_NT & (-torch.expm1(-surprise_NT) <= SURE)] = STRATA.index("sure")
    row_R = ((first_error_N >= 0) & ~batch.is_success_N).nonzero()[:, 0]
    stratum_NT[row_R, first_error_N[row_R]] = STRATA.index("first error")
    steps = [("surprising", surprise_NT, SURPRISING), ("uncertain", batch.entropy_NT, UNCERTAIN)]
    for name, column_NT, quantile in steps:
        is_left_NT = stratum_NT == STRATA.index("other")
        if column_NT is not None and bool(is_left_NT.any()):
            bound = column_NT[is_left_NT].double().quantile(quantile)
            stratum_NT[is_left_NT & (column_NT > bound)] = STRATA.index(name)
    return stratum_NT


def allocation(sizes: list[int], num: int) -> list[int]:
    """How many to draw of each stratum: equal parts; what a small one cannot use goes to the rest.

    >>> allocation([3, 100, 100], 30)
    [3, 13, 14]
    """
    out = [0] * len(sizes)
    for left, k in enumerate(sorted(range(len(sizes)), key=lambda k: sizes[k])):
        out[k] = min(sizes[k], (num - sum(out)) // (len(sizes) - left))
    return out


def draw_tokens(
    batch: TokenBatch, stratum_NT: Tensor, num: int, generator: torch.Generator
) -> Columns:
    """Tokens to value, one row each: ``num`` of the strata that need completions, and as many of
    the sure ones, which need none.
    """
    sizes = [int((stratum_NT == k).sum()) for k in range(len(STRATA))]
    counts = [*allocation(sizes[:-1], num), min(sizes[-1], num)]
    parts = []
    for k, (size, count) in enumerate(zip(sizes, counts)):
        place_M2 = (stratum_NT == k).nonzero().cpu()
        pick = torch.randperm(size, generator=generator)[:count].sort().values
        weight = torch.full((count, 1), size / max(count, 1), dtype=torch.float64)
        parts.append(torch.cat([place_M2[pick].double(), weight, torch.full((count, 1), k)], 1))
    row, position, weight, stratum = torch.cat(parts).T
    row, position = row.long(), position.long()
    at = (row.to(batch.mask_NT.device), position.to(batch.mask_NT.device))
    return {
        "group": batch.group_N.cpu()[row].numpy(),
        "row": row.numpy(),
        "position": position.numpy(),
        "stratum": [STRATA[int(k)] for k in stratum],
        "weight": weight.numpy(),
        "probability": batch.sampler_logp_NT[at].double().exp().cpu().numpy(),
    }
