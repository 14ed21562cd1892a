"""``counterpoise audit``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from counterpoise.cli.show import Json, print_json, print_table, say, waiting
from counterpoise.run.find import check_run
from counterpoise.run.read import check_batch


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
        int | None, typer.Option("--updates", min=1, help="Updates per batch; the run's own, or 4.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of plans that draw at random.")] = 0,
    json_: Json = False,
) -> None:
    """Show which good and bad rollouts of a prompt share an update.

    Compares the plan of the run with our plans and with those of TRL and verl.

    Example: `counterpoise audit runs/demo --batch 20`
    """
    if source.suffix == ".parquet" and not source.exists():
        raise ValueError(f"audit: no such file: {source}.")
    if not source.is_file():
        check_run(source)
        check_batch(source, batch, ["rollouts"])
    from counterpoise.probes.audit import audit_plans

    with waiting("auditing plans"):
        result = audit_plans(source, batch_number=batch, num_updates=num_updates, seed=seed)
    if json_:
        print_json(result)
    else:
        _print_result(result)


def _print_result(result: dict[str, Any]) -> None:
    from counterpoise.probes.audit import averages

    num = max(len(audits) for audits in result["plans"].values())
    say(f"{num} batches, {result['num_updates']} updates each")
    head = ("plan", "pairs kept", "prompts split", "positive share", "update tokens", "left out")
    rows = [(label, *_cells(averages(audits))) for label, audits in result["plans"].items()]
    print_table(head, rows, left=["plan"])
    say(
        "pairs kept: share of same-prompt (good, bad) pairs whose rollouts meet in one update",
        "left out: rollouts that no update trains on",
    )
    for problem in result["problems"]:
        say(f"not possible: {problem}")


def _cells(mean: dict[str, float]) -> tuple[str, ...]:
    return (
        f"{mean['pairs_kept']:.3f}",
        f"{mean['prompts_split_frac']:.3f}",
        f"{mean['positive_frac_min']:.2f} to {mean['positive_frac_max']:.2f}",
        f"{mean['tokens_min']:.0f} to {mean['tokens_max']:.0f}",
        f"{mean['num_left_out']:.1f}",
    )
