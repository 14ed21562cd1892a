"""``counterpoise train``"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoise.cli.show import Json, command_line, import_from, print_json, say

if TYPE_CHECKING:
    from counterpoise.trainer.loop import Result


def train(
    config: Annotated[
        str,
        typer.Argument(
            help="A recipe of your own, or the name of one that comes with the package: demo."
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a key: --set optimizer.lr=1e-5 (repeatable)."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in run_dir from its last checkpoint.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Replace a run that is in run_dir.")
    ] = False,
    json_: Json = False,
) -> None:
    """Train a model by a recipe; everything that happened is in the run folder.

    Ctrl-C ends the run after its batch, with a checkpoint and exit code 130; a second one at once.

    Example: `counterpoise train recipes/demo.yaml --set method.name=dapo --set run_dir=runs/dapo`
    """
    from counterpoise.catalogue.registry import method as make_method
    from counterpoise.models import find_model
    from counterpoise.run.own import check_free
    from counterpoise.trainer.config import load_config, recipe_file

    if resume and fresh:
        raise ValueError("--resume continues a run and --fresh replaces it: choose one.")
    import_from(recipe_file(config).parent)
    recipe = load_config(config, set_)
    # before the slow imports: a folder that is taken, and a model or method that is not there, are
    # said at once
    check_free(Path(recipe.run_dir), fresh=fresh, resume=resume)
    find_model(recipe.model)
    make_method(**recipe.method)
    from counterpoise.trainer import loop
    from counterpoise.trainer.interrupt import INTERRUPTED
    from counterpoise.trainer.progress import Progress

    result = loop.train(recipe, resume=resume, fresh=fresh, progress=Progress(quiet=json_))
    if json_:
        print_json(result._asdict())
    else:
        say(*summary(result, ["train", config, *_repeated(set_)]).splitlines())
    if not result.is_finished:
        sys.exit(INTERRUPTED)


def summary(result: Result, command: list[str]) -> str:
    """What a person wants to know at the end, and what to do next.

    Args:
        command: what the run was started with, without --fresh and --resume.
    """
    from counterpoise.text import counted, percent, points

    batches, lines = counted(result.batch_number, "batch", "batches"), []
    if result.num_trained == 0 and result.is_finished:
        lines.append(f"nothing was left to do: the run has its {batches} already")
    if result.first and result.last:
        first, last = (percent(*accuracy) for accuracy in (result.first, result.last))
        lines.append(
            f"held-out accuracy: {first} before, {last} after {batches}"
            " (95% bootstrap intervals over prompts)"
        )
    if result.gain:
        lines.append(f"on the same prompts: {points(*result.gain)} points")
    if not result.is_finished:
        lines.append(
            f"stopped after {batches}; continue with:"
            f" {command_line(*command, '--resume' if result.batch_number else '--fresh')}"
        )
    lines.append(f"run folder: {result.run_dir}")
    if importlib.util.find_spec("plotly") is None:
        lines.append("report and view need more packages: pip install 'counterpoise[report]'")
    lines += [f"next: {command_line(name, result.run_dir)}" for name in ("report", "view")]
    return "\n".join(lines)


def _repeated(settings: list[str] | None) -> list[str]:
    return [word for setting in settings or [] for word in ("--set", setting)]
