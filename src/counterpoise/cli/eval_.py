"""``counterpoise eval``"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict

import typer

from counterpoise.cli.show import Json, Trust, import_from, print_json, say, waiting
from counterpoise.models import find_model
from counterpoise.run.find import check_run

if TYPE_CHECKING:
    from counterpoise.trainer.config import Config
    from counterpoise.trainer.evaluate import Evaluation


class Settings(TypedDict):
    """What the command line says about the evaluation."""

    prompts: int
    samples: int
    temperature: float
    seed: int


def eval_(
    model: Annotated[
        str,
        typer.Argument(
            help="A run folder, a checkpoint, bundled, smollm2, a Hugging Face folder or hub id, a"
            " .gguf file."
        ),
    ],
    against: Annotated[
        str | None, typer.Option(help="A second model, compared on the same prompts.")
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="Recipe with task and limits; a run folder brings its own.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Number of held-out prompts.")] = 200,
    samples: Annotated[int, typer.Option(min=1, help="k of avg@k and pass@k.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Chooses the prompts and the random streams.")] = 0,
    trust: Trust = False,
    json_: Json = False,
) -> None:
    """Measure held-out accuracy: avg@k, unbiased pass@k, bootstrap intervals.

    With --against also the paired difference. --json holds the reward of every sample.

    Example: `counterpoise eval runs/demo --against bundled --samples 8`
    """
    for name in (model, against):
        _check_place(name or "bundled")
    if trust:
        import_from()
    from counterpoise.trainer.evaluate import difference

    recipe = _recipe(model, against, config, set_, trust)
    settings = Settings(prompts=prompts, samples=samples, temperature=temperature, seed=seed)
    results = {}
    for name in (model, against) if against else (model,):
        with waiting(f"evaluating {name}"):
            results[name] = _evaluate(name, recipe, settings)
    paired = (
        difference(results[against].is_right_PK, results[model].is_right_PK, seed)
        if against
        else None
    )
    if json_:
        out: dict[str, object] = {name: _as_json(result) for name, result in results.items()}
        print_json(out | ({"difference": paired._asdict()} if paired else {}))
        return
    for name, result in results.items():
        say(_line(name, result, settings))
        for warning in _warnings(result):
            say(f"warning: {name}: {warning}")
    if paired:
        mean, low, high = (100 * x for x in paired)
        verdict = "within noise" if low <= 0 <= high else "beyond noise"
        say(
            f"difference {model} - {against}: {mean:+.1f} points [{low:+.1f}, {high:+.1f}],"
            f" {verdict} (paired over prompts)"
        )


def _check_place(name: str) -> None:
    """A folder that is not there is said before anything slow; ``a/b`` is a hub id, unless there is
    a folder ``a`` here.
    """
    path = Path(name).expanduser()
    if not path.exists():
        is_path = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
        if is_path or ("/" in name and (path.parent.is_dir() or path.parts[0] == "runs")):
            check_run(path)
        find_model(name)
    _check_host(path)


def _check_host(run_dir: Path) -> None:
    """A training inside TRL has no task of ours, and its models are TRL's."""
    from counterpoise.run.read import read_mapping

    if read_mapping(run_dir / "manifest.json").get("host") != "trl":
        return
    saved = [path for path in run_dir.parent.glob("checkpoint-*") if path.name[11:].isdigit()]
    newest = max(saved, key=lambda path: int(path.name[11:]), default="CHECKPOINT")
    raise ValueError(
        f"{run_dir} is the account of a training inside trl, which has no task to evaluate on."
        f" Evaluate a checkpoint on the task of a recipe: counterpoise eval {newest} --config"
        " RECIPE"
    )


def _as_json(result: Evaluation) -> dict[str, object]:
    return {
        **result._asdict(),
        "reward_PK": result.reward_PK.tolist(),
        "is_right_PK": result.is_right_PK.tolist(),
        "texts": None,
        "samples": None,
    }


def _warnings(result: Evaluation) -> list[str]:
    from counterpoise.trainer.warn import grader_warning

    num = result.reward_PK.size
    return grader_warning(result.grader_messages, result.num_grader_failures, num)


def _line(name: str, result: Evaluation, settings: Settings) -> str:
    mean, low, high = (100 * x for x in result.accuracy)
    passed = "".join(f"  pass@{k} {100 * v:.1f}%" for k, v in result.pass_at.items() if k > 1)
    kind = "greedy" if settings["temperature"] == 0 else f"avg@{settings['samples']}"
    is_graded = bool((result.reward_PK != result.is_right_PK).any())
    reward = f"  reward {result.mean_reward:.3f}" if is_graded else ""
    return (
        f"{name}: {kind} {mean:.1f}% [{low:.1f}, {high:.1f}]{passed}{reward}"
        f"  ({settings['prompts']} prompts, {result.mean_length:.0f} tokens)"
    )


def _recipe(
    model: str, against: str | None, config: str | None, overrides: list[str] | None, trust: bool
) -> Config:
    from counterpoise.trainer.config import load_config, parse_config

    beside = [Path(name) / "config.yaml" for name in (model, against) if name]
    if config:
        return load_config(config, overrides)
    files = [file for file in beside if file.is_file()]
    if files:
        return load_config(files[0], overrides, trust=trust)
    if overrides:
        raise ValueError("--set needs --config or a run folder to override.")
    return parse_config({})


def _evaluate(name: str, recipe: Config, settings: Settings) -> Evaluation:
    from counterpoise.policy import load_model
    from counterpoise.run.read import checkpoints
    from counterpoise.tasks import task
    from counterpoise.trainer.evaluate import evaluate
    from counterpoise.trainer.loop import device_of

    if (Path(name) / "manifest.json").is_file():
        saved = checkpoints(Path(name))
        if not saved:
            raise ValueError(f"{name}: the run has no checkpoint yet.")
        name = str(saved[-1])
    policy = load_model(name, device=device_of(recipe))
    return evaluate(policy, task(**recipe.task), recipe, **settings)
