"""The command line: one file a sub-command.

A mistake of the user is one line on stderr and exit code 2, never a traceback.
"""

from __future__ import annotations

import importlib
import sys

from counterpoise.errors import nearest

# sub-command -> what it does; cli/<name>.py holds a function of that name (with a trailing
# underscore where Python has the word) and is imported only when it is asked for
COMMANDS = {
    "train": "Train a model by a recipe.",
    "eval": "Held-out accuracy of a model or a run; paired comparison of two.",
    "methods": "List the methods, or show one on its six axes.",
    "report": "One HTML page of a run or of several.",
    "compare": "Runs side by side: intervals, paired bootstrap, batches to a threshold.",
    "view": "The token viewer in a browser.",
    "probe": "An experiment on a snapshot of a run.",
    "replay": "One saved batch under several methods.",
    "audit": "What of each prompt meets in one update, under several plans.",
    "import": "Token dumps of other trainers into a run folder.",
    "doctor": "Versions, hosts, what got registered, what is broken and the fix.",
}


def main() -> None:
    """Entry point of ``counterpoise``."""
    import typer

    args = sys.argv[1:]
    if not args or args[0] in ("--help", "-h"):
        print(overview())
        sys.exit(0)
    if args[0] == "--version":
        from counterpoise import __version__

        print(__version__)
        sys.exit(0)
    if args[0] not in COMMANDS:
        fail(f"unknown command {args[0]!r}. {nearest(args[0], COMMANDS)}")
    app = typer.Typer(
        add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False
    )
    name = f"{args[0]}_" if args[0] in ("eval", "import") else args[0]
    app.command(name=args[0])(getattr(importlib.import_module(f"counterpoise.cli.{name}"), name))
    try:
        app(args=args[1:], prog_name=f"counterpoise {args[0]}")
    except (ValueError, FileNotFoundError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")


def overview() -> str:
    """What there is, one line a command."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            (
                "counterpoise: see and steer the credit that every token gets in critic-free RL of"
                " language models."
            ),
            "",
            (
                "Usage: counterpoise COMMAND [OPTIONS]      counterpoise COMMAND --help shows an"
                " example"
            ),
            "",
            *lines,
        ]
    )


def fail(message: str) -> None:
    """One line for a person, exit code 2; what came out of a file cannot steer the terminal."""
    from counterpoise.text import visible

    print(f"counterpoise: {visible(message, keep=chr(10))}", file=sys.stderr)
    sys.exit(2)
