"""Many training runs of one recipe, several at a time; runs that are there are not made again.

cases = [Case("dapo-0", {"seed": 0, "method.name": "dapo"}), ...]
evals = run_all("recipes/demo.yaml", cases, Path("runs/mine"), jobs=2)  # name -> evals
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from counterpoise.run.files import write_json
from counterpoise.run.read import read_jsonl
from counterpoise.trainer.config import load_config

# a comparison reads evaluations and metrics: nothing else is written
LEAN = {
    "ledger.every": 0,
    "checkpoint_every": 0,
    "keep_every": 0,
    "save_rollouts_every": 0,
    "trackers": [],
}

CLOSING_PROMPTS, CLOSING_SEED = (
    400,
    1,
)  # held-out prompts, other ones than a run's own evaluations take


class Case(NamedTuple):
    """A run: its folder's name, and the keys of the recipe that it sets."""

    name: str
    settings: Mapping[str, Any]


def run_all(
    recipe: str,
    cases: Sequence[Case],
    runs: Path,
    *,
    jobs: int,
    closing: int = 0,
    settings: Mapping[str, Any] | None = None,
    deadline: float = math.inf,
) -> dict[str, list[dict[str, Any]]]:
    """The evaluations of every run that is finished; one that fails says why and is left out.

    Args:
        settings: keys that all runs set.
        jobs: runs at the same time, one thread each, in the order of ``cases``.
        closing: samples a prompt of one more evaluation at the end, greedy beside it (``closed``);
            0 makes none.
        deadline: no run begins after it (``time.time()``).
    """
    began = time.perf_counter()
    missing = [case for case in cases if not finished(runs / case.name)]
    os.environ["OMP_NUM_THREADS"] = "1"  # read by torch when a worker imports it
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        pending = {
            pool.submit(
                trained,
                recipe,
                {**LEAN, **(settings or {}), **case.settings},
                runs / case.name,
                closing,
                deadline,
            ): case
            for case in missing
        }
        for at, done in enumerate(as_completed(pending)):
            seconds, name = time.perf_counter() - began, pending[done].name
            print(
                f"{at + 1} of {len(missing)} after {seconds:.0f} s: {name}: {done.result()}",
                flush=True,
            )
    return {
        case.name: read_jsonl(runs / case.name / "evals.jsonl")
        for case in cases
        if finished(runs / case.name)
    }


def trained(
    recipe: str, settings: Mapping[str, Any], run_dir: Path, closing: int, deadline: float
) -> str:
    """Train in this process; how it went, in words."""
    from counterpoise.trainer.loop import train

    if time.time() > deadline:
        return "not begun: the time limit is reached"
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in {**settings, "run_dir": str(run_dir)}.items()
    ]
    try:
        config = load_config(recipe, overrides)
        result = train(config, fresh=True)
        if not result.is_finished:
            return f"stopped after batch {result.batch_number}"
        if closing:
            close(config, run_dir, closing)
    except Exception as error:  # one run that fails must not cost the others
        return f"failed: {type(error).__name__}: {error}"
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    (run_dir / "finished").touch()
    return f"{result.last.mean:.1%}" if result.last else "done"


def close(config: Any, run_dir: Path, samples: int) -> None:
    """Evaluate the last checkpoint greedily and with several samples a prompt: ``closing.json``, a
    value a prompt.
    """
    from counterpoise.policy import load_model
    from counterpoise.run.read import checkpoints
    from counterpoise.tasks import task as make_task
    from counterpoise.trainer.evaluate import evaluate

    policy, task = (
        load_model(str(checkpoints(run_dir)[-1]), device=config.device),
        make_task(**config.task),
    )
    settings = {"prompts": CLOSING_PROMPTS, "seed": CLOSING_SEED}
    greedy = evaluate(policy, task, config, temperature=0.0, **settings)
    several = evaluate(policy, task, config, samples=samples, **settings)
    found = {
        "samples": samples,
        "greedy_P": greedy.reward_PK[:, 0].tolist(),
        "correct_P": several.reward_PK.sum(1).tolist(),
    }
    write_json(run_dir / "closing.json", found)


def closed(run_dir: Path) -> dict[str, float]:
    """Greedy accuracy, accuracy of a sample and pass@k at the end; empty where there was no
    ``close``.
    """
    path = run_dir / "closing.json"
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    correct_P, samples = found["correct_P"], found["samples"]
    return {
        "greedy": fmean(found["greedy_P"]),
        "sampled": fmean(correct_P) / samples,
        f"pass@{samples}": fmean(correct > 0 for correct in correct_P),
    }


def finished(run_dir: Path) -> bool:
    return (run_dir / "finished").is_file()


def metrics_at_end(run_dir: Path, key: str, last: int = 5) -> float:
    """The mean of a key of metrics.jsonl over the last batches; NaN where it is missing."""
    values = [
        row[key]
        for row in read_jsonl(run_dir / "metrics.jsonl")[-last:]
        if row.get(key) is not None
    ]
    return fmean(values) if values else float("nan")
