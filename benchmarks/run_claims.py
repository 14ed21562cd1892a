"""The experiments of docs/results/claims.md and credit.md: train by a recipe, probe snapshots of
the run, keep raw data and numbers.

    python benchmarks/run_claims.py --recipe recipes/demo.yaml --batches 31 \\
        --probe-at 10 20 30 --out benchmarks/results/claims_bundled
    python benchmarks/run_claims.py --recipe recipes/smollm2_asdiv.yaml \\
        --set task.path=asdiv.jsonl --batches 81 --probe-at 40 60 80 --out OUT
    python benchmarks/run_claims.py --batches 41 --probe-at 0 20 40 --limit 3600 \\
        --probes localisation token_value gradient --out benchmarks/results/credit_bundled
    python benchmarks/run_claims.py --numbers OUT  # numbers of raw data that came without them

Finished stages are skipped: call it again with the same arguments to continue. Every stage runs
even if one before it failed; no stage begins after ``--limit`` seconds. ``stages.json`` holds the
seconds of each stage and what went wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from counterpoise.probes import PROBES, Scene, open_scene, pool, run_probe
from counterpoise.probes.output import read
from counterpoise.probes.runner import last_batch, make_tables
from counterpoise.run.files import batch_of
from counterpoise.text import load_yaml
from counterpoise.trainer.config import Config, load_config
from counterpoise.trainer.loop import train
from counterpoise.trainer.progress import Progress

AT_EVERY_STEP = ("counterfactual", "coupling", "value", "tax", "exchangeability")
SMALL_FILES = ("config.yaml", "manifest.json", "metrics.jsonl", "timing.jsonl", "evals.jsonl")
HAS_NUMBERS = all(importlib.util.find_spec(name) for name in ("pandas", "plotly"))


class Stages:
    """Runs one thing after another within a time limit and keeps what each took."""

    def __init__(self, limit_s: float) -> None:
        self.began, self.limit_s = time.perf_counter(), limit_s
        self.done: list[dict[str, Any]] = []

    @property
    def left_s(self) -> float:
        return self.limit_s - (time.perf_counter() - self.began)

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of ``work``; None if it failed or if no time is left.

        One experiment that fails must not cost the others.
        """
        if self.left_s <= 0:
            return self.tell(name, 0.0, "not begun: the time limit is reached")
        start = time.perf_counter()
        try:
            result = work()
        except Exception as error:
            return self.tell(name, time.perf_counter() - start, f"{type(error).__name__}: {error}")
        self.tell(name, time.perf_counter() - start, None)
        return result

    def tell(self, name: str, seconds: float, problem: str | None) -> None:
        self.done.append({"stage": name, "seconds": round(seconds, 2), "problem": problem})
        print(f"{name:<28} {seconds:8.1f} s  {problem or 'done'}", flush=True)


def main() -> None:
    args = arguments()
    if args.numbers:
        numbers(args.numbers)
        return
    stages, run_dir = Stages(args.limit), args.run
    config = recipe(args)
    stages.run("train", lambda: trained(config, stages.left_s))
    settings = probe_settings(args.probe_set)
    if args.ledger_every:
        stages.run("flips", lambda: probed(run_dir, "flips", None, {}))
    for step in args.probe_at:
        scene = stages.run(
            f"open batch {step}", lambda step=step: open_scene(run_dir, step, trust=True)
        )
        last = "drift" if step == args.probe_at[-1] and args.probes == AT_EVERY_STEP else None
        names = [*args.probes, *filter(None, [last])]
        for name in names if scene else []:
            stages.run(
                f"{name} batch {step}",
                lambda name=name, scene=scene: probed(run_dir, name, scene, settings.get(name, {})),
            )
    if HAS_NUMBERS:
        for name in args.probes:
            stages.run(f"{name} pooled", lambda name=name: pool(run_dir, name))
    kept(run_dir, args.out)
    (args.out / "stages.json").write_text(
        json.dumps({"limit_s": args.limit, "stages": stages.done}, indent=1) + "\n"
    )
    print(f"results: {args.out}")


def recipe(args: argparse.Namespace) -> Config:
    """The recipe with what the experiments need: checkpoints at the probed batches, the ledger, one
    evaluation at each end.
    """
    every = math.gcd(*args.probe_at)
    own = {
        "run_dir": args.run,
        "num_batches": args.batches,
        "keep_every": every,
        "checkpoint_every": every,
        "eval.every": args.batches,
    }
    own |= {"ledger.every": args.ledger_every, "trackers": "[]"}
    own |= {"ledger.bank": 64} if args.ledger_every else {}
    return load_config(args.recipe, [f"{key}={value}" for key, value in own.items()] + args.set)


def trained(config: Config, limit_s: float) -> None:
    """Train, or go on; a run that is out of time stops after its batch and can be continued."""
    timer = threading.Timer(limit_s, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        result = train(
            config,
            resume=(Path(config.run_dir) / "manifest.json").is_file(),
            progress=Progress(quiet=True),
        )
    finally:
        timer.cancel()
    if not result.is_finished:
        raise TimeoutError(
            f"training stopped after batch {result.batch_number} of {config.num_batches};"
            " run the same command"
            " to go on"
        )


def probed(run_dir: Path, name: str, scene: Scene | None, settings: dict[str, Any]) -> Any:
    """A probe's tables, and its numbers and figure where they can be made."""
    batch = scene.batch_number if scene else last_batch(run_dir, PROBES[name].needs_snapshot)
    return (run_probe if HAS_NUMBERS else make_tables)(run_dir, name, batch, settings, scene=scene)


def probe_settings(texts: list[str]) -> dict[str, dict[str, Any]]:
    """``["value.pairs=60"]`` -> ``{"value": {"pairs": 60}}``."""
    out: dict[str, dict[str, Any]] = {}
    for text in texts:
        key, _, value = text.partition("=")
        name, _, setting = key.partition(".")
        out.setdefault(name, {})[setting] = load_yaml(value, text)
    return out


def kept(run_dir: Path, out: Path) -> None:
    """Raw data, numbers and the run's small files; no checkpoints, no rollouts, no pages."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SMALL_FILES:
        if (run_dir / name).is_file():
            shutil.copy(run_dir / name, out / name)
    if (run_dir / "probes").is_dir():
        shutil.copytree(
            run_dir / "probes",
            out / "probes",
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("*.html"),
        )


def numbers(out: Path) -> None:
    """Summaries of every probe from its tables, one batch at a time and pooled."""
    for started in sorted(out.glob("probes/*/batch_*/started.json")):
        facts, folder = json.loads(started.read_text()), started.parent
        tables = {path.stem: read(path) for path in sorted(folder.glob("*.parquet"))}
        PROBES[facts["probe"]].summary(folder, facts, tables)
        print(f"{facts['probe']} of batch {batch_of(folder)}")
    for folder in sorted((out / "probes").iterdir()):
        if PROBES[folder.name].can_pool:
            pool(out, folder.name)
    for page in out.glob("probes/*/*/figure.html"):
        page.unlink()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument(
        "--run", type=Path, default=Path("runs/claims"), help="run folder (checkpoints, rollouts)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/claims_bundled"), help="what is kept"
    )
    parser.add_argument("--batches", type=int, default=31, help="batches to train")
    parser.add_argument(
        "--probe-at", type=int, nargs="+", default=[10, 20, 30], help="batches to probe"
    )
    parser.add_argument("--probes", nargs="+", default=AT_EVERY_STEP, choices=PROBES)
    parser.add_argument("--ledger-every", type=int, default=5, help="0: no ledger, no flips")
    parser.add_argument(
        "--limit", type=float, default=480.0, help="no stage begins after so many seconds"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        help="override a key of the recipe: --set optimizer.lr=1e-4",
    )
    parser.add_argument(
        "--probe-set",
        action="append",
        default=[],
        help="a setting of a probe: --probe-set value.pairs=60",
    )
    parser.add_argument(
        "--numbers", type=Path, help="make the numbers of an --out folder and do nothing else"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
