"""The audit of saved rollouts: what of each prompt meets in one update, as trained and
under other plans.

TRL shuffles rows (``random_rows``); verl balances lengths (``length_sorted``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterpoise.maths.reduce import seeded_generator
from counterpoise.plans import PLANS, audit
from counterpoise.run.files import batch_file, batch_of
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
        batch: one batch of the run; all by default.
        num_updates: updates a batch; the run's own by default, 4 for a file.
        seed: of plans that draw.
    """
    files = rollout_files(source, batch_number)
    num_updates = num_updates or run_updates(source)
    audits: dict[str, list[dict[str, Any]]] = {}
    problems: list[str] = []
    for file in files:
        batch, advantage_N = read_batch(file)
        for label, rows in plans_of(source, file, batch, num_updates, seed, problems).items():
            audits.setdefault(label, []).append(
                {
                    "batch": batch_of(file) if source.is_dir() else None,
                    **audit(rows, batch, advantage_N).as_dict(),
                }
            )
    return {
        "source": str(source),
        "num_updates": num_updates,
        "plans": audits,
        "problems": sorted(set(problems)),
    }


def rollout_files(source: Path, batch_number: int | None) -> list[Path]:
    if source.is_file():
        return [source]
    files = sorted((source / "rollouts").glob("batch_*.parquet"))
    if not files:
        raise ValueError(
            f"audit: {source} is neither a rollouts file nor a run folder with"
            " rollouts/batch_*.parquet."
        )
    chosen = [file for file in files if batch_number is None or batch_of(file) == batch_number]
    if not chosen:
        raise ValueError(
            f"audit: {source} has no rollouts of batch {batch_number}; it has batches {batch_of(files[0])} to"
            f" {batch_of(files[-1])}."
        )
    return chosen


def run_updates(source: Path) -> int:
    """Updates a batch of the run; 4 where there is no recipe."""
    if not (source.is_dir() and (source / "config.yaml").is_file()):
        return 4
    import yaml

    return int(
        ((yaml.safe_load((source / "config.yaml").read_text()) or {}).get("optimizer") or {}).get(
            "updates_per_batch", 4
        )
    )


def read_batch(file: Path) -> tuple[TokenBatch, Tensor | None]:
    """Group, reward and tokens of a rollouts file; the advantage where it is there."""
    import pyarrow.parquet as pq
    from pyarrow import ArrowInvalid

    try:
        names = pq.read_schema(file).names
    except ArrowInvalid as error:
        raise ValueError(f"audit: {file} is not a parquet file ({error}).") from None
    for name in NEEDED:
        if name not in names:
            raise ValueError(
                f"audit: {file} has no column {name!r}. Expected one row a rollout with"
                f" {', '.join(NEEDED)}."
            )
    table = pq.read_table(file, columns=[*NEEDED, *(["advantage"] if "advantage" in names else [])])
    column = {name: table.column(name).to_pylist() for name in table.column_names}
    ids = column["token_ids"]
    if not all(isinstance(row, list) for row in ids):
        raise ValueError(
            f"audit: {file} has one row a token. Give a file with one row a rollout"
            " (rollouts/batch_*.parquet)."
        )
    batch = TokenBatch.from_lists(
        ids,
        group=column["group"],
        reward=column["reward"],
        sampler_logp=[[0.0] * len(row) for row in ids],
    )
    return batch, torch.tensor(column["advantage"]) if "advantage" in column else None


def plans_of(
    source: Path, file: Path, batch: TokenBatch, num_updates: int, seed: int, problems: list[str]
) -> dict[str, list[Tensor]]:
    """As trained, where the run says so, and under every plan of ours; a plan that cannot be made
    is told in ``problems``.
    """
    out: dict[str, list[Tensor]] = {}
    kept = batch_file(source, "plan", batch_of(file), ".json") if source.is_dir() else None
    if kept is not None and kept.is_file():
        manifest = json.loads(kept.read_text())
        out["as trained"] = [torch.tensor(rows, dtype=torch.long) for rows in manifest["rows"]]
    for name, label in LABELS.items():
        try:
            generator = seeded_generator(seed, batch_of(file) if source.is_dir() else 0, "plan")
            out[label] = call(
                PLANS[name],
                batch.group_N,
                batch.reward_N,
                batch.length_N,
                num_updates=num_updates,
                generator=generator,
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
