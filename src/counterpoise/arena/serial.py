"""Runs that cannot share a stack, by the trainer itself, under the same evaluation: one after the
other, or several processes at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from counterpoise.arena.crew import end_with_parent
from counterpoise.arena.design import Design
from counterpoise.arena.live import Live
from counterpoise.arena.results import Run, append_result, read_results
from counterpoise.arena.runs import config_of
from counterpoise.errors import ConfigError
from counterpoise.policy import Policy, load_model
from counterpoise.run.read import checkpoints, read_jsonl
from counterpoise.tasks import task as make_task
from counterpoise.trainer.config import Config
from counterpoise.trainer.evaluate import evaluate
from counterpoise.trainer.loop import device_of, train


def train_apart(design: Design, out: Path, runs: Sequence[Run], live: Live, jobs: int) -> None:
    """Every run by itself, ``jobs`` at a time."""
    if jobs == 1:
        for run in runs:
            train_alone(design, out, run, live)
        return
    for run, reason in _stopped(design, out, runs, jobs):
        if reason:
            live.say(_stop_line(run, reason))
        live.step(design.last)
        live.finish(1)


def _stopped(
    design: Design, out: Path, runs: Sequence[Run], jobs: int
) -> Iterator[tuple[Run, str]]:
    """Runs in the order in which they end, and why they stopped; processes share the cores, and end
    at once when this does.
    """
    threads, (reader, writer) = max(1, (os.cpu_count() or 1) // jobs), Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), start_process, (threads, reader))
    waiting = {pool.submit(_train_quietly, design, out, run): run for run in runs}
    try:
        for future in as_completed(waiting):
            yield waiting[future], future.result()
        pool.shutdown()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        writer.close()


def start_process(num_threads: int, end: Connection) -> None:
    """Of a process that ends at once when the one that began it ends, or closes ``end``."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # the arena itself hears Ctrl-C
    end_with_parent(end)
    torch.set_num_threads(num_threads)


def _train_quietly(design: Design, out: Path, run: Run) -> str:
    return train_alone(design, out, run, Live(quiet=True))


def train_alone(design: Design, out: Path, run: Run, live: Live) -> str:
    """Train to each evaluation in turn, in a run folder of its own; what is there is gone on with.

    An error of this run alone (weights that diverge) ends it, is its result, and is returned. The
    weights of a run that has all its results are deleted: hundreds of runs would fill the disk.
    """
    folder = out / "runs" / f"{run.arm.replace('/', '_')}-{run.lr:g}-{run.seed}"
    config = config_of(design, run)
    quiet = {"eval": config.eval.model_copy(update={"every": 0}), "run_dir": str(folder)}
    config = config.model_copy(update=quiet)
    known, reason = {one.batch for one in read_results(out) if one.run == run}, ""
    for before, at in zip((0, *design.evaluations), design.evaluations):
        if at not in known:
            try:
                row = (None if at else known_start(design, out, config)) or train_to(
                    design, config, folder, before, at
                )
            except ConfigError as error:  # another process has the folder: no result of the run
                raise ConfigError(f"{error} For an arena: another --out.") from None
            except ValueError as error:
                reason = str(error)
                append_result(out, {**run._asdict(), "batch": at, "stopped": reason})
                live.say(_stop_line(run, reason))
                break
            append_result(out, {**run._asdict(), "batch": at, **row})
        (live.skip if at in known else live.step)(at - before)
    else:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    live.finish(1)
    return reason


def known_start(design: Design, out: Path, config: Config) -> dict[str, float] | None:
    """What a run that starts as this one does scored before its first batch; every run is evaluated
    on the same prompts with the same random streams.
    """
    for one in read_results(out):
        if (
            one.batch == 0
            and one.values
            and start_of(config_of(design, one.run)) == start_of(config)
        ):
            return one.values
    return None


def start_of(config: Config) -> dict[str, object]:
    """All that a score before training depends on."""
    keys = {"model", "task", "chat", "dtype", "device", "lora", "rollouts"}
    return {**config.model_dump(include=keys), "temperature": config.eval.temperature}


def _stop_line(run: Run, reason: str) -> str:
    return f"{run.arm}, rate {run.lr:g}, seed {run.seed} stopped: {reason}"


def train_to(
    design: Design, config: Config, folder: Path, before: int, at: int
) -> dict[str, float | None]:
    """Train until ``at`` batches are done, then evaluate; the last weights are not written."""
    if at:
        is_begun = bool(checkpoints(folder))
        needs_weights = at < design.last
        result = train(
            config, until=at, resume=is_begun, fresh=not is_begun, save_last=needs_weights
        )
        if result.batch_number < at:
            raise KeyboardInterrupt  # it stopped on request: these are not the weights after ``at``
        policy = result.policy
    else:
        policy = load_model(config.model, device=device_of(config))
    rows = [row for row in read_jsonl(folder / "metrics.jsonl") if row["batch"] >= before]
    mean = float(np.mean([row["reward/mean"] for row in rows])) if rows else None
    row = {"train_reward": mean, "num_updates": config.num_updates // config.num_batches * at}
    return {**scores(design, config, policy), **row}


def scores(design: Design, config: Config, policy: Policy) -> dict[str, float]:
    """Sampled, greedy, pass@k, entropy and length of a policy."""
    task = make_task(**config.task)
    num, samples = design.eval["prompts"], design.eval["samples"]
    temperature = config.eval.temperature or 1.0
    sampled = evaluate(policy, task, config, prompts=num, samples=samples, temperature=temperature)
    greedy = evaluate(policy, task, config, prompts=num, temperature=0.0)
    return {
        "sampled": sampled.accuracy.mean,
        "greedy": greedy.accuracy.mean,
        **{f"pass@{k}": value for k, value in sampled.pass_at.items() if k > 1},
        "entropy": sampled.mean_entropy,
        "length": sampled.mean_length,
    }
