"""Model text is hostile: what cannot be seen is made visible, so that no text steers a page, a
chart or a terminal.
"""

from __future__ import annotations

import html
import math


def visible(text: object, keep: str = "") -> str:
    """Text in which every control, format, bidirectional and unusual space character shows as a
    symbol.

    Args:
        text: anything; ``None`` is the empty text.
        keep: characters to leave as they are, for example a newline.

    >>> visible("a\\x1b[31m\\u202eb")
    'a⟨U+001B⟩[31m⟨U+202E⟩b'
    """
    out = "" if text is None else str(text)
    if out.isprintable():
        return out
    return "".join(char if char.isprintable() or char in keep else _symbol(char) for char in out)


def chart_label(text: object) -> str:
    """Text for a chart: plotly reads markup in labels, so it is escaped.

    >>> chart_label("<b>x</b>")
    '&lt;b&gt;x&lt;/b&gt;'
    """
    return html.escape(visible(text), quote=False)


def shorten(text: object, length: int) -> str:
    """The first ``length`` characters, with an ellipsis where something was left out.

    >>> shorten("abcdef", 4)
    'abc…'
    """
    out = "" if text is None else str(text)
    return out if len(out) <= length else out[: length - 1] + "…"


def number(value: float | None, digits: int = 3, scale: float | None = None) -> str:
    """A number for people: ``digits`` significant digits of the number itself, or of ``scale``
    where several stand together.

    >>> number(0.12345), number(1234567.0), number(None), number(-0.00001234), number(0.5)
    ('0.123', '1,234,567', '–', '-1.23e-05', '0.500')
    >>> number(-0.0001, scale=0.7)
    '0.000'
    """
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value if scale is None else scale)
    if size < 1e-12:
        return "0"
    if size < 1e-3:
        return f"{value:.{digits - 1}e}"
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{round(value, places) + 0.0:,.{places}f}"  # + 0.0: no minus before a zero


def with_interval(
    mean: float | None,
    low: float | None = None,
    high: float | None = None,
    digits: int = 3,
    scale: float | None = None,
) -> str:
    """``0.512 [0.470, 0.551]``; the mean alone where there is no interval.

    ``scale`` as in ``number``.
    """
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number(mean, digits, scale)
    scale = max(abs(mean or 0.0), abs(low), abs(high)) if scale is None else scale
    return (
        f"{number(mean, digits, scale)} [{number(low, digits, scale)},"
        f" {number(high, digits, scale)}]"
    )


def _symbol(char: str) -> str:
    return {"\n": "⏎", "\t": "⇥"}.get(char) or f"⟨U+{ord(char):04X}⟩"
