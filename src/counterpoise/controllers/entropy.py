"""Hold the mean token entropy at a target by moving one parameter of another stage. Ours."""

from __future__ import annotations

from typing import Any

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce, masked_mean
from counterpoise.stage import Control, declare
from counterpoise.types import TokenBatch

AXES = ("advantage", "credit")


def entropy_start(*, start: float) -> dict[str, Any]:
    """The parameter starts at ``start``; the entropy of the first batch is not yet known."""
    return {"value": float(start), "first_entropy": None}


@declare(needs="entropy_NT", init=entropy_start)
def entropy_target(
    state: dict[str, Any],
    batch: TokenBatch,
    *,
    path: str,
    start: float,
    lo: float,
    hi: float,
    rate: float,
    target: float | None = None,
    reduce: Reduce = LOCAL,
) -> Control:
    """Integral control: value <- clip(value + rate (target - H), lo, hi), H the mean token entropy
    of the batch in nats.

    The batch is measured first, then the new value is used for it.

    Args:
        state: {"value", "first_entropy"}.
        batch: reads entropy_NT.
        path: "advantage.<parameter>", or "credit.<parameter>" for the first credit rule that has
            it.
        start: the first value, in [lo, hi].
        lo, hi: bounds of the value.
        rate: how far one nat of error moves the value; > 0 where a larger value raises the entropy,
            < 0 where it lowers it.
        target: entropy to hold; None is the entropy of the first batch.
        reduce: pools over ranks.

    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]],
    ...     group=[0, 0],
    ...     reward=[1, 0],
    ...     sampler_logp=[[-1.0], [-1.0]],
    ...     entropy=[[1.0], [2.0]],
    ... )
    >>> setting = {"path": "advantage.positive", "start": 0.5, "lo": 0.0, "hi": 1.0, "rate": -0.5}
    >>> entropy_target(entropy_start(start=0.5), batch, target=2.0, **setting).settings
    {'advantage': {'positive': 0.25}}
    """
    axis, parameter = _check(path, start, lo, hi, rate, target)
    entropy = float(masked_mean(batch.column("entropy_NT"), batch.mask_NT, reduce))
    first = entropy if state["first_entropy"] is None else state["first_entropy"]
    error = (first if target is None else target) - entropy
    value = min(max(state["value"] + rate * error, lo), hi)
    return Control(
        settings={axis: {parameter: value}},
        state={"value": value, "first_entropy": first},
        metrics={"value": value, "entropy": entropy, "error": error},
    )


def _check(
    path: str, start: float, lo: float, hi: float, rate: float, target: float | None
) -> tuple[str, str]:
    axis, _, parameter = str(path).partition(".")
    if axis not in AXES or not parameter:
        raise ValueError(
            "entropy_target: path must be 'advantage.<parameter>' or 'credit.<parameter>' (a"
            f" controller reaches no other axis), got {path!r}."
        )
    check_number("entropy_target", lo=lo, rate=rate)
    check_number("entropy_target", or_none=True, target=target)
    check_number("entropy_target", least=lo, hi=hi)
    check_number("entropy_target", least=lo, most=hi, start=start)
    if rate == 0:
        raise ValueError(
            "entropy_target: rate 0 would never move the parameter; give a positive or negative"
            " number."
        )
    return axis, parameter
