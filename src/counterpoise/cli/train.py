"""``counterpoise train``"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoise.cli.show import Json, print_json

if TYPE_CHECKING:
    from counterpoise.trainer.loop import Result


def train(
    config: Annotated[str, typer.Argument(help="A recipe, for example recipes/demo.yaml.")],
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

    Example: `counterpoise train recipes/demo.yaml --set method.name=dapo --set run_dir=runs/dapo`
    """
    from counterpoise.trainer.config import load_config

    if resume and fresh:
        raise ValueError("--resume continues a run and --fresh replaces it: choose one.")
    recipe = load_config(config, set_)  # before the slow imports: a wrong recipe is said at once
    from counterpoise.trainer import loop
    from counterpoise.trainer.progress import Progress

    result = loop.train(recipe, resume=resume, fresh=fresh, progress=Progress(quiet=json_))
    if json_:
        print_json(result._asdict())
    else:
        print(summary(result, config))


def summary(result: Result, config: str) -> str:
    """What a person wants to know at the end, and what to do next."""
    lines = []
    if result.first and result.last:
        first, last = (
            f"{100 * x.mean:.1f}% [{100 * x.low:.1f}, {100 * x.high:.1f}]"
            for x in (result.first, result.last)
        )
        lines.append(
            f"held-out accuracy: {first} before, {last} after {result.batch_number} batches"
            " (95% bootstrap intervals over prompts)"
        )
    if not result.is_finished:
        lines.append(
            f"stopped after batch {result.batch_number}; continue with:"
            f" counterpoise train {config} --resume"
        )
    lines.append(f"run folder: {result.run_dir}")
    lines.append(f"next: counterpoise report {result.run_dir}, counterpoise view {result.run_dir}")
    if importlib.util.find_spec("plotly") is None:
        lines.append("report and view need more packages: pip install 'counterpoise[report]'")
    return "\n".join(lines)
