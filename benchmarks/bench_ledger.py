"""What the ledger costs: time as a multiple of the batch it explains, by stage; growth with
tokens; peak memory; the head kernel.

    python benchmarks/bench_ledger.py [--recipe recipes/demo.yaml] [--set rollouts.prompts=32]
    [--repeats 3] [--axes sign] [--json PATH]

A training batch is one batch: sampling, measuring, credit, updates. ``ratio`` is
ledger / batch, ``update`` ledger / updates alone, ``slowdown`` what ``every: 10`` adds to a
run (ratio / 10). Medians after a warm-up; the ledger's time includes its table and numbers. The
table's file is written while the next batch is sampled: ``parquet`` stands beside it. Stages are
of one more batch: with a clock at each an accelerator cannot work ahead, so they add up to more.
``growth`` is ledger time a token on all prompts / on a quarter of them (1 is linear). Memory is the
peak with and without the ledger: of the accelerator where there is one, else of two processes. On a
machine that does other work meanwhile, ``--cpu-time`` counts processor time.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import device_name, now, peak

from counterpoise.catalogue.registry import method as make_method
from counterpoise.ledger.calculus.head_kernel import coupling_table, head_kernel
from counterpoise.ledger.recorder import observe
from counterpoise.run.write import write_tokens
from counterpoise.tasks import task as make_task
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.config import Config, load_config
from counterpoise.trainer.loop import ledger_recording, load_policy
from counterpoise.trainer.update import adamw, apply_update

KERNEL_SIZES = (4096, 49152, 576)  # tokens, vocabulary, hidden size: those of SmolLM2-135M
# what is timed by itself: stage -> (module, function)
STAGES = {
    "copies of weights": ("counterpoise.ledger.book", "copy_params"),
    "response": ("counterpoise.ledger.account", "response"),
    "scores before and after": ("counterpoise.ledger.account", "score_update"),
    "own parts": ("counterpoise.ledger.account", "own_parts"),
    "gradients by class": ("counterpoise.ledger.calculus.decompose", "class_gradients"),
    "forward mode": ("counterpoise.ledger.calculus.decompose", "change_along"),
    "residuals": ("counterpoise.ledger.book", "residuals"),
    "sharing": ("counterpoise.ledger.book", "sharing"),
    "token table": ("counterpoise.ledger.book", "token_table"),
    "numbers": ("counterpoise.ledger.book", "summary"),
    "solution bank": ("counterpoise.ledger.recorder", "score_solutions"),
}


class Cost(NamedTuple):
    """Seconds of one batch."""

    sample_s: float
    update_s: float
    ledger_s: float
    parquet_s: float
    num_tokens: int
    stages: dict[str, float]

    @property
    def step_s(self) -> float:
        return self.sample_s + self.update_s


class Bench(NamedTuple):
    """A recipe with its model loaded."""

    config: Config
    policy: Any
    clock: Callable[[], float]

    def batches(self, axes: list[str], prompts: int, repeats: int) -> list[Cost]:
        """The same batch ``repeats`` times after one warm-up, trained on and accounted for, and
        once more with a clock at every stage, for which an accelerator has to come to rest;
        without axes, trained on alone.
        """
        config = self.config.model_copy(
            update={
                "rollouts": self.config.rollouts.model_copy(update={"prompts": prompts}),
                "ledger": self.config.ledger.model_copy(
                    update={"every": 1 if axes else 0, "decompose": axes}
                ),
            }
        )
        method, task = make_method(**config.method), make_task(**config.task)
        optimizer = adamw(self.policy.model, config.optimizer)
        with tempfile.TemporaryDirectory() as folder:
            costs = [
                self.batch(config, method, task, optimizer, Path(folder), is_timed=number > repeats)
                for number in range(repeats + 2 if repeats else 1)
            ]
        return [cost._replace(stages=costs[-1].stages) for cost in costs[1:-1]]

    def batch(
        self,
        config: Config,
        method: Any,
        task: Any,
        optimizer: torch.optim.Optimizer,
        folder: Path,
        *,
        is_timed: bool = True,
    ) -> Cost:
        start = self.clock()
        collected = measure_columns(
            self.policy,
            method,
            config,
            collect(method, RolloutSampler(self.policy, task, config, 0, needs=method.needs)),
            None,
        )
        credit = method.assign(collected.batch)
        plan = method.plan(collected.batch, config.optimizer.updates_per_batch)
        sample_s, update_s, began = self.clock() - start, 0.0, self.clock()
        with timed_stages(self.clock) if is_timed else nullcontext({}) as stages:
            recording = ledger_recording(config, self.policy, 0)
            with observe(
                self.policy, optimizer, collected, credit, recording, 0, None, len(plan)
            ) as ledger:
                for row_R in plan:
                    rows = method.rows(collected.batch, credit, row_R)
                    ledger.before()
                    start = self.clock()
                    update = apply_update(
                        self.policy.model, optimizer, method, rows, collected, config
                    )
                    update_s += self.clock() - start
                    ledger.after(update.rows, update.loss, update.clip_factor, update.grad_norm)
            ledger_s = self.clock() - began - update_s
        start = self.clock()
        if ledger.tokens is not None:
            write_tokens(folder, 0, ledger.tokens)
        parquet_s, num_tokens = self.clock() - start, int(collected.batch.mask_NT.sum())
        return Cost(sample_s, update_s, ledger_s, parquet_s, num_tokens, stages)


@contextmanager
def timed_stages(clock: Callable[[], float]) -> Iterator[dict[str, float]]:
    """Seconds spent in each of ``STAGES`` while the block runs."""
    seconds, originals = dict.fromkeys(STAGES, 0.0), {}

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            out = function(*args, **kwargs)
            seconds[stage] += clock() - start
            return out

        return run

    for stage, (module, name) in STAGES.items():
        home = importlib.import_module(module)
        originals[stage] = home, name, getattr(home, name)
        setattr(home, name, timed(stage, getattr(home, name)))
    try:
        yield seconds
    finally:
        for home, name, function in originals.values():
            setattr(home, name, function)


def main() -> None:
    args = arguments()
    config = load_config(args.recipe, args.set)
    policy, _ = load_policy(config, make_method(**config.method))
    bench = Bench(config, policy, clock_of(args))
    if args.memory is not None:
        base = peak()
        bench.batches([args.memory] if args.memory else [], config.rollouts.prompts, repeats=0)
        print(json.dumps({"base": base, "peak": peak()}))
        return
    out: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "device": device_name(),
            "cpu": platform.machine(),
            "threads": torch.get_num_threads(),
        },
        "torch": torch.__version__,
        "clock": "processor time" if args.cpu_time else "wall",
        "command": ["python", "benchmarks/bench_ledger.py", *sys.argv[1:]],
    }
    out["cost"] = [costs(bench, axes.split("+"), args.repeats) for axes in args.axes]
    out["growth"] = growth(bench, args.repeats)
    out["memory"] = memory_here(bench) if torch.cuda.is_available() else memory_of_processes()
    out["kernel"] = kernel(args.kernel, bench.clock)
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")


def costs(bench: Bench, axes: list[str], repeats: int) -> dict[str, Any]:
    found = bench.batches(axes, bench.config.rollouts.prompts, repeats)
    names = ("step_s", "sample_s", "update_s", "ledger_s", "parquet_s")
    row: dict[str, Any] = {
        name: statistics.median(getattr(cost, name) for cost in found) for name in names
    }
    stages = found[-1].stages
    row |= {"ratio": row["ledger_s"] / row["step_s"], "update": row["ledger_s"] / row["update_s"]}
    print(
        f"{'+'.join(axes):<14} batch {row['step_s']:6.2f} s (updates {row['update_s']:.2f} s) "
        f" ledger {row['ledger_s']:6.2f} s  ratio {row['ratio']:.2f}  update {row['update']:.2f} "
        f" slowdown at every: 10 {row['ratio'] / 10:.0%}  {found[-1].num_tokens} tokens"
    )
    series = [[round(getattr(cost, name), 3) for cost in found] for name in ("step_s", "ledger_s")]
    print(f"    one after the other: batches {series[0]} s, ledgers {series[1]} s")
    print(
        "".join(f"    {name:<26}{seconds:7.3f} s\n" for name, seconds in stages.items()),
        f"    {'parquet, meanwhile':<26}{row['parquet_s']:7.3f} s\n",
        sep="",
        end="",
        flush=True,
    )
    return {
        "axes": axes,
        **row,
        "slowdown": row["ratio"] / 10,
        "num_tokens": found[-1].num_tokens,
        "series": dict(zip(("step_s", "ledger_s"), series)),
        "stages": stages,
    }


def growth(bench: Bench, repeats: int) -> dict[str, float]:
    prompts = bench.config.rollouts.prompts
    small, large = (
        bench.batches(["sign"], num, repeats) for num in (max(1, prompts // 4), prompts)
    )
    quarter, whole = (
        1e6 * statistics.median(cost.ledger_s / cost.num_tokens for cost in found)
        for found in (small, large)
    )
    print(
        f"growth         {whole / quarter:.2f} (1 is linear): {quarter:.0f} -> {whole:.0f} us a"
        " token",
        flush=True,
    )
    return {
        "ledger_us_per_token_quarter": quarter,
        "ledger_us_per_token": whole,
        "growth": whole / quarter,
    }


def memory_here(bench: Bench) -> dict[str, float]:
    """Peaks of the accelerator's memory in this process."""
    found = {}
    for name, axes in (("train", []), ("ledger", ["sign"])):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found["base"] = torch.cuda.memory_allocated()
        bench.batches(axes, bench.config.rollouts.prompts, repeats=0)
        found[name] = torch.cuda.max_memory_allocated()
    return told_memory(**found)


def memory_of_processes() -> dict[str, float]:
    """Peaks of two child processes: one trains, one trains with the ledger."""
    found = {}
    for name, axes in (("train", ""), ("ledger", "sign")):
        command = [sys.executable, __file__, *sys.argv[1:], "--memory", axes]
        done = json.loads(
            subprocess.run(command, capture_output=True, text=True, check=True)
            .stdout.strip()
            .splitlines()[-1]
        )
        found |= {"base": done["base"], name: done["peak"]}
    return told_memory(**found)


def told_memory(base: int, train: int, ledger: int) -> dict[str, float]:
    """``above`` leaves out what was there before the first batch: imports and weights."""
    found = {"base_mib": base / 2**20, "train_mib": train / 2**20, "ledger_mib": ledger / 2**20}
    found |= {"ratio": ledger / train, "above": (ledger - base) / (train - base)}
    print(
        f"memory         peak {train / 2**20:.0f} MiB without, {ledger / 2**20:.0f} MiB with:"
        f" {found['ratio']:.2f} ({found['above']:.2f} above the {base / 2**20:.0f} MiB before the"
        " first batch)",
        flush=True,
    )
    return found


def kernel(sizes: list[int], clock: Callable[[], float]) -> dict[str, float]:
    num, vocabulary, width = sizes
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden_MD = torch.randn(num, width, generator=generator).to(device)
    weight_VD = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(device)
    target_M = torch.randint(0, vocabulary, (num,), generator=generator).to(device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before, began = peak(), clock()
    found = head_kernel(hidden_MD, weight_VD, target_M)
    coupling_table(found, target_M, target_M % 32, target_M % 2)
    seconds, extra = clock() - began, peak() - before
    dense, what = 4 * num * num * vocabulary, f"{num} tokens x {vocabulary} x {width}"
    print(
        f"head kernel    {what}: {seconds:.1f} s, {extra / 2**20:.0f} MiB more ([n, n, V] would be"
        f" {dense / 2**40:.1f} TiB)"
    )
    return {"seconds": seconds, "extra_mib": extra / 2**20, "dense_mib": dense / 2**20}


def clock_of(args: argparse.Namespace) -> Callable[[], float]:
    return partial(now, time.process_time if args.cpu_time else time.perf_counter)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="recipes/demo.yaml")
    parser.add_argument(
        "--set", action="append", default=[], help="override a key of the recipe (repeatable)"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--axes", nargs="+", default=["sign", "sign+category"], help="decompositions to time"
    )
    parser.add_argument(
        "--kernel",
        type=int,
        nargs=3,
        default=KERNEL_SIZES,
        metavar=("TOKENS", "VOCABULARY", "HIDDEN"),
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="count processor time instead of time on the wall"
    )
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
