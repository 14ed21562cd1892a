"""Solution drift: a frozen bank of verified, distinct solutions, scored by every checkpoint of the
run up to the batch.

Learning that only removes wrong answers leaves the log-odds between right answers alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from counterpoise.ledger import fill_bank, restore
from counterpoise.ledger.calculus.snapshot import snapshot
from counterpoise.ledger.measures.drift import drift, score_solutions
from counterpoise.probes.output import Drawing, Frame, Output, error_bars, means
from counterpoise.probes.scene import Scene
from counterpoise.run import checkpoint
from counterpoise.run.files import batch_of
from counterpoise.run.read import batch_files, checkpoints, read_rollouts

Entry = dict[str, Any]


def probe(scene: Scene, output: Output, *, size: int = 64) -> None:
    """|log-odds change| between the first two solutions of each prompt of a bank, and the entropy
    over its solutions, by checkpoint.
    """
    output.table("bank", lambda: bank_rows(scene, size))


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Means over the bank's prompts, with intervals over them."""
    table = tables["bank"]
    numbers: dict[str, Any] = {
        "num_prompts": int(table["prompt"].nunique()),
        "batches": sorted(table["batch"].unique().tolist()),
    }
    for quantity in ("log_odds_change", "entropy"):
        sets = {
            str(batch_number): table["batch"] == batch_number for batch_number in numbers["batches"]
        }
        numbers[quantity] = means(table[quantity], sets, table["prompt"])
    return numbers


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
            for k, entry in enumerate(bank):
                change, (bank[k],) = drift(
                    [entry], lambda prompts, solutions, k=k, logp=logp: logp[k]
                )
                out.append(
                    {
                        "prompt": entry["prompt_id"],
                        "batch": batch_of(path),
                        **{n: change[n] for n in ("log_odds_change", "entropy")},
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
    """Drift over training."""
    import plotly.graph_objects as go

    out, curve = go.Figure(), numbers["log_odds_change"]
    mean, bars = [v["mean"] for v in curve.values()], error_bars(list(curve.values()))
    out.add_scatter(
        x=[int(s) for s in curve],
        y=mean,
        error_y=bars,
        mode="lines+markers",
        line={"color": "#0072B2"},
    )
    title = (
        f"How far the log-odds between verified solutions have moved ({numbers['num_prompts']}"
        " prompts)"
    )
    out.update_layout(title=title, xaxis_title="batch")
    return out.update_yaxes(title="mean |change|, nats, 95% interval", rangemode="tozero")
