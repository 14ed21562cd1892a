"""What may be said of an arm against its control, in words that claim no more than was shown."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from counterpoise.maths.intervals import NONE, Interval

if TYPE_CHECKING:
    from counterpoise.arena.statistics import Row

INACTIVE_ABOVE = 0.99  # mean cosine of an arm's update with its control's
SIGNIFICANT = 0.05


class Verdict(NamedTuple):
    """``kind`` is control, repeat, inactive, none (no verdict), better, worse, equal or undecided;
    ``words`` say it to people.
    """

    kind: str
    words: str


def obstacle(
    control: str | None, repeats: str | None, cosine: float | None, seeds: tuple[int, int]
) -> Verdict | None:
    """Why an arm gets no verdict; None if it gets one.

    Args:
        seeds: of the arm and of its control, those that finished.
    """
    if control is None:
        return Verdict("control", "control")
    if repeats is not None:
        return Verdict("repeat", f"{repeats} at other seeds (A/A)")
    if cosine is not None and cosine > INACTIVE_ABOVE:
        return Verdict("inactive", f"inactive here (cosine {_cosine(cosine)})")
    if min(seeds) < 2:
        side, num = ("it", seeds[0]) if seeds[0] < 2 else (control, seeds[1])
        many = ("no", "one")[num]
        return Verdict("none", f"no verdict: {side} has {many} finished run, two are needed")
    return None


def verdict(row: Row) -> Verdict:
    """Better or worse by Welch's test after Holm; else equal, if two one-sided tests put the
    difference inside the margin; else not decided.
    """
    difference = row.differences["sampled"]
    is_small = row.equivalence_p["sampled"] < SIGNIFICANT
    if row.p_holm is not None and row.p_holm < SIGNIFICANT:
        kind = "better" if difference.mean > 0 else "worse"
        by = ", by less than the margin" if is_small else ""
        return Verdict(kind, f"{_with_greedy(row, kind)}{by}{_among(row)}")
    if is_small:
        return Verdict("equal", f"equal within the margin{_among(row)}")
    after = " after Holm" if side(difference) else ""
    words = f"not decided{after} (detectable: {100 * row.detectable:.1f} points)"
    return Verdict("undecided", words + _among(row))


def _with_greedy(row: Row, kind: str) -> str:
    """Sampling may gain by sharpening alone: what greedy decoding shows is said beside it."""
    greedy = row.differences.get("greedy", NONE)
    ours, other = (1, "worse") if kind == "better" else (-1, "better")
    if not math.isfinite(greedy.low):
        return f"{kind} sampled, greedy not measured"
    if side(greedy) == ours:
        return f"{kind}, sampled and greedy"
    if side(greedy) == -ours:
        return f"{kind} sampled, {other} greedy"
    if row.equivalence_p.get("greedy", 1.0) < SIGNIFICANT:
        return f"{kind} sampled, not greedy (equal within the margin)"
    return f"{kind} sampled, not shown greedy"


def side(interval: Interval) -> int:
    """1 above 0, -1 below, 0 if the interval holds 0 or is not known."""
    return int(interval.low > 0) - int(interval.high < 0)


def _among(row: Row) -> str:
    """Runs that stopped are not in the mean: that is part of the verdict."""
    num = sum(row.stopped.values())
    return f"; over the {row.seeds} of {row.planned} runs that did not stop" if num else ""


def _cosine(value: float) -> str:
    """Enough digits to stay below 1.

    >>> _cosine(0.99312), _cosine(0.99996), _cosine(1.0)
    ('.993', '.99996', '1')
    """
    text = next((t for k in range(3, 9) if float(t := f"{value:.{k}f}") < 1), "1")
    return text.removeprefix("0")
