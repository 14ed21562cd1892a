"""All published methods against each other under one harness: the same model, prompts, rollouts,
optimizer and number of tuning runs.

    python benchmarks/run_methods.py --jobs 16                        # docs/results/comparison.md
    python benchmarks/run_methods.py --methods grpo delta dfpo_min --rates 3e-4 --seeds 1 2 3

Each method is its preset, unchanged. It is tuned first: one run for each learning rate with seed
``--tune-seed`` (one more where the lowest is the best); the best on the first ``--tune-prompts``
held-out prompts is taken. Then it is trained with every seed of ``--seeds`` at that rate and judged
on the other held-out prompts. Runs of one seed see the same prompts and start from the same
weights. Differences are against ``--baseline``, with Welch's intervals over seeds, simultaneous at
95% (Bonferroni): over all comparisons together a false "better" or "worse" has at most one chance
in twenty, whatever the variances. Runs that are there are
not made again; call it once more to go on."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from many_runs import Case, closed, metrics_at_end, run_all

import counterpoise as cp
from counterpoise.maths.intervals import over_seeds, welch
from counterpoise.probes.methods import every_preset

AT_END = {"length": "rollouts/length", "entropy": "entropy/mean"}


def main() -> None:
    args = arguments()
    args.deadline = time.time() + args.limit
    tuned = tune(args)
    rates = {method: best(found) for method, found in tuned.items()}
    rows = finals(args, rates)
    if not rows:
        sys.exit("No run is finished yet: call it once more to go on.")
    out = {
        "date": datetime.date.today().isoformat(),
        "command": ["python", "benchmarks/run_methods.py", *sys.argv[1:]],
        "recipe": args.recipe,
        "tuned": tuned,
        "numbers": numbers(rows, rates, args.baseline),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "accuracy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (args.out / "summary.json").write_text(json.dumps(out, indent=1) + "\n")
    print(table(out["numbers"], args.baseline))


def tune(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Held-out accuracy by method and learning rate; where the best rate is the lowest one,
    ``--lower`` is tried too.
    """
    if len(args.rates) == 1:
        return {method: {args.rates[0]: math.nan} for method in args.methods}
    found = try_rates(args, [(method, rate) for method in args.methods for rate in args.rates])
    found = {
        method: accuracy for method, accuracy in found.items() if len(accuracy) == len(args.rates)
    }
    lowest = min(args.rates, key=float)
    edge = [method for method, accuracy in found.items() if args.lower and best(accuracy) == lowest]
    lower = try_rates(args, [(method, args.lower) for method in edge])
    return {
        method: lower.get(method, {}) | accuracy
        for method, accuracy in found.items()
        if method not in edge or method in lower
    }


def try_rates(
    args: argparse.Namespace, pairs: list[tuple[str, str]]
) -> dict[str, dict[str, float]]:
    cases = {
        (method, rate): Case(
            f"tune-{method}-{rate}",
            {"seed": args.tune_seed, "method": {"name": method}, "optimizer.lr": float(rate)},
        )
        for method, rate in pairs
    }
    settings = common(args) | {"eval.every": args.batches, "eval.prompts": args.tune_prompts}
    evals = run_all(
        args.recipe,
        list(cases.values()),
        args.runs,
        jobs=args.jobs,
        settings=settings,
        deadline=args.deadline,
    )
    found: dict[str, dict[str, float]] = {}
    for (method, rate), case in cases.items():
        if case.name in evals:
            found.setdefault(method, {})[rate] = evals[case.name][-1]["eval/accuracy"]
    return found


def best(accuracy: dict[str, float]) -> str:
    return max(accuracy, key=lambda rate: accuracy[rate])


def finals(args: argparse.Namespace, rates: dict[str, str]) -> list[dict[str, Any]]:
    """A row for every run and evaluation: accuracy on the prompts that tuning did not see."""
    cases = {
        (method, seed): Case(
            f"{method}-{rate}-{seed}",
            {"seed": seed, "method": {"name": method}, "optimizer.lr": float(rate)},
        )
        for seed in args.seeds
        for method, rate in rates.items()
    }
    settings = common(args) | {
        "eval.every": args.eval_every,
        "eval.prompts": args.tune_prompts + args.prompts,
    }
    evals = run_all(
        args.recipe,
        list(cases.values()),
        args.runs,
        jobs=args.jobs,
        closing=args.closing,
        settings=settings,
        deadline=args.deadline,
    )
    return [
        {
            "method": method,
            "seed": seed,
            "rate": float(rates[method]),
            "batch": row["batch"],
            "accuracy": float(np.mean(row["reward_PK"][args.tune_prompts :])),
            **{name: metrics_at_end(args.runs / case.name, key) for name, key in AT_END.items()},
            **closed(args.runs / case.name),
        }
        for (method, seed), case in cases.items()
        for row in evals.get(case.name, [])
    ]


def common(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in args.set)
    }
    return {"num_batches": args.batches, "device": args.device, **given}


def numbers(rows: list[dict[str, Any]], rates: dict[str, str], baseline: str) -> dict[str, Any]:
    """Final accuracy, its mean over training, and the difference against the baseline; of seeds
    that every method has finished.
    """
    last = max(row["batch"] for row in rows)
    by_method = {method: [row for row in rows if row["method"] == method] for method in rates}
    seeds = sorted(
        set.intersection(
            *({row["seed"] for row in own if row["batch"] == last} for own in by_method.values())
        )
    )
    end = {
        m: {row["seed"]: row for row in own if row["batch"] == last} for m, own in by_method.items()
    }
    final = {
        method: np.array([end[method][seed]["accuracy"] for seed in seeds]) for method in rates
    }
    others = [method for method in rates if method != baseline]
    against = {
        method: welch(final[baseline], final[method], len(others))
        for method in others
        if len(seeds) > 1
    }
    out: dict[str, Any] = {}
    for method, own in by_method.items():
        curve = [
            [row["accuracy"] for row in own if row["seed"] == seed and row["batch"] > 0]
            for seed in seeds
        ]
        out[method] = {
            "rate": float(rates[method]),
            "seeds": seeds,
            "start": float(
                np.mean(
                    [row["accuracy"] for row in own if row["batch"] == 0 and row["seed"] in seeds]
                )
            ),
            "final_S": final[method].tolist(),
            "final": over_seeds(final[method].tolist()),
            "curve_mean": over_seeds([float(np.mean(values)) for values in curve]),
            **{
                name: float(np.mean([end[method][seed][name] for seed in seeds])) for name in AT_END
            },
            **closing_of([end[method][seed] for seed in seeds]),
        }
        if method in against:
            mean, low, high = against[method]
            verdict = "within noise" if low <= 0 <= high else "better" if mean > 0 else "worse"
            out[method] |= {"difference": [mean, low, high], "verdict": verdict}
    return out


def closing_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the closing evaluations over the runs that have one, and how many that are."""
    closed = [row for row in rows if "greedy" in row]
    keys = [
        key
        for key in (closed[0] if closed else {})
        if key in ("greedy", "sampled") or key.startswith("pass@")
    ]
    return {
        "num_closed": len(closed),
        **{key: float(np.mean([row[key] for row in closed])) for key in keys},
    }


def table(found: dict[str, Any], baseline: str) -> str:
    """Markdown, best first; points of percent."""
    passed = next(
        (key for row in found.values() for key in row if key.startswith("pass@")), "pass@k"
    )
    lines = [
        (
            f"| method | learning rate | accuracy, sampled | against {baseline} | verdict | mean"
            f" over training | greedy | {passed} | entropy |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, row in sorted(found.items(), key=lambda item: -item[1]["final"][0]):
        against, verdict = "", "baseline"
        if "difference" in row:
            against, verdict = (
                "{:+.1f} [{:+.1f}, {:+.1f}]".format(*(100 * x for x in row["difference"])),
                row["verdict"],
            )
        final = "{:.1f}% [{:.1f}, {:.1f}]".format(*(100 * x for x in row["final"]))
        beside = [f"{100 * row[key]:.1f}%" if key in row else "" for key in ("greedy", passed)]
        cells = [
            f"`{method}`",
            f"{row['rate']:g}",
            final,
            against,
            verdict,
            f"{100 * row['curve_mean'][0]:.1f}%",
            *beside,
        ]
        lines.append(f"| {' | '.join(cells)} | {row['entropy']:.2f} |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="override a key of the recipe for all runs (repeatable)",
    )
    parser.add_argument("--methods", nargs="+", default=every_preset(), metavar="NAME")
    parser.add_argument("--baseline", default="grpo")
    parser.add_argument(
        "--rates", nargs="+", default=["1e-4", "3e-4", "1e-3"], help="learning rates to choose from"
    )
    parser.add_argument(
        "--lower", default="3e-5", help="one more rate where the lowest is the best; empty for none"
    )
    parser.add_argument("--tune-seed", type=int, default=0)
    parser.add_argument("--tune-prompts", type=int, default=400)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--batches", type=int, default=25, help="batches of a run")
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument(
        "--prompts",
        type=int,
        default=800,
        help="held-out prompts that judge, beside those of tuning",
    )
    parser.add_argument(
        "--closing",
        type=int,
        default=8,
        help="samples a prompt of the last evaluation, for pass@k; greedy beside it",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/methods"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/methods_bundled"))
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="runs at the same time, one thread each",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="begin no run after so many seconds"
    )
    args = parser.parse_args()
    for name in args.methods:
        cp.method(name)  # an unknown one is an error that names the nearest
    if args.baseline not in args.methods:
        parser.error(
            f"--baseline {args.baseline}: not among the methods. Add it to --methods or choose one"
            f" of {', '.join(args.methods)}."
        )
    return args


if __name__ == "__main__":
    main()
