"""Model text is hostile: what cannot be seen is made visible, so that no text steers a page, a chart or a terminal."""

from __future__ import annotations

import html
import math

PICTURES = 0x2400  # U+2400 + code is the picture of a C0 control character


def visible(text: object, keep: str = "") -> str:
    """Text in which every control, format, bidirectional and unusual space character shows as a symbol.

    Args:
        text: anything; ``None`` is the empty text.
        keep: characters to leave as they are, for example a newline.

    >>> visible("a\\x1b[31m\\u202eb")
    'a␛[31m⟨U+202E⟩b'
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


def shortened(text: object, length: int) -> str:
    """The first ``length`` characters, with an ellipsis where something was left out.

    >>> shortened("abcdef", 4)
    'abc…'
    """
    out = "" if text is None else str(text)
    return out if len(out) <= length else out[: length - 1] + "…"


def number(value: float | None, digits: int = 3) -> str:
    """A number for people: ``digits`` significant digits, thin in tables.

    >>> number(0.12345), number(1234567.0), number(None), number(-0.00001234), number(0.5)
    ('0.123', '1,234,567', '–', '-1.23e-05', '0.500')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.{digits - 1}e}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:.{max(0, digits - whole)}f}"


def with_interval(mean: float | None, low: float | None = None, high: float | None = None, digits: int = 3) -> str:
    """``0.512 [0.470, 0.551]``; the mean alone where there is no interval."""
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return number(mean, digits)
    return f"{number(mean, digits)} [{number(low, digits)}, {number(high, digits)}]"


def _symbol(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(PICTURES + code)
    return "␡" if code == 0x7F else f"⟨U+{code:04X}⟩"
