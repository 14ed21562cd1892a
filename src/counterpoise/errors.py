"""How a mistake is said: where, got, expected, what to do."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, TypeGuard

_NAME = r"[^\W\d]\w*"
_IMPORT_PATH = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")


class MethodWarning(UserWarning):
    """A method that runs and cannot do what it is for."""


class ConfigError(ValueError):
    """A recipe that cannot run; the message is one line a person can act on."""


class OwnCodeError(ValueError):
    """Code of the user's own raised: a rule, a task. The message has the place."""


def said(error: Exception, place: str = "") -> str:
    """What was raised and, if code of the user's own had a part in it, where: ``KeyError: 'a'
    (my_task.py:12)``.
    """
    place = place or own_place(error)
    return f"{type(error).__name__}: {str(error)[:200]}{f' ({place})' if place else ''}"


def own_place(error: Exception) -> str:
    """``file:line`` of the innermost frame that is neither ours nor the standard library's, before
    those of installed packages; empty if there is none.
    """
    library = sysconfig.get_path("stdlib")
    outside = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_our_file(frame.filename)
        and ("-packages" in frame.filename or not frame.filename.startswith(library + os.sep))
    ]
    own = [frame for frame in outside if "-packages" not in frame.filename] or outside
    if not own:
        return ""
    file, folder = os.path.abspath(own[-1].filename), os.getcwd() + os.sep
    return f"{file.removeprefix(folder)}:{own[-1].lineno}"


def is_ours(function: Callable[..., Any]) -> bool:
    """Whether a function comes with the package."""
    return str(function.__module__).startswith("counterpoise.")


def is_our_file(file: str) -> bool:
    """Whether code lies in this package, or in no file at all."""
    return file.startswith((os.path.dirname(os.path.abspath(__file__)) + os.sep, "<"))


@contextmanager
def own_code(name: str, function: Callable[..., Any] | None = None) -> Iterator[None]:
    """An error of the user's own code becomes one line with its name and place; others pass, and so
    does a lack of memory, for which some callers have an answer.

    ``function`` is what is called: where it does not take the arguments that it gets, nothing of it
    has run, and the place is that of its definition.
    """
    try:
        yield
    except Exception as error:
        no_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        place = own_place(error)
        if function is not None and isinstance(error, TypeError):
            place = place or _definition(function)
        if no_memory or isinstance(error, OwnCodeError) or not place:
            raise
        raise OwnCodeError(f"{name} raised {said(error, place)}.") from error


def nearest(name: str, known: Iterable[str]) -> str:
    """The tail of an error message: the nearest known name, then all of them.

    >>> nearest("top_entrpy", ["delta", "top_entropy"])
    "Did you mean 'top_entropy'? Known: delta, top_entropy."
    """
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known) or '(none)'}."


def is_import_path(text: object) -> bool:
    """Whether a value of a recipe names code, ``your.module:name``; ``import_path`` imports nothing
    else.

    >>> is_import_path("os:system"), is_import_path("gym"), is_import_path("Answer: {question}")
    (True, False, False)
    """
    return isinstance(text, str) and _IMPORT_PATH.fullmatch(text) is not None


def import_path(path: str, where: str) -> Any:
    """What ``your.module:name`` names; ``where`` opens the message if there is no such thing.

    >>> import_path("math:pii", "reward")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: reward 'math:pii': module 'math' has no 'pii'. Did you mean 'pi'? Known: ...
    """
    module, _, name = path.partition(":")
    if not is_import_path(path):
        raise ValueError(f"{where}: expected an import path like your.module:name, got {path!r}.")
    try:
        home = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f"{where} {path!r}: cannot import {module!r} ({error}). Is it installed,"
            " in the folder of the recipe, in this one or on PYTHONPATH?"
        ) from error
    if not hasattr(home, name):
        public = [key for key in vars(home) if not key.startswith("_")]
        raise ValueError(
            f"{where} {path!r}: module {module!r} has no {name!r}. {nearest(name, public)}"
        )
    return getattr(home, name)


def no_file(task: str, path: str, setting: str) -> str:
    """The message for a file of a task that is not there: what was tried, and from where."""
    looked = os.path.join(os.getcwd(), path)
    return (
        f"{task}: no such file: {path} (looked for {looked}). Give it as {setting}; a relative path"
        " starts from the folder that you are in, not from that of the recipe."
    )


def check_number(
    stage: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
    or_infinite: bool = False,
    or_none: bool = False,
    **values: object,
) -> None:
    """Raise unless every value is a number > ``above``, >= ``least``, < ``below``, <= ``most``.

    >>> check_number("top_entropy", above=0, most=1, fraction=3)
    Traceback (most recent call last):
    ValueError: top_entropy: fraction must be a number > 0 and <= 1, got 3.
    """
    for name, value in values.items():
        if (or_none and value is None) or (or_infinite and value == math.inf):
            continue
        if not _is_number(value) or not (above < value < below and least <= value <= most):
            expected = _expected("number", above, least, below, most)
            _refuse(stage, name, value, expected + " or None" * or_none)


def check_whole(stage: str, *, least: int, or_none: bool = False, **values: object) -> None:
    """Raise unless every value is a whole number >= ``least``.

    >>> check_whole("edits", least=1, or_none=True, first_edits=0)
    Traceback (most recent call last):
    ValueError: edits: first_edits must be a whole number >= 1 or None, got 0.
    """
    for name, value in values.items():
        if or_none and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            expected = _expected("whole number", least=least)
            _refuse(stage, name, value, expected + " or None" * or_none)


def check_choice(stage: str, choices: Collection[str], **values: object) -> None:
    """Raise unless every value is one of the names.

    >>> check_choice("conflict", ("start", "end", "both"), runs="strat")
    Traceback (most recent call last):
    ValueError: conflict: runs must be one of start, end, both, got 'strat'. Did you mean 'start'?
    """
    for name, value in values.items():
        if not isinstance(value, str) or value not in choices:
            close = difflib.get_close_matches(str(value), choices, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            _refuse(stage, name, value, f"one of {', '.join(choices)}", hint)


def check_text(stage: str, *, or_none: bool = False, **values: object) -> None:
    """Raise unless every value is a text.

    >>> check_text("jsonl", path=3)
    Traceback (most recent call last):
    ValueError: jsonl: path must be a text, got 3.
    """
    for name, value in values.items():
        if not isinstance(value, str) and not (or_none and value is None):
            _refuse(stage, name, value, "a text" + " or None" * or_none)


def check_keys(where: str, mapping: Mapping[Any, object]) -> None:
    """Raise unless every key is a text: YAML also knows numbers and nothing as keys.

    >>> check_keys("method", {"name": "grpo", 3: 4})
    Traceback (most recent call last):
    ValueError: method: a key must be a text, got 3.
    """
    for key in mapping:
        if not isinstance(key, str):
            _refuse(where, "a key", key, "a text")


def _definition(function: Callable[..., Any]) -> str:
    """``file:line`` of a function that is not ours; empty for ours and for what has no code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or is_our_file(code.co_filename):
        return ""
    file, folder = os.path.abspath(code.co_filename), os.getcwd() + os.sep
    return f"{file.removeprefix(folder)}:{code.co_firstlineno}"


def _expected(
    noun: str,
    above: float = -math.inf,
    least: float = -math.inf,
    below: float = math.inf,
    most: float = math.inf,
) -> str:
    limits = (">", above), (">=", least), ("<", below), ("<=", most)
    bounds = [f"{sign} {limit:g}" for sign, limit in limits if math.isfinite(limit)]
    return f"a {noun} {' and '.join(bounds)}" if bounds else f"a finite {noun}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refuse(stage: str, name: str, value: object, expected: str, hint: str = "") -> NoReturn:
    raise ValueError(f"{stage}: {name} must be {expected}, got {value!r}.{hint}")
