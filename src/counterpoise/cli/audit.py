"""``counterpoise audit``"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def audit(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run folder, or one rollouts file (parquet with group, reward, token_ids)."
        ),
    ],
    batch: Annotated[
        int | None, typer.Option(min=0, help="One batch of the run; all by default.")
    ] = None,
    num_updates: Annotated[
        int | None,
        typer.Option("--updates", min=1, help="Updates a batch; the run's own, or 4."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of plans that draw.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Which good and bad rollouts of a prompt meet in one update: as trained, under our
    plans, in TRL and in verl.

    Example: `counterpoise audit runs/demo --batch 20`
    """
    from counterpoise.probes.plans import audit_plans

    if not source.exists():
        raise ValueError(f"audit: no file or folder {str(source)!r}.")
    found = audit_plans(source, batch_number=batch, num_updates=num_updates, seed=seed)
    if json_:
        print(json.dumps(found, indent=1))
    else:
        _print_table(found)


def _print_table(found: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from counterpoise.probes.plans import averages

    num = max(len(audits) for audits in found["plans"].values())
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{num} batches, {found['num_updates']} updates each",
        title_justify="left",
    )
    for name in (
        "plan",
        "pairs kept",
        "prompts split",
        "positive share",
        "tokens a batch",
        "rows left out",
    ):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for label, audits in found["plans"].items():
        one = averages(audits)
        share = f"{one['positive_frac_min']:.2f} to {one['positive_frac_max']:.2f}"
        tokens = f"{one['tokens_min']:.0f} to {one['tokens_max']:.0f}"
        kept, split, left_out = (
            f"{one['pairs_kept']:.3f}",
            f"{one['prompts_split_frac']:.3f}",
            f"{one['num_left_out']:.1f}",
        )
        table.add_row(label, kept, split, share, tokens, left_out)
    Console(width=132).print(table)
    print(
        "pairs kept: share of same-prompt (good, bad) pairs whose rollouts meet in one optimizer"
        " batch"
    )
    for problem in found["problems"]:
        print(f"not possible: {problem}")
