"""``counterpoise arena``"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from counterpoise.cli.show import Json, print_json, print_table, say
from counterpoise.cli.sweep import spread

if TYPE_CHECKING:
    from counterpoise.arena.design import Arm, Design
    from counterpoise.arena.statistics import Summary

__all__ = ["SPREAD", "arena", "spread"]
SPREAD = ("--methods", "--rates")  # options that take several words: --rates 1e-4 3e-4
RUNS = ("design", "out", "members", "workers", "jobs", "json_")  # how a design runs, not which
SEED = 100  # the first of the seeds that judge; tuning seeds are below


def arena(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="A recipe, or the name of one; a small one by default.")
    ] = "arena",
    methods: Annotated[
        list[str] | None,
        typer.Option(help="Methods, '{name: dapo, plan: query_preserved}', or all: several words."),
    ] = None,
    arms: Annotated[
        Path | None,
        typer.Option(help="YAML: name of an arm -> keys of the recipe that it sets, and control."),
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="What the others are held against; the first by default.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds per method.")] = 4,
    rates: Annotated[
        list[float] | None,
        typer.Option(help="Learning rates to choose from: several words; the recipe's by default."),
    ] = None,
    tuning_seeds: Annotated[int, typer.Option(min=1, help="Seeds that choose a rate.")] = 3,
    evaluations: Annotated[int, typer.Option(min=1, help="Evaluations after the first.")] = 2,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 200,
    samples: Annotated[int, typer.Option(min=1, help="Samples per held-out prompt.")] = 4,
    margin: Annotated[float, typer.Option(help="A difference below it does not matter.")] = 0.01,
    members: Annotated[
        int | None,
        typer.Option(min=1, help="Trainings in one stack; 64 by default, on a CPU 1: none."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that make prompts and grade.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Stacks, or lone runs, at a time; 1, on a CPU one per core."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override a key of the recipe (repeatable).")
    ] = None,
    design: Annotated[
        Path | None, typer.Option(help="A design.json, or a folder with one, to run as it stands.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the results; runs/RECIPE-arena by default.")
    ] = None,
    json_: Json = False,
) -> None:
    """Train many seeds of several methods at once; say which is better, and whether that is shown.

    Learning rates are chosen on seeds of their own; one arm is there twice, to show what chance
    does; a method that changes nothing here gets no verdict. The same command goes on where it
    stopped. Results and a page are in the folder.

    Example: `counterpoise arena demo --methods grpo delta crf_ntf --seeds 16 --rates 1e-4 3e-4`
    """
    from counterpoise.arena.live import Live
    from counterpoise.arena.race import race
    from counterpoise.trainer.config import load_config, recipe_file

    if design is not None:
        folder, plan = out or Path("runs") / "arena", given(design, context)
    else:
        folder = out or Path("runs") / f"{recipe_file(recipe).stem}-arena"
        config = load_config(recipe, set_ or [])
        entries = arms_of(methods or ([] if arms else ["grpo", "ntf_whitened"]), arms)
        num = config.num_batches
        own = sorted(set(rates or [config.optimizer.lr]))
        plan = design_of(
            config.model_dump(mode="json", exclude_unset=True),
            entries,
            control or entries[0].name,
            own,
            (seeds, tuning_seeds if len(own) > 1 else 0),
            [round(num * at / evaluations) for at in range(evaluations + 1)],
            {"prompts": prompts, "samples": samples},
            margin,
        )
    begin(folder, plan)
    live = Live(quiet=json_)
    try:
        race(plan, folder, live, size=members, num_workers=workers, jobs=jobs)
    except KeyboardInterrupt:
        live.say(f"what there is: {conclude(folder)[0] or folder}")
        raise
    page, summary = conclude(folder)
    if json_:
        print_json({"page": page, "summary": folder / "summary.json"})
    else:
        show(summary, page)


def given(path: Path, context: typer.Context) -> Design:
    """The design of a file or folder; options that would make another one are an error."""
    from counterpoise.arena.design import FILE, read_design

    asked = [name for name in context.params if name not in RUNS and is_typed(context, name)]
    if asked:
        names = [f"--{name.strip('_').replace('_', '-')}" for name in asked if name != "recipe"]
        others = ", ".join(["a recipe"] * ("recipe" in asked) + names)
        raise ValueError(
            f"--design: {path} says what runs, and so would {others}. Leave one out, or change the"
            " file."
        )
    if path.is_dir() or path.name == FILE:
        return read_design(path if path.is_dir() else path.parent)
    raise ValueError(f"--design: expected a {FILE} or a folder with one, got {path}.")


def is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def arms_of(methods: list[str], file: Path | None) -> list[Arm]:
    """An arm per method, then those of a file."""
    from counterpoise.arena.design import Arm
    from counterpoise.probes.methods import methods_of
    from counterpoise.text import load_yaml

    known = methods_of(", ".join(methods)) if methods else {}
    out = [Arm(name, {"method": method.describe()}) for name, method in known.items()]
    if file is not None:
        value = load_yaml(file.read_bytes(), f"arms: {file}")
        out += [arm_of(name, entry, file) for name, entry in mapping(value, file).items()]
    return out


def arm_of(name: str, entry: object, file: Path) -> Arm:
    from counterpoise.arena.design import Arm

    settings = dict(mapping(entry, file, f" of {name!r}"))
    return Arm(str(name), settings, control=settings.pop("control", None))


def mapping(value: object, file: Path, of: str = "") -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"arms: {file}: expected a mapping{of}, for example"
            " 'whole: {method: {name: dapo, plan: query_preserved}}', got"
            f" {'an empty file' if value is None else type(value).__name__}."
        )
    return value


def design_of(
    recipe: Mapping[str, Any],
    arms: list[Arm],
    control: str,
    rates: list[float],
    num_seeds: tuple[int, int],
    evaluations: list[int],
    held_out: Mapping[str, int],
    margin: float,
) -> Design:
    """The design, with an A/A arm of the control."""
    from counterpoise.arena.design import Arm, Design

    again = Arm(f"{control} again", repeats=control)
    judging, tuning = num_seeds
    return Design(
        recipe={key: value for key, value in recipe.items() if key not in ("method", "seed")},
        arms=(*arms, again),
        control=control,
        rates=tuple(rates),
        equal_rate=rates[len(rates) // 2] if len(rates) > 1 else None,
        seeds=tuple(range(SEED, SEED + judging)),
        tuning_seeds=tuple(range(tuning)),
        margin=margin,
        evaluations=tuple(dict.fromkeys(evaluations)),
        eval=dict(held_out),
    )


def begin(folder: Path, design: Design) -> None:
    """A new folder, or one with the same design; where nothing has run yet, another one is fine."""
    from counterpoise.arena.design import FILE, read_design, write_design

    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names - {FILE}:
        if FILE not in names:
            raise ValueError(
                f"--out: {folder} is not empty and holds no arena. Choose another folder."
            )
        if read_design(folder) != design:
            raise ValueError(
                f"--out: {folder} holds an arena of another design ({folder / FILE}). Repeat that"
                " command to go on with it, or choose another folder with --out."
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_design(folder, design)


def conclude(folder: Path) -> tuple[Path | None, Summary]:
    """The page, None where nothing can draw it, and what the statistics say, on disk too."""
    if importlib.util.find_spec("plotly") is not None:
        from counterpoise.arena.page import write_page

        return write_page(folder)
    from counterpoise.arena.design import read_design
    from counterpoise.arena.results import read_activity, read_results
    from counterpoise.arena.statistics import summarise, write_summary

    summary = summarise(read_design(folder), read_results(folder), read_activity(folder))
    write_summary(folder, summary)
    return None, summary


def show(summary: Summary, page: Path | None) -> None:
    """The final table and where the page is."""
    from counterpoise.text import percent, points

    head = ["arm", "rate", "seeds", "sampled", "against its control", "verdict"]
    rows = []
    for row in summary.final.rows:
        sampled, difference = (part.get("sampled") for part in (row.metrics, row.differences))
        rows.append(
            [
                row.arm,
                "" if row.lr is None else f"{row.lr:g}",
                str(row.seeds),
                percent(sampled.mean) if sampled else "",
                points(*difference) if difference else "",
                row.verdict.words,
            ]
        )
    print_table(head, rows, left=["arm", "verdict"])
    say(*summary.warnings, file=sys.stderr)
    say(
        "no page, plotly is not installed: pip install 'counterpoise[report]', then this command"
        if page is None
        else f"page: {page}"
    )
