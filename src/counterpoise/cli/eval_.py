"""``counterpoise eval``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def eval_(
    model: Annotated[
        str,
        typer.Argument(
            help=(
                "A run folder, a checkpoint, bundled, smollm2, a Hugging Face folder or hub id, a"
                " .gguf file."
            )
        ),
    ],
    against: Annotated[
        str | None, typer.Option(help="A second one, compared on the same prompts.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Recipe with task and limits; a run folder brings its own.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 200,
    samples: Annotated[int, typer.Option(min=1, help="k of avg@k and pass@k.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Which held-out prompts and random streams.")] = 0,
    json_: Annotated[
        bool, typer.Option("--json", help="For machines, with the reward of every sample.")
    ] = False,
) -> None:
    """Held-out accuracy (avg@k), unbiased pass@k and bootstrap intervals; with --against the paired
    difference.

    Example: `counterpoise eval runs/demo --against bundled --samples 8`
    """
    from counterpoise.trainer.evaluate import difference

    recipe = _recipe(model, against, config, set_)
    settings = {"prompts": prompts, "samples": samples, "temperature": temperature, "seed": seed}
    results = {
        name: _evaluated(name, recipe, settings)
        for name in [model, *([against] if against else [])]
    }
    paired = (
        difference(results[against].reward_PK, results[model].reward_PK, seed) if against else None
    )
    if json_:
        out: dict[str, Any] = {
            name: {**r._asdict(), "reward_PK": r.reward_PK.tolist(), "texts": None}
            for name, r in results.items()
        }
        print(json.dumps(out | ({"difference": paired._asdict()} if paired else {})))
        return
    for name, result in results.items():
        mean, low, high = (100 * x for x in result.accuracy)
        passed = "".join(f"  pass@{k} {100 * v:.1f}%" for k, v in result.pass_at.items() if k > 1)
        kind = "greedy" if temperature == 0 else f"avg@{samples}"
        print(
            f"{name}: {kind} {mean:.1f}% [{low:.1f}, {high:.1f}]{passed}  ({prompts} prompts,"
            f" {result.mean_length:.0f} tokens)"
        )
    if paired:
        mean, low, high = (100 * x for x in paired)
        verdict = "within noise" if low <= 0 <= high else "beyond noise"
        print(
            f"difference {model} - {against}: {mean:+.1f} points [{low:+.1f}, {high:+.1f}],"
            f" {verdict} (paired over prompts)"
        )


def _recipe(
    model: str, against: str | None, config: str | None, overrides: list[str] | None
) -> Any:
    from counterpoise.trainer.config import load_config, parse_config

    found = (
        [config]
        if config
        else [
            str(Path(name) / "config.yaml")
            for name in (model, against)
            if name and (Path(name) / "config.yaml").is_file()
        ]
    )
    if found:
        return load_config(found[0], overrides)
    if overrides:
        raise ValueError("--set needs --config or a run folder to override.")
    return parse_config({})


def _evaluated(name: str, recipe: Any, settings: dict[str, Any]) -> Any:
    from counterpoise.policy import load_model
    from counterpoise.run.checkpoint import checkpoints
    from counterpoise.tasks import task
    from counterpoise.trainer.evaluate import evaluate
    from counterpoise.trainer.loop import device_of

    if (Path(name) / "manifest.json").is_file():
        found = checkpoints(Path(name))
        if not found:
            raise ValueError(f"{name}: the run has no checkpoint yet.")
        name = str(found[-1])
    policy = load_model(name, device=device_of(recipe))
    return evaluate(policy, task(**recipe.task), recipe, **settings)
