"""How a mistake is said: where, got, expected, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A recipe that cannot run; the message is one line a person can act on."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known name, then all of them.

    >>> nearest("top_entrpy", ["delta", "top_entropy"])
    "Did you mean 'top_entropy'? Known: delta, top_entropy."
    """
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known) or '(none)'}."
