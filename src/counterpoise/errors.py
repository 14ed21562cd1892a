"""How a mistake is said: where, got, expected, what to do."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


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


def import_path(path: str, where: str) -> Any:
    """What ``your.module:name`` names; ``where`` opens the message if there is no such thing.

    >>> import_path("math:pii", "reward")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: reward 'math:pii': module 'math' has no 'pii'. Did you mean 'pi'? Known: ...
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ValueError(f"{where}: expected an import path like your.module:name, got {path!r}.")
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{where} {path!r}: cannot import {module!r} ({error}). Is it installed or on"
            " PYTHONPATH?"
        ) from error
    if not hasattr(home, name):
        public = [key for key in vars(home) if not key.startswith("_")]
        raise ValueError(
            f"{where} {path!r}: module {module!r} has no {name!r}. {nearest(name, public)}"
        )
    return getattr(home, name)
