"""Solution drift: a frozen bank of verified, distinct solutions, scored by every checkpoint of the
run up to the batch.

Learning that only removes wrong answers leaves the log-odds between right answers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from counterpoise.ledger.calculus.snapshot import restore, snapshot
from counterpoise.ledger.measures.drift import (
    fill_bank,
    log_odds,
    score_solutions,
    solution_entropy,
)
from counterpoise.probes.output import (
    Drawing,
    Frame,
    Output,
    error_bars,
    means,
    number_dict,
    ratios,
)
from counterpoise.probes.scene import Scene
from counterpoise.run import checkpoint
from counterpoise.run.files import batch_of
from counterpoise.run.read import batch_files, checkpoints
from counterpoise.run.rollouts import read_rollouts

Entry = dict[str, Any]


def probe(scene: Scene, output: Output, *, size: int = 64) -> None:
    """Log-odds between the first two solutions of each prompt of a bank, and the entropy over its
    solutions, by checkpoint.
    """
    output.table("bank", lambda: bank_rows(scene, size))


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """The slope of the change of the log-odds against those at the first checkpoint, the mean
    |change| and the mean entropy, with intervals over the bank's prompts.
    """
    table = tables["bank"]
    numbers: dict[str, Any] = {
        "num_prompts": int(table["prompt"].nunique()),
        "batches": sorted(table["batch"].unique().tolist()),
    }
    sets = {str(number): table["batch"] == number for number in numbers["batches"]}
    change = table["log_odds"] - table["start"]
    numbers["slope"] = {
        name: number_dict(_slope(table[is_in], change[is_in])) for name, is_in in sets.items()
    }
    numbers["log_odds_change"] = means(change.abs(), sets, table["prompt"])
    numbers["entropy"] = means(table["entropy"], sets, table["prompt"])
    return numbers


def _slope(table: Frame, change: Frame) -> np.ndarray:
    start = table["start"].to_numpy()
    return ratios([start * change], [start * start], table["prompt"])[:, 0]


def bank_rows(scene: Scene, size: int) -> list[dict[str, Any]]:
    """One row per prompt and checkpoint; the bank is filled from the earliest saved rollouts on."""
    bank = solution_bank(scene, size)
    model, optimizer = scene.policy.model, scene.optimizer
    paths = [path for path in checkpoints(scene.run_dir) if batch_of(path) <= scene.batch_number]
    saved, out = snapshot(model, optimizer), []
    try:
        for path in paths:
            checkpoint.load_weights(path, model)
            sizes = [len(entry["solutions"]) for entry in bank]
            prompts = [entry["prompt_ids"] for entry in bank for _ in entry["solutions"]]
            logp = score_solutions(
                model,
                prompts,
                [ids for entry in bank for ids in entry["solutions"]],
                temperature=scene.config.rollouts.temperature,
                token_budget=scene.config.token_budget,
            ).split(sizes)
            for entry, logp_K in zip(bank, logp):
                now = logp_K.double().tolist()
                entry["start"] = entry["start"] or now
                out.append(
                    {
                        "prompt": entry["prompt_id"],
                        "batch": batch_of(path),
                        "start": log_odds(entry["start"]),
                        "log_odds": log_odds(now),
                        "entropy": solution_entropy(now),
                    }
                )
    finally:
        restore(saved, model, optimizer)
    return out


def solution_bank(scene: Scene, size: int) -> list[Entry]:
    """Prompts with two distinct verified solutions among the rollouts saved up to the batch."""
    bank: list[Entry] = []
    for batch_number, path in batch_files(scene.run_dir, "rollouts").items():
        if batch_number <= scene.batch_number and len(bank) < size:
            bank = extend_bank(bank, size, path, scene.config.success)
    if not bank:
        raise ValueError(
            f"drift: no prompt up to batch {scene.batch_number} has two distinct verified"
            " solutions, so there is no bank. Raise rollouts.group_size, take an easier task, or a"
            " later batch."
        )
    return bank


def extend_bank(bank: list[Entry], size: int, path: Path, success: float) -> list[Entry]:
    rollouts = read_rollouts(path)
    batch = rollouts.batch
    ids = [row[keep].tolist() for row, keep in zip(batch.token_ids_NT, batch.mask_NT)]
    names = [rollouts.prompts[g].id for g in batch.group_N.tolist()]
    is_solved = (batch.reward_N >= success).tolist()
    return fill_bank(bank, size, names, rollouts.prompt_ids, ids, is_solved)


def figure(numbers: dict[str, Any]) -> Drawing:
    """Left: the slope over training. Right: the mean |change|."""
    from plotly.subplots import make_subplots

    titles = ("slope: above 0 the favourite gains", "mean |change|: a random walk raises it too")
    out = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.12)
    for col, name in enumerate(("slope", "log_odds_change"), 1):
        curve = list(numbers[name].values())
        out.add_scatter(
            x=numbers["batches"],
            y=[one["mean"] for one in curve],
            error_y=error_bars(curve),
            mode="lines+markers",
            line={"color": "#0072B2"},
            showlegend=False,
            row=1,
            col=col,
        )
    title = f"Log-odds between verified solutions, {numbers['num_prompts']} prompts"
    out.update_layout(title=title).update_xaxes(title="batch")
    out.update_yaxes(title="change per nat of log-odds at the start", row=1, col=1)
    return out.update_yaxes(title="nats, 95% interval", rangemode="tozero", row=1, col=2)
