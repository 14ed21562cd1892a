"""``counterpoise probe``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def probe(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    name: Annotated[str, typer.Option("--probe", help="flips, coupling, counterfactual, value, exchangeability, tax or drift.")],
    step: Annotated[int | None, typer.Option(min=0, help="The rollout batch; the last one that can be probed by default.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="A setting of the probe: --set pairs=100 (repeatable).")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin again instead of going on.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """An experiment on a saved moment of a run: raw data, a figure and a summary in RUN/probes. The run stays as it was.

    Example: `counterpoise probe runs/demo --step 20 --probe counterfactual`
    """
    from counterpoise.probes import run_probe

    summary = run_probe(run, name, step, settings_of(set_ or []), fresh=fresh)
    if json_:
        print(json.dumps(summary, indent=1))
        return
    print(f"{name} of {run}, step {summary['step']}")
    for line in lines_of(summary["numbers"]):
        print(line)
    print(f"raw data and figure: {summary['folder']}")


def settings_of(texts: list[str]) -> dict[str, Any]:
    """``["pairs=100"]`` -> ``{"pairs": 100}``."""
    import yaml

    out = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--set {text!r}: expected name=value, for example --set pairs=100.")
        out[key] = yaml.safe_load(value)
    return out


def lines_of(numbers: dict[str, Any], indent: str = "  ") -> list[str]:
    """Nested numbers as indented lines; an interval takes one line."""
    out = []
    for name, value in numbers.items():
        if isinstance(value, dict) and "mean" in value:
            rest = ", ".join(f"{k} {v}" for k, v in value.items() if k not in ("mean", "low", "high"))
            bounds = f" [{value['low']:.4g}, {value['high']:.4g}]" if value.get("low") is not None else ""
            out.append(f"{indent}{name}: {value['mean'] if value['mean'] is None else format(value['mean'], '.4g')}{bounds}{f' ({rest})' if rest else ''}")
        elif isinstance(value, dict):
            out += [f"{indent}{name}:", *lines_of(value, indent + "  ")]
        else:
            out.append(f"{indent}{name}: {value}")
    return out
