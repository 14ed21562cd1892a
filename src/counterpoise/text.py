"""Text of others is hostile: what cannot be seen is made visible, so that no text steers a page, a
chart or a terminal; YAML is read within bounds.
"""

from __future__ import annotations

import functools
import html
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from counterpoise.errors import ConfigError

MAX_ALIASES = 20  # a bomb of 20 aliases grows to at most a few thousand times its size
MAX_DEPTH = 100


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


def load_yaml(text: str | bytes, where: str) -> Any:
    """YAML from anywhere; what is not YAML, says a key twice, or grows beyond all bounds when its
    aliases are followed, is an error of one line that opens with ``where``.

    >>> load_yaml("a: [1, 2]", "recipe")
    {'a': [1, 2]}
    >>> load_yaml("lr: 1e-4", "recipe")  # a number, as YAML 1.2 has it; to PyYAML it is a text
    {'lr': 0.0001}
    >>> load_yaml("a: &a [*a]", "recipe")
    Traceback (most recent call last):
    counterpoise.errors.ConfigError: recipe is not YAML: an alias stands inside what it names
    """
    import yaml

    try:
        whole = text if isinstance(text, str) else text.decode("utf-8")
        _check_events(yaml.parse(whole, Loader=yaml.SafeLoader))
        repeated = _repeated_key(yaml.compose(whole, Loader=yaml.SafeLoader))
        value = yaml.load(whole, Loader=_loader())
    except Exception as error:  # the parser raises many kinds: KeyError for !!bool, and so on
        reason = visible(" ".join(str(error).split()) or type(error).__name__)
        raise ConfigError(f"{where} is not YAML: {shorten(reason, 300)}") from None
    if repeated:
        raise ConfigError(f"{where}: {repeated}")
    return value


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader, which also reads a number without a point but with an exponent."""
    import yaml

    loader = type("Loader", (yaml.SafeLoader,), {})
    exponent = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+\Z")
    loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    return loader


def _repeated_key(root: Any) -> str | None:
    """The first key that a mapping has twice, in words; a merge (``<<``) may stand several times,
    and what it brings may be set anew.
    """
    from yaml.nodes import MappingNode, ScalarNode, SequenceNode

    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # an alias
            continue
        seen.add(id(node))
        if isinstance(node, SequenceNode):
            waiting += reversed(node.value)
        elif isinstance(node, MappingNode):
            lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                if not isinstance(key, ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                    continue
                name, line = (key.tag, key.value), key.start_mark.line + 1
                if name in lines:
                    both = f"lines {lines[name]} and {line}"
                    at = f"line {line}" if line == lines[name] else both
                    return f"{visible(key.value)!r} is set twice ({at}). Keep one of them."
                lines[name] = line
            waiting += [value for _, value in reversed(node.value)]
    return None


def _check_events(events: Iterable[Any]) -> None:
    """Few aliases, none of them inside what it names, and no deep nesting."""
    from yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    num_aliases, open_anchors = 0, []
    for event in events:
        if isinstance(event, CollectionStartEvent):
            open_anchors.append(event.anchor)
        elif isinstance(event, CollectionEndEvent):
            open_anchors.pop()
        elif isinstance(event, AliasEvent):
            num_aliases += 1
            if event.anchor in open_anchors:
                raise ValueError("an alias stands inside what it names")
        if num_aliases > MAX_ALIASES or len(open_anchors) > MAX_DEPTH:
            raise ValueError(
                f"more than {MAX_ALIASES} aliases or {MAX_DEPTH} levels; write it out plainly"
            )


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


def percent(mean: float | None, low: float | None = None, high: float | None = None) -> str:
    """A share and its interval as percentages, the same in the terminal and on the pages; an
    interval over few runs is cut where no share can be.

    >>> percent(0.4875, 0.4375, 0.535), percent(0.5), percent(math.nan), percent(0.1, -0.2, 0.4)
    ('48.8% [43.8, 53.5]', '50.0%', '–', '10.0% [0.0, 40.0]')
    """
    low = 0.0 if low is not None and low < 0 <= (mean or 0) else low
    high = 1.0 if high is not None and high > 1 >= (mean or 0) else high
    return _scaled(mean, low, high, "{:.1f}", "%")


def points(mean: float | None, low: float | None = None, high: float | None = None) -> str:
    """A difference of shares and its interval, in points of percent.

    >>> points(0.067, 0.026, 0.109), points(-0.002)
    ('+6.7 [+2.6, +10.9]', '-0.2')
    """
    return _scaled(mean, low, high, "{:+.1f}", "")


def with_range(mean: float, least: float, most: float) -> str:
    """A mean of a few counts with the least and the most of them, which is no interval.

    >>> with_range(12.5, 10.0, 15.0), with_range(1200.0, math.nan, math.nan)
    ('12.5 (10 to 15)', '1,200')
    """
    counts = [
        f"{x:,.{int(x < 100)}f}".removesuffix(".0") for x in (mean, least, most) if math.isfinite(x)
    ]
    return f"{counts[0]} ({counts[1]} to {counts[2]})" if len(counts) == 3 else (counts or ["–"])[0]


def counted(num: int, one: str, many: str) -> str:
    """A count with its noun.

    >>> counted(1, "batch", "batches"), counted(1200, "batch", "batches")
    ('1 batch', '1200 batches')
    """
    return f"{num} {one if num == 1 else many}"


def spans(numbers: Sequence[int]) -> str:
    """Rising whole numbers, those in a row as a span.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends))


def _scaled(mean: float | None, low: float | None, high: float | None, form: str, unit: str) -> str:
    if mean is None or not math.isfinite(mean):
        return "–"
    bounds = [100 * x for x in (low, high) if x is not None and math.isfinite(x)]
    interval = f" [{', '.join(map(form.format, bounds))}]" if len(bounds) == 2 else ""
    return f"{form.format(100 * mean)}{unit}{interval}"


def _symbol(char: str) -> str:
    return {"\n": "⏎", "\t": "⇥"}.get(char) or f"⟨U+{ord(char):04X}⟩"


def shared_length(first: str, second: str) -> int:
    """How many characters two texts have in common from their beginning.

    >>> shared_length("makes 14", "makes 15")
    7
    """
    pairs = enumerate(zip(first, second))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
