"""STARE's controller: surprising tokens are boosted only while the entropy is low.

It sets the parameters of the credit rule ``surprisal_boost``.
"""

from __future__ import annotations

from typing import Any

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import Control, declare
from counterpoise.types import TokenBatch

MAX_BOOST, MIN_DAMP = 1.5, 0.5  # how far the factors may move


def stare_start(*, boost: float, damp: float | None) -> dict[str, Any]:
    """The factors start at the controller's parameters."""
    return {"boost": float(boost), "damp": None if damp is None else float(damp)}


@declare(needs="entropy_NT", init=stare_start)
def stare(
    state: dict[str, Any],
    batch: TokenBatch,
    *,
    target: float = 0.3,
    boost: float = 1.1,
    damp: float | None = None,
    adaptive: bool = False,
    step: float = 0.01,
    reduce: Reduce = LOCAL,
) -> Control:
    """boost = W and damp = M while H < target, else both 1; H the mean token entropy in nats.

    With ``adaptive``, first W <- clip(W + step sgn(target - H), 1, 1.5) and M <- clip(M - step
    sgn(target - H), 0.5, 1).

    Args:
        state: {"boost", "damp"}, that is W and M.
        batch: reads entropy_NT.
        target: the entropy to hold.
        boost: W, at the start if adaptive, in [1, 1.5].
        damp: M likewise, in [0.5, 1], the paper's variant C2 (0.9); None leaves punished tokens
            alone.
        adaptive: move W and M from batch to batch.
        step: how far they move per batch.
        reduce: pools over ranks.

    Reference: STARE, arXiv 2606.19236, and the authors' code. Reads the paper as: the threshold of
        the entropy is also the target of ``adaptive``; a batch is measured first and the new
        factors are used for it.

    >>> batch = TokenBatch.from_lists(
    ...     [[1]], group=[0], reward=[1], sampler_logp=[[-1.0]], entropy=[[0.2]]
    ... )
    >>> stare(stare_start(boost=1.1, damp=None), batch).settings
    {'credit': {'boost': 1.1, 'damp': 1.0}}
    """
    _check(target, boost, damp, step)
    entropy = float(masked_mean(batch.column("entropy_NT"), batch.mask_NT, reduce))
    sign = (entropy < target) - (entropy > target)
    W, M = state["boost"], state["damp"]
    if adaptive:
        W = min(max(W + step * sign, 1.0), MAX_BOOST)
        M = None if M is None else min(max(M - step * sign, MIN_DAMP), 1.0)
    is_on = entropy < target
    used = {"boost": W if is_on else 1.0, "damp": M if is_on and M is not None else 1.0}
    return Control(
        settings={"credit": used},
        state={"boost": W, "damp": M},
        metrics={**used, "entropy": entropy, "is_on": float(is_on)},
    )


def _check(target: float, boost: float, damp: float | None, step: float) -> None:
    where = "stare controller"
    check_number(where, least=0, target=target)
    check_number(where, least=1, most=MAX_BOOST, boost=boost)
    check_number(where, least=MIN_DAMP, most=1, or_none=True, damp=damp)
    check_number(where, above=0, step=step)
