"""``counterpoise probe``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from counterpoise.cli.show import Json, Trust, counting, import_from, print_json, print_table, say
from counterpoise.run.find import check_run
from counterpoise.run.read import check_batch


def probe(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    name: Annotated[
        str,
        typer.Option(
            "--probe",
            help="flips, coupling, counterfactual, value, exchangeability, tax,"
            " progress, drift, localisation, token_value, turns or gradient.",
        ),
    ],
    batch: Annotated[
        int | None,
        typer.Option(min=0, help="The batch; the last one that can be probed by default."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the probe: --set pairs=100 (repeatable)."),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(
            help="For probes that compare methods: all, or 'dapo, {name: dapo, plan: ...}'."
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin again instead of continuing.")
    ] = False,
    pool: Annotated[
        bool,
        typer.Option(
            "--pool", help="Run nothing; pool the numbers of all batches that were probed."
        ),
    ] = False,
    trust: Trust = False,
    json_: Json = False,
) -> None:
    """Run an experiment on a saved batch of a run.

    Raw data, a figure and a summary go to RUN/probes; the run stays as it was.

    Example: `counterpoise probe runs/demo --batch 20 --probe counterfactual`
    """
    check_run(run)
    check_batch(run, batch)
    if trust:
        import_from()
    from counterpoise import probes

    settings = settings_of(set_ or []) | ({"methods": methods} if methods else {})
    with counting(f"probing: {name}") as report:
        summary = (
            probes.pool(run, name)
            if pool
            else probes.run_probe(
                run, name, batch, settings, fresh=fresh, trust=trust, report=report
            )
        )
    if json_:
        print_json(summary)
        return
    rest = f", {summary['num_prompts']} prompts" if "num_prompts" in summary else ""
    say(f"{name} of {run}, batch {summary.get('batch', summary.get('batches'))}{rest}")
    sheet = probes.PROBES[name].sheet(summary["numbers"])
    say(*(sheet.notes if sheet else lines_of(summary["numbers"])))
    if sheet:
        print_table(sheet.head, sheet.rows, left=sheet.head[:1])
    say(
        f"raw data and figure: {summary['folder']}"
        if "no_figure" not in summary
        else f"raw data: {summary['folder']} (no figure: {summary['no_figure']})"
    )


def settings_of(texts: list[str]) -> dict[str, Any]:
    """``["pairs=100"]`` -> ``{"pairs": 100}``."""
    from counterpoise.text import load_yaml

    out = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {text!r}: expected name=value, for example --set pairs=100.")
        out[key] = load_yaml(value, f"--set {text!r}")
    return out


def lines_of(numbers: dict[str, Any], indent: str = "  ") -> list[str]:
    """Nested numbers as indented lines; an interval takes one line.

    >>> lines_of({"flip": {"positive": {"mean": 0.25, "low": 0.2, "high": 0.31}}, "num_tokens": 7})
    ['  flip:', '    positive: 0.25 [0.2, 0.31]', '  num_tokens: 7']
    """
    out = []
    for name, value in numbers.items():
        if isinstance(value, dict) and "mean" not in value:
            out += [f"{indent}{name}:", *lines_of(value, indent + "  ")]
        else:
            out.append(f"{indent}{name}: {text_of(value) if isinstance(value, dict) else value}")
    return out


def text_of(interval: dict[str, Any]) -> str:
    """``0.25 [0.2, 0.31] (num_nodes 56)``"""
    mean, low, high = (interval.get(name) for name in ("mean", "low", "high"))
    bounds = "" if low is None or high is None else f" [{low:.4g}, {high:.4g}]"
    rest = ", ".join(
        f"{name} {value}" for name, value in interval.items() if name not in ("mean", "low", "high")
    )
    return f"{'-' if mean is None else format(mean, '.4g')}{bounds}{f' ({rest})' if rest else ''}"
