"""``counterpoise methods``"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def methods(
    name: Annotated[str | None, typer.Argument(help="One method, shown in full.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """List every method, or show one on its six axes with parameters and reference.

    Example: `counterpoise methods dfpo_min`
    """
    import counterpoise as cp
    from counterpoise.errors import nearest

    known = cp.methods()
    if name is not None and name not in known:
        raise ValueError(f"unknown method {name!r}. {nearest(name, known)}")
    if json_:
        print(json.dumps(known if name is None else known[name], indent=1, default=str))
    elif name is None:
        _print_table(known)
    else:
        _print_one(name, known[name])


def _print_table(known: dict[str, dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("method", "advantage", "credit", "loss", "reduction", "plan", "reference"):
        table.add_column(column, overflow="fold")
    for name, info in known.items():
        axes = info["axes"]
        credit, loss = (
            " + ".join(stage["name"] for stage in axes[axis]) for axis in ("credit", "loss")
        )
        table.add_row(
            name,
            axes["advantage"]["name"],
            credit or "uniform",
            loss,
            axes["reduction"]["name"],
            axes["plan"]["name"],
            info["reference"],
        )
    Console().print(table)


def _print_one(name: str, info: dict[str, Any]) -> None:
    print(f"{name}: {info['summary']} ({info['reference']})")
    for axis, stages in info["parameters"].items():
        for stage, params in stages.items():
            print(
                f"  {axis:<10}"
                f" {stage}({', '.join(f'{key}={value!r}' for key, value in params.items())})"
            )
        if not stages:
            print(f"  {axis:<10} {'uniform' if axis == 'credit' else 'none'}")
    print(f"  needs      {', '.join(info['needs']) or 'nothing beyond the sampler log-probs'}")
