"""A mistake in the options of a command, as one line: where, got, expected, the nearest option."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeGuard

from counterpoise.errors import nearest

# what the option parser says -> what was expected
EXPECTED = {
    "valid integer": "a whole number",
    "valid number": "a number",
    "valid float": "a number",
    "valid int": "a whole number",
}


def is_mistake(error: object) -> TypeGuard[Any]:
    """Whether the option parser raised it: typer has the classes of click, or its own copy."""
    return hasattr(error, "format_message") and hasattr(error, "exit_code")


def mistake(command: str, args: Sequence[str], error: Any) -> str:
    """The line for what the option parser refused.

    Args:
        args: the words after the command.
    """
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "NoSuchOption" in kinds:
        said = f"unknown option {_word(args, error.option_name)!r}."
        said += f" {nearest(_word(args, error.option_name), _options(error))}"
    elif "MissingParameter" in kinds:
        said = f"{_name(error.param)} is missing.{_help(error.param)}"
    elif "BadParameter" in kinds and error.param is not None:
        said = f"{_name(error.param)}: {_expected(error.message)}{_got(args, error.param)}."
    else:
        said = f"{error.format_message().rstrip('.')}."
    return f"{command}: {' '.join(said.split())} See: counterpoise {command} --help"


def _word(args: Sequence[str], name: str) -> str:
    """The option as it was written: of ``-batch`` the parser tells ``-b``."""
    is_short = len(name) == 2 and name not in args
    return next((word for word in args if is_short and word.startswith(name)), name)


def _options(error: Any) -> list[str]:
    params = error.ctx.command.params if error.ctx else []
    return ["--help", *(name for one in params if _is_option(one) for name in _names(one))]


def _names(param: Any) -> list[str]:
    return [name for name in (*param.opts, *param.secondary_opts) if name.startswith("--")]


def _is_option(param: Any) -> bool:
    return any(name.startswith("-") for name in param.opts)


def _name(param: Any) -> str:
    return _names(param)[0] if _is_option(param) else str(param.name).upper().rstrip("_")


def _help(param: Any) -> str:
    text = getattr(param, "help", None)
    return f" Expected: {text}" if text else ""


def _expected(message: str) -> str:
    known = next((words for part, words in EXPECTED.items() if part in message), "")
    if known:
        return f"expected {known}"
    return message.replace("Input should be", "must be").rstrip(".")


def _got(args: Sequence[str], param: Any) -> str:
    """The value that was given, where it can be told."""
    names = _names(param) if _is_option(param) else []
    after = [value for name, value in itertools.pairwise(args) if name in names]
    inline = [w.partition("=")[2] for w in args if "=" in w and w.partition("=")[0] in names]
    return f", got {(after + inline)[0]!r}" if after + inline else ""
