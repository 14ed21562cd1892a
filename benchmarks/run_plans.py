"""E5 of docs/results/claims.md: do whole prompts and balanced signs in an update improve training?
The bundled model, several seeds a plan.

    python benchmarks/run_plans.py --seeds 5 --jobs 15 --out benchmarks/results/claims_plans

Runs of one seed see the same prompts and start from the same weights; they differ by the plan
alone. ``final`` is held-out accuracy after the last batch, ``mean`` the average over all
evaluations after the first (who learns sooner). Differences are against shuffled rows, seed by
seed, with Student's 95% t intervals. Runs that are there are not made again."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from many_runs import Case, run_all

from counterpoise.maths.intervals import over_seeds

PLANS = ("random_rows", "query_preserved", "reward_balanced")


def main() -> None:
    args = arguments()
    cases = {
        (plan, seed): Case(f"{plan}-{seed}", {"seed": seed, "method.plan": plan})
        for seed in range(args.seeds)
        for plan in PLANS
    }
    settings = {"num_batches": args.batches, "eval.every": args.eval_every, "device": "cpu"}
    evals = run_all(
        "recipes/demo.yaml", list(cases.values()), args.runs, jobs=args.jobs, settings=settings
    )
    rows = [
        {"plan": plan, "seed": seed, "batch": row["batch"], "accuracy": row["eval/accuracy"]}
        for (plan, seed), case in cases.items()
        for row in evals.get(case.name, [])
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "accuracy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {
        "command": ["python", "benchmarks/run_plans.py", *sys.argv[1:]],
        "numbers": numbers(rows),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for plan, found in summary["numbers"].items():
        print(plan, json.dumps(found))


def numbers(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Final and mean accuracy of each plan, and their differences against shuffled rows."""
    last = max(row["batch"] for row in rows)
    out: dict[str, Any] = {}
    scores = {name: by_seed(rows, name, last) for name in PLANS}
    for plan, found in scores.items():
        out[plan] = {key: [round(value, 4) for value in values] for key, values in found.items()}
        for key, values in found.items():
            out[plan][f"{key}_average"] = round(float(np.mean(values)), 4)
            if plan != PLANS[0]:
                out[plan][f"{key}_difference"] = interval(
                    np.array(values) - np.array(scores[PLANS[0]][key])
                )
    return out


def by_seed(rows: list[dict[str, Any]], plan: str, last: int) -> dict[str, list[float]]:
    own = [row for row in rows if row["plan"] == plan]
    seeds = sorted({row["seed"] for row in own})
    later = {
        seed: [row["accuracy"] for row in own if row["seed"] == seed and row["batch"] > 0]
        for seed in seeds
    }
    final = {row["seed"]: row["accuracy"] for row in own if row["batch"] == last}
    return {
        "final": [final[seed] for seed in seeds],
        "mean": [float(np.mean(later[seed])) for seed in seeds],
    }


def interval(value_S: np.ndarray) -> dict[str, float]:
    return {name: round(x, 4) for name, x in over_seeds(value_S.tolist())._asdict().items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/plans"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/claims_plans"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=25)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="runs at the same time, one thread each",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
