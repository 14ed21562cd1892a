"""Whether the ledger through the fused layers of the update says what it says through the model's
own layers, and how long each takes.

    python benchmarks/check_ledger.py [--recipe recipes/demo.yaml] [--set rollouts.prompts=32]
    [--json PATH]

One batch of updates, each with three accounts: ``fused``, ``own``, and ``wide``, the model's own
layers with float32 products in gradients and forward mode too. Log-probs and their change agree
where no token of ``fused`` is further from ``own`` than ``FACTOR`` noise floors, or the mean
distance is at most a tenth of ``LEAST`` of the mean size. Other columns agree where the mean
distance of ``fused`` from ``wide`` is at most ``FACTOR`` times that of ``own``, or ``LEAST`` of the
mean size. Exit code 1 where one does not.
On a CPU the fused layers need Triton's interpreter: TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from machine import device_name, now
from torch import Tensor

from counterpoise.catalogue.registry import method as make_method
from counterpoise.ledger.book import Book
from counterpoise.policy import Policy
from counterpoise.policy.fused import fused_layers, why_not_fused
from counterpoise.tasks import task as make_task
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.config import Config, load_config
from counterpoise.trainer.loop import ledger_recording, load_policy
from counterpoise.trainer.update import adamw, apply_update

FACTOR, LEAST = 2.0, 1e-3
OWN_TOKENS = 64  # of an update: of the ledger's eight one may have half of all distance
WHO = ("fused", "own")
SCORES = ("trainer_logp", "trainer_logp_after", "delta")
COLUMNS = (*SCORES, "predicted", "residual", "entropy", "kl", "own_head", "own")


def main() -> None:
    args = arguments()
    config = load_config(args.recipe, args.set)
    method = make_method(**config.method)
    policy, _ = load_policy(config, method)
    columns, seconds = account_thrice(config, policy, method)
    if not columns["own"]["delta"].nan_to_num(0).any():
        raise SystemExit(
            "check_ledger: the updates changed nothing (all advantages 0?). Take more prompts"
            " (--set rollouts.prompts=...) or another seed."
        )
    rows = {name: row for name in columns["own"] if (row := compare(columns, name)) is not None}
    for name, row in rows.items():
        told = "  ".join(f"{key} {value:.2e}" for key, value in row.items() if key != "agrees")
        print(f"{name:<22}{told}  {'agrees' if row['agrees'] else 'DIFFERS'}")
    floors = {who: float(of["noise_floor"].nan_to_num(0).max()) for who, of in columns.items()}
    gaps = {who: closure(of) for who, of in columns.items()}
    print(f"noise floor      {floors}\nparts - predicted {gaps}\nseconds          {seconds}")
    out = {"device": device_name(), "columns": rows, "noise_floor": floors}
    if args.json:
        out |= {"closure": gaps, "seconds": seconds, "command": sys.argv}
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    sys.exit(0 if all(row["agrees"] for row in rows.values()) else 1)


def account_thrice(
    config: Config, policy: Policy, method: Any
) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
    """The columns of one batch by who accounts for it, and the seconds of all updates but the
    first.
    """
    task, optimizer = make_task(**config.task), adamw(policy.model, config.optimizer)
    collected = collect(method, RolloutSampler(policy, task, config, 0, needs=method.needs))
    collected = measure_columns(policy, method, config, collected, None)
    credit = method.assign(collected.batch)
    how = ledger_recording(config, policy, 0).book._replace(own_tokens=OWN_TOKENS)
    kinds = {
        "fused": how._replace(kernels=fused(policy)),
        "own": how._replace(kernels=nullcontext),
        "wide": how._replace(kernels=nullcontext, autocast=nullcontext),
    }
    rollouts = (collected.batch, collected.prompt_ids, credit)
    books = {
        who: Book(policy.model, optimizer, *rollouts, lambda ids: [str(i) for i in ids], kind)
        for who, kind in kinds.items()
    }
    seconds = dict.fromkeys(books, 0.0)
    plan = method.plan(collected.batch, config.optimizer.updates_per_batch)
    for number, row_R in enumerate(plan):
        for book in books.values():
            book.before()
        rows = method.rows(collected.batch, credit, row_R)
        update = apply_update(policy.model, optimizer, method, rows, collected, config)
        for who, book in books.items():
            start = now()
            book.after(update.rows, update.loss, update.clip_factor)
            seconds[who] += (now() - start) * (number > 0)
    for book in books.values():
        book.columns["mask"] = collected.batch.mask_NT.cpu()
        book.columns["residual"] = book.columns["delta"] - book.columns["predicted"]
    return {who: book.columns for who, book in books.items()}, seconds


def fused(policy: Policy) -> Callable[[], AbstractContextManager]:
    """The fused layers, or an error that says why there are none."""
    reason = why_not_fused(policy.model)
    if reason and os.environ.get("TRITON_INTERPRET") != "1":
        raise SystemExit(
            f"check_ledger: no fused layers: {reason}. Run it on a CUDA device, or with"
            " TRITON_INTERPRET=1 and a recipe that is very small."
        )
    return lambda: fused_layers(policy.model)


def compare(columns: dict[str, dict[str, Tensor]], name: str) -> dict[str, Any] | None:
    """How far a column is from that of the other layers; None for what is not compared, and for
    the own parts of a batch without any.
    """
    if name not in COLUMNS and not name.startswith("part_"):
        return None
    fused, own, wide = (columns[who][name].double() for who in ("fused", "own", "wide"))
    here = own.isfinite() & columns["own"]["mask"]
    if not here.any():
        return None
    gap, fused_error, own_error = (
        (one - other)[here].abs() for one, other in ((fused, own), (fused, wide), (own, wide))
    )
    row: dict[str, Any] = {
        "size": float(own[here].abs().mean()),
        "mean": float(gap.mean()),
        "max": float(gap.max()),
        "fused_from_wide": float(fused_error.mean()),
        "own_from_wide": float(own_error.mean()),
    }
    if name in SCORES:
        floor = max(float(columns[who]["noise_floor"].nan_to_num(0).max()) for who in WHO)
        is_near = row["mean"] <= 0.1 * LEAST * row["size"]
        return row | {"agrees": is_near or row["max"] <= FACTOR * floor}
    most = max(FACTOR * row["own_from_wide"], LEAST * row["size"])
    return row | {"agrees": row["fused_from_wide"] <= most}


def closure(columns: dict[str, Tensor]) -> float:
    """The largest gap between the parts of the first axis and what they add up to."""
    parts = [column for name, column in columns.items() if name.startswith("part_sign")]
    gap = torch.stack(parts).sum(0) - columns["predicted"]
    return float(gap.nan_to_num(0).abs().max())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument(
        "--set", action="append", default=[], help="override a key of the recipe (repeatable)"
    )
    parser.add_argument("--json", help="write the numbers to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
