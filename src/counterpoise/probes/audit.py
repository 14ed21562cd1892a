"""The audit of saved rollouts: what of each prompt meets in one update, as trained and
under other plans.

TRL shuffles rows (``random_rows``); verl balances lengths (``length_sorted``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterpoise.errors import check_whole
from counterpoise.maths.reduce import seeded_generator
from counterpoise.plans import PLANS, audit
from counterpoise.run.read import RunFolder, batch_files, check_batch, open_run
from counterpoise.run.solved import SUCCESS_COLUMN
from counterpoise.stage import call
from counterpoise.types import TokenBatch

LABELS = {
    "query_preserved": "whole prompts (query_preserved)",
    "reward_balanced": "whole prompts, balanced (reward_balanced)",
    "random_rows": "TRL: shuffled rows (random_rows)",
    "length_sorted": "verl: balanced lengths (length_sorted)",
    "round_robin": "spread (round_robin)",
}
NEEDED = ("group", "reward", "token_ids")


def audit_plans(
    source: Path, *, batch_number: int | None = None, num_updates: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Audits of one rollouts file or of a run folder, a list a plan (one audit a batch), JSON.

    Args:
        source: a ``rollouts/batch_*.parquet`` file, or a run folder.
        batch_number: one batch of the run; all by default.
        num_updates: updates per batch; the run's own by default, 4 for a file.
        seed: of plans that draw.
    """
    if not source.is_file() and not batch_files(source, "rollouts"):
        raise ValueError(
            f"audit: {source} is neither a rollouts file nor a run folder with"
            " rollouts/batch_*.parquet."
        )
    run = None if source.is_file() else open_run(source)
    files = {0: source} if run is None else rollout_files(run, batch_number)
    num_updates = num_updates or run_updates(run)
    audits: dict[str, list[dict[str, Any]]] = {}
    problems: list[str] = []
    for number, file in files.items():
        batch, advantage_N = read_batch(file, run.success if run else None)
        plan = run.plan(number) if run else None
        for label, rows in plans_of(plan, number, batch, num_updates, seed, problems).items():
            audits.setdefault(label, []).append(
                {"batch": number if run else None, **audit(rows, batch, advantage_N).as_dict()}
            )
    return {
        "source": str(source),
        "num_updates": num_updates,
        "plans": audits,
        "problems": sorted(set(problems)),
    }


def rollout_files(run: RunFolder, batch_number: int | None) -> dict[int, Path]:
    """The rollouts of one batch, or of all."""
    check_batch(run.path, batch_number, ["rollouts"])
    files = batch_files(run.path, "rollouts")
    return files if batch_number is None else {batch_number: files[batch_number]}


def run_updates(run: RunFolder | None) -> int:
    """Updates per batch of the run; 4 where there is no recipe."""
    optimizer = run.config.get("optimizer") if run else None
    num = optimizer.get("updates_per_batch", 4) if isinstance(optimizer, dict) else 4
    check_whole("audit: optimizer of the run's config.yaml", least=1, updates_per_batch=num)
    return num


def read_batch(file: Path, success: float | None) -> tuple[TokenBatch, Tensor | None]:
    """Group, reward and tokens of a rollouts file; the advantage where it is there."""
    from counterpoise.run.parquet import column_names, require_columns

    advice = f"Expected one row per rollout with {', '.join(NEEDED)}."
    more = [name for name in ("advantage", SUCCESS_COLUMN) if name in column_names(file)]
    column = require_columns(file, (*NEEDED, *more), advice).to_pydict()
    ids = column["token_ids"]
    batch = TokenBatch.from_lists(
        ids,
        group=column["group"],
        reward=column["reward"],
        sampler_logp=[[0.0] * len(row) for row in ids],
        success=success,
        success_N=torch.tensor(column[SUCCESS_COLUMN]) if SUCCESS_COLUMN in column else None,
    )
    return batch, torch.tensor(column["advantage"]) if "advantage" in column else None


def plans_of(
    trained: dict[str, Any] | None,
    batch_number: int,
    batch: TokenBatch,
    num_updates: int,
    seed: int,
    problems: list[str],
) -> dict[str, list[Tensor]]:
    """As trained, where the run says so, and under every plan of ours; a plan that cannot be made
    is told in ``problems``.
    """
    out: dict[str, list[Tensor]] = {}
    if trained is not None:
        if max(max(rows) for rows in trained["rows"]) < batch.num_rollouts:
            out["as trained"] = [torch.tensor(rows) for rows in trained["rows"]]
        else:
            problems.append(f"batch {batch_number}: its plan has rows that the batch has not.")
    for name, label in LABELS.items():
        try:
            generator = seeded_generator(seed, batch_number, "plan")
            out[label] = call(
                PLANS[name],
                batch.group_N,
                batch.reward_N,
                batch.length_N,
                num_updates=num_updates,
                generator=generator,
                success_N=batch.is_success_N,
            )
        except ValueError as impossible:
            problems.append(str(impossible))
    return out


def averages(audits: list[dict[str, Any]]) -> dict[str, float]:
    """What a table shows of a plan: means over batches; extremes of the positive share and of
    tokens over all batches.
    """
    shares = [share for one in audits for share in one["positive_frac"]]
    tokens = [count for one in audits for count in one["tokens"]]

    def mean(name: str) -> float:
        return sum(one[name] for one in audits) / len(audits)

    return {
        "pairs_kept": mean("pairs_kept"),
        "prompts_split_frac": mean("prompts_split_frac"),
        "num_left_out": mean("num_left_out"),
        "positive_frac_min": min(shares),
        "positive_frac_max": max(shares),
        "tokens_min": min(tokens),
        "tokens_max": max(tokens),
    }
