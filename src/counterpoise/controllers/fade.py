"""FADE's controller: alpha from the solve rate, delta from the entropy.

It sets the parameters of the advantage of the same name.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, groups, masked_mean
from counterpoise.stage import Control, declare
from counterpoise.types import TokenBatch


def fade_start() -> dict[str, Any]:
    """p_hat starts at 1/2; H0 is the entropy of the first batch, measured before its first
    update.
    """
    return {"p_hat": 0.5, "H_hat": None, "H0": None}


@declare(needs="entropy_NT", init=fade_start, reads_success=True)
def fade(
    state: dict[str, Any],
    batch: TokenBatch,
    *,
    rate: float = 0.02,
    target_entropy: float | None = None,
    normalised: bool = False,
    alpha_scale: float = 1.5,
    alpha_low: float = 1.0,
    alpha_high: float = 3.0,
    delta_low: float = 0.3,
    delta_high: float = 1.0,
    reduce: Reduce = LOCAL,
) -> Control:
    """alpha = clip(1.5 (1 - p_hat) / p_hat, 1, 3), delta = clip(1 + H_hat - H_star, 0.3, 1).

    p_hat and H_hat are running means of the solve rate (start 1/2) and of the mean token entropy in
    nats (start H0): hat <- (1 - rate) hat + rate * new. Logged besides: m_S, the mean over prompts
    of the success mass m (1 - m)^alpha, and m_F = m_S / delta.

    Args:
        state: {"p_hat", "H_hat", "H0"}.
        batch: reads entropy_NT.
        rate: weight of the new value.
        target_entropy: H_star; None is H0 / 2.
        normalised: ours: delta = clip(1 + (H_hat - H_star) / H0, ...), which does not depend on the
            scale of the entropy (H0 = 0: not
            divided).
        alpha_scale, alpha_low, alpha_high: of alpha. p_hat = 0 gives alpha_high.
        delta_low, delta_high: of delta.
        reduce: pools over ranks.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]],
    ...     group=[0, 0],
    ...     reward=[1, 0],
    ...     sampler_logp=[[-1.0], [-1.0]],
    ...     entropy=[[2.0], [2.0]],
    ... )
    >>> fade(fade_start(), batch).settings
    {'advantage': {'alpha': 1.5, 'delta': 1.0}}

    Reference: FADE, arXiv 2607.01490. Reads the paper as: ``rate`` weighs the new value (its line
        is ambiguous), and a batch is folded into the
    running means first, then its own alpha and delta are set.
    """
    _check(rate, target_entropy, alpha_scale, alpha_low, alpha_high, delta_low, delta_high)
    entropy = float(masked_mean(batch.column("entropy_NT"), batch.mask_NT, reduce))
    H0 = entropy if state["H0"] is None else state["H0"]
    p_hat = _folded(state["p_hat"], _solve_rate(batch, reduce), rate)
    H_hat = _folded(H0 if state["H_hat"] is None else state["H_hat"], entropy, rate)
    H_star = H0 / 2 if target_entropy is None else target_entropy
    alpha = _clip(
        alpha_scale * (1 - p_hat) / p_hat if p_hat > 0 else math.inf, alpha_low, alpha_high
    )
    delta = _clip(
        1 + (H_hat - H_star) / (H0 if normalised and H0 > 0 else 1), delta_low, delta_high
    )
    m_S = _success_mass(batch, alpha, reduce)
    return Control(
        settings={"advantage": {"alpha": alpha, "delta": delta}},
        state={"p_hat": p_hat, "H_hat": H_hat, "H0": H0},
        metrics={
            "alpha": alpha,
            "delta": delta,
            "p_hat": p_hat,
            "H_hat": H_hat,
            "H0": H0,
            "m_S": m_S,
            "m_F": m_S / delta,
        },
    )


def _check(
    rate: float,
    target_entropy: float | None,
    alpha_scale: float,
    alpha_low: float,
    alpha_high: float,
    delta_low: float,
    delta_high: float,
) -> None:
    where = "fade controller"
    check_number(where, above=0, most=1, rate=rate)
    check_number(where, least=0, or_none=True, target_entropy=target_entropy)
    check_number(where, above=0, alpha_scale=alpha_scale, alpha_low=alpha_low, delta_low=delta_low)
    check_number(where, least=alpha_low, alpha_high=alpha_high)
    check_number(where, least=delta_low, delta_high=delta_high)


def _solve_rate(batch: TokenBatch, reduce: Reduce) -> float:
    solved_N = batch.is_success_N.double()
    return float(masked_mean(solved_N, solved_N >= 0, reduce))


def _success_mass(batch: TokenBatch, alpha: float, reduce: Reduce) -> float:
    """Mean over prompts of m (1 - m)^alpha: what ``advantages.fade`` gives successes, summed over a
    prompt's rollouts and divided by G.
    """
    mean_P: Tensor = groups(batch.group_N).mean(batch.is_success_N.double())
    mass_P = mean_P * (1 - mean_P) ** alpha
    return float(masked_mean(mass_P, mean_P >= 0, reduce))


def _folded(running: float, new: float, rate: float) -> float:
    return (1 - rate) * running + rate * new


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
