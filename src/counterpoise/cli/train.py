"""``counterpoise train``"""

from __future__ import annotations

import json
from typing import Annotated

import typer


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
    json_: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, no progress bar.")
    ] = False,
) -> None:
    """Train a model by a recipe; everything that happened is in the run folder.

    Example: `counterpoise train recipes/demo.yaml --set method.name=dfpo_min --set num_batches=8
        --set run_dir=runs/dfpo`
    """
    from counterpoise.trainer.config import load_config

    recipe = load_config(config, set_)
    from counterpoise.trainer.loop import Result, train
    from counterpoise.trainer.progress import Progress

    if resume and fresh:
        raise ValueError("--resume continues a run and --fresh replaces it: choose one.")
    result: Result = train(recipe, resume=resume, fresh=fresh, progress=Progress(quiet=json_))
    if json_:
        print(json.dumps({**result._asdict(), "run_dir": str(result.run_dir)}))
        return
    print(summary(result, config))


def summary(result, config: str) -> str:
    """What a person wants to know at the end, and what to do next."""
    lines = []
    if result.first and result.last:
        first, last = (
            f"{100 * x.mean:.1f}% [{100 * x.low:.1f}, {100 * x.high:.1f}]"
            for x in (result.first, result.last)
        )
        lines.append(
            f"held-out accuracy: {first} before, {last} after {result.batch} batches (95% bootstrap"
            " intervals over prompts)"
        )
    if not result.is_finished:
        lines.append(
            f"stopped after batch {result.batch}; continue with: counterpoise train {config} --resume"
        )
    lines.append(f"run folder: {result.run_dir}")
    lines.append(f"next: counterpoise report {result.run_dir}, counterpoise view {result.run_dir}")
    return "\n".join(lines)
