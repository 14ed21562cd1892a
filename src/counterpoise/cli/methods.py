"""``counterpoise methods``"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from counterpoise.cli.method_list import method_list, summaries
from counterpoise.cli.show import Json, print_json, say


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, shown in full.")] = None,
    json_: Json = False,
) -> None:
    """List every method, or show one on its six axes with parameters and reference.

    Example: `counterpoise methods dfpo_min`
    """
    if name is None and not json_:
        say(*method_list(summaries()).splitlines())
        return
    import counterpoise as cp
    from counterpoise.catalogue.registry import unknown_method

    known = cp.methods()
    if name is not None and name not in known:
        raise ValueError(unknown_method(name, known))
    if json_:
        print_json(known if name is None else known[name])
    elif name is not None:
        say(*one_method(name, known[name]).splitlines())


def one_method(name: str, info: dict[str, Any]) -> str:
    """The stages of one method with their parameters, one line per stage."""
    lines = [f"{name}: {info['summary']} ({info['reference']})"]
    for axis, stages in info["parameters"].items():
        for stage, params in stages.items():
            given = ", ".join(f"{key}={value!r}" for key, value in params.items())
            lines.append(f"  {axis:<10} {stage}({given})")
        if not stages:
            lines.append(f"  {axis:<10} {'uniform' if axis == 'credit' else 'none'}")
    needs = ", ".join(info["needs"]) or "nothing beyond the sampler's log-probs"
    return "\n".join([*lines, f"  needs      {needs}"])
