"""A run that cannot share a stack, by the trainer itself, under the same evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from counterpoise.arena.design import Design
from counterpoise.arena.live import Live
from counterpoise.arena.results import Run, append_result, read_results
from counterpoise.arena.runs import config_of
from counterpoise.policy import load_model
from counterpoise.run.read import checkpoints, read_jsonl
from counterpoise.tasks import task as make_task
from counterpoise.trainer.config import Config
from counterpoise.trainer.evaluate import evaluate
from counterpoise.trainer.loop import device_of, train


def train_alone(design: Design, out: Path, run: Run, live: Live) -> None:
    """Train to each evaluation in turn, in a run folder of its own; what is there is gone on with.

    An error of this run alone (weights that diverge) ends it and is its result.
    """
    folder = out / "runs" / f"{run.arm.replace('/', '_')}-{run.lr:g}-{run.seed}"
    config = config_of(design, run)
    quiet = {"eval": config.eval.model_copy(update={"every": 0}), "run_dir": str(folder)}
    config = config.model_copy(update=quiet)
    known = {one.batch for one in read_results(out) if one.run == run}
    for before, at in zip((0, *design.evaluations), design.evaluations):
        if at not in known:
            try:
                row = train_to(design, config, folder, before, at)
            except ValueError as error:
                append_result(out, {**run._asdict(), "batch": at, "stopped": str(error)})
                live.say(f"{run.arm}, rate {run.lr:g}, seed {run.seed} stopped: {error}")
                break
            append_result(out, {**run._asdict(), "batch": at, **row})
        live.step(at - before)
    live.finish(1)


def train_to(
    design: Design, config: Config, folder: Path, before: int, at: int
) -> dict[str, float | None]:
    """Train until ``at`` batches are done, then evaluate."""
    if at:
        is_begun = bool(checkpoints(folder))
        train(config.model_copy(update={"num_batches": at}), resume=is_begun, fresh=not is_begun)
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["batch"] >= before]
    mean = float(np.mean([row["reward/mean"] for row in rows])) if rows else None
    num = at * config.optimizer.updates_per_batch
    return {**scores(design, config, folder, at), "train_reward": mean, "num_updates": num}


def scores(design: Design, config: Config, folder: Path, at: int) -> dict[str, float]:
    """Sampled, greedy, pass@k, entropy and length of the weights after ``at`` batches."""
    model = str(checkpoints(folder)[-1]) if at else config.model
    policy, task = load_model(model, device=device_of(config)), make_task(**config.task)
    num, samples = design.eval["prompts"], design.eval["samples"]
    temperature = config.eval.temperature or 1.0
    sampled = evaluate(policy, task, config, prompts=num, samples=samples, temperature=temperature)
    greedy = evaluate(policy, task, config, prompts=num, temperature=0.0)
    return {
        "sampled": float(sampled.reward_PK.mean()),
        "greedy": float(greedy.reward_PK.mean()),
        **{f"pass@{k}": value for k, value in sampled.pass_at.items() if k > 1},
        "entropy": sampled.mean_entropy,
        "length": sampled.mean_length,
    }
