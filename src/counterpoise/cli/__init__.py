"""The command line: one file per command.

A file is named after its command; where Python has the word (``eval``, ``import``), the file and
its function end in an underscore. A mistake of the user is one line on stderr and exit code 2,
never a traceback.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from counterpoise.errors import nearest
from counterpoise.run.environment import quiet_torchao

# command -> (what it does, the extra of the package that it needs)
COMMANDS = {
    "init": ("Write a commented recipe and a task to change.", "cli"),
    "train": ("Train a model by a recipe.", "train"),
    "sweep": ("Train several methods over several seeds, then compare them.", "train"),
    "arena": ("Train many seeds at once; say which method is better.", "train"),
    "eval": ("Measure held-out accuracy; compare two models on the same prompts.", "train"),
    "methods": ("List the methods, or show one on its six axes.", "cli"),
    "report": ("Write an HTML page about one run or several.", "report"),
    "compare": ("Compare methods over seeds, with intervals.", "report"),
    "view": ("Look at the tokens of a run in a browser.", "report"),
    "probe": ("Run an experiment on a saved batch.", "train"),
    "replay": ("Put one saved batch through several methods.", "train"),
    "audit": ("Show which rollouts of a prompt share an update, under several plans.", "report"),
    "import": ("Turn token dumps of other trainers into a run folder.", "report"),
    "doctor": ("Check versions and hosts; say what is broken and the fix.", "cli"),
}


def main() -> None:
    """Entry point of ``counterpoise``."""
    # read when torch loads: its threads spin a little for each other and then sleep. Those that
    # only spin made a batch several times slower on a busy machine (docs/results/performance.md)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    quiet_torchao()
    try:
        dispatch(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough: counterpoise methods | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def dispatch(args: list[str]) -> None:
    """Answer --help and --version, or run the command that the first argument names."""
    if not args or args[0] in ("--help", "-h", "help"):
        print(overview())
    elif args[0] == "--version":
        from counterpoise import __version__

        print(__version__)
    elif args == ["methods"]:  # like --help, without the option parser: a tenth of the time
        from counterpoise.cli.method_list import method_list, summaries

        print(method_list(summaries()))
    elif args[0] in COMMANDS:
        run_command(args[0], args[1:])
    else:
        is_option = args[0].startswith("-")
        kind, options = ("option", ["--help", "--version"]) if is_option else ("command", [])
        fail(f"unknown {kind} {args[0]!r}. {nearest(args[0], [*COMMANDS, *options])}")


def overview() -> str:
    """What there is, one line per command."""
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "counterpoise: see and steer the credit of every token in critic-free RL.",
            "",
            "Usage: counterpoise COMMAND [OPTIONS]",
            "",
            *(f"  {name:<{width}}  {text}" for name, (text, _) in COMMANDS.items()),
            "",
            "counterpoise COMMAND --help explains its options and shows an example.",
        ]
    )


def run_command(command: str, args: list[str]) -> None:
    """Import the command's file, parse its options and run it."""
    name = f"{command}_" if command in ("eval", "import") else command
    try:
        import typer

        app = typer.Typer(
            add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
        )
        module = importlib.import_module(f"counterpoise.cli.{name}")
        app.command(name=command)(interruptible(getattr(module, name)))
        if hasattr(module, "SPREAD"):
            args = module.spread(args, module.SPREAD)
        # not standalone: the parser's own messages are boxes of many lines
        sys.exit(app(args=args, prog_name=f"counterpoise {command}", standalone_mode=False) or 0)
    except ModuleNotFoundError as error:
        fail(missing_package(command, error))
    except BrokenPipeError:
        raise
    except Exception as error:
        fail(told(command, args, error))


def told(command: str, args: list[str], error: Exception) -> str:
    """The line for a mistake; what is none goes on."""
    from counterpoise.cli.mistakes import is_mistake, mistake

    if is_mistake(error):
        return mistake(command, args, error)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if isinstance(error, (ValueError, FileNotFoundError)):
        return str(error)
    raise error


def interruptible(function: Callable[..., None]) -> Callable[..., None]:
    """Ctrl-C is a line and exit code 130; the option parser would call it an abort, exit code 1."""

    @functools.wraps(function)
    def run(*args: object, **options: object) -> None:
        try:
            function(*args, **options)
        except KeyboardInterrupt:
            print("counterpoise: interrupted", file=sys.stderr)
            sys.exit(130)

    return run


def missing_package(command: str, error: ModuleNotFoundError) -> str:
    """Which package is not there, and the extra that brings it."""
    package, extra = str(error.name).partition(".")[0], COMMANDS[command][1]
    if package == "counterpoise":
        raise error
    return (
        f"{command} needs the package {package!r}. Install it: pip install 'counterpoise[{extra}]'"
    )


def fail(message: str) -> NoReturn:
    """One line for a person, exit code 2; text from a file cannot steer the terminal."""
    from counterpoise.text import visible

    print(f"counterpoise: {visible(message)}", file=sys.stderr)
    sys.exit(2)
