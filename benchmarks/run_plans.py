"""E5 of docs/claims.md: do whole prompts and balanced signs in an optimizer step improve training? The bundled model, several seeds a plan.

    python benchmarks/run_plans.py --seeds 5 --jobs 15 --out benchmarks/results/claims_plans

Runs of one seed see the same prompts and start from the same weights; they differ by the plan alone. ``final`` is held-out accuracy after
the last rollout batch, ``mean`` the average over all evaluations after the first (who learns sooner). Differences are against shuffled rows,
seed by seed, with 95% bootstrap intervals over seeds. Runs that are there are not made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from counterpoise.files import read_jsonl

PLANS = ("random_rows", "query_preserved", "reward_balanced")
COMMAND = [sys.executable, "-c", "from counterpoise.cli import main; main()", "train", "recipes/demo.yaml", "--json", "--fresh"]


def main() -> None:
    args = arguments()
    cases = [(plan, seed) for seed in range(args.seeds) for plan in PLANS]
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = [row for found in pool.map(lambda case: trained(case[0], case[1], args), cases) for row in found]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "accuracy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"command": ["python", "benchmarks/run_plans.py", *sys.argv[1:]], "numbers": numbers(rows)}
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for plan, found in summary["numbers"].items():
        print(plan, json.dumps(found))


def trained(plan: str, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Held-out accuracies of one run."""
    run_dir = args.runs / f"{plan}-{seed}"
    settings = {"run_dir": run_dir, "seed": seed, "method.plan": plan, "num_steps": args.steps, "eval.every": args.eval_every}
    settings |= {
        "ledger.every": 0,
        "checkpoint_every": 0,
        "keep_every": 0,
        "save_rollouts_every": 0,
        "trackers": "[]",
        "device": "cpu",
    }
    evals = read_jsonl(run_dir / "evals.jsonl")
    if not evals or evals[-1]["step"] < args.steps:
        given = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
        done = subprocess.run(
            [*COMMAND, *given], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
        )
        evals = read_jsonl(run_dir / "evals.jsonl")
        print(f"{plan} seed {seed}: {'done' if done.returncode == 0 else done.stderr.strip().splitlines()[-1]}", flush=True)
    return [{"plan": plan, "seed": seed, "step": row["step"], "accuracy": row["eval/accuracy"]} for row in evals]


def numbers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Final and mean accuracy of each plan, and their differences against shuffled rows."""
    last = max(row["step"] for row in rows)
    out: dict[str, Any] = {}
    scores = {name: by_seed(rows, name, last) for name in PLANS}
    for plan, found in scores.items():
        out[plan] = {key: [round(value, 4) for value in values] for key, values in found.items()}
        for key, values in found.items():
            out[plan][f"{key}_average"] = round(float(np.mean(values)), 4)
            if plan != PLANS[0]:
                out[plan][f"{key}_difference"] = interval(np.array(values) - np.array(scores[PLANS[0]][key]))
    return out


def by_seed(rows: list[dict[str, Any]], plan: str, last: int) -> dict[str, list[float]]:
    own = [row for row in rows if row["plan"] == plan]
    seeds = sorted({row["seed"] for row in own})
    later = {seed: [row["accuracy"] for row in own if row["seed"] == seed and row["step"] > 0] for seed in seeds}
    final = {row["seed"]: row["accuracy"] for row in own if row["step"] == last}
    return {"final": [final[seed] for seed in seeds], "mean": [float(np.mean(later[seed])) for seed in seeds]}


def interval(value_S: np.ndarray) -> dict[str, float]:
    draws = np.random.default_rng(0).choice(value_S, (2000, len(value_S))).mean(1)
    low, high = np.percentile(draws, (2.5, 97.5))
    return {"mean": round(float(value_S.mean()), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/plans"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/claims_plans"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time, one thread each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
