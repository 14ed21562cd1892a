"""Checks of the parameters of credit rules."""

from __future__ import annotations

from counterpoise.stage import Stage


def check_number(
    stage: str, key: str, value: float, low: float, high: float, *, open_low: bool = False
) -> None:
    """``value`` must be a number in [low, high], or in (low, high] with ``open_low``.

    >>> check_number("top_entropy", "fraction", 3, 0, 1, open_low=True)
    Traceback (most recent call last):
    ValueError: top_entropy: fraction must be in (0, 1], got 3
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (open_low and value == low):
        raise ValueError(
            f"{stage}: {key} must be in {'(' if open_low else '['}{low}, {high}], got {value!r}"
        )


def check_choice(stage: str, key: str, value: object, choices: tuple[str, ...]) -> None:
    """``value`` must be one of the names.

    >>> check_choice("conflict", "runs", "left", ("start", "end", "both"))
    Traceback (most recent call last):
    ValueError: conflict: runs must be one of start, end, both, got 'left'
    """
    if value not in choices:
        raise ValueError(f"{stage}: {key} must be one of {', '.join(choices)}, got {value!r}")


def check_rule(stage: str, rule: object) -> None:
    """``rule`` must be a bound credit rule without memory."""
    if isinstance(rule, Stage) and rule.init:
        raise ValueError(
            f"{stage}: a rule with memory cannot be nested; put it on the credit axis by itself."
        )
    if not callable(rule):
        raise ValueError(
            f"{stage}: rule must be a credit rule such as top_entropy(fraction=0.2), got {rule!r}"
        )
