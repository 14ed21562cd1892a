"""What the ledger costs: time as a multiple of the training step it explains, growth with tokens, peak memory, and the head kernel.

    python benchmarks/bench_ledger.py [--json PATH] [--model bundled] [--prompts 32 --group-size 8 --max-new-tokens 96]

A training step is one rollout batch: sampling, measuring, credit, optimizer steps. ``ratio`` is ledger / step, ``update`` ledger / optimizer
steps alone, ``slowdown`` what ``every: 10`` adds to a run (ratio / 10). Medians after a warm-up; the ledger's time includes its table and
numbers. ``growth`` is ledger time a token on all prompts / on a quarter of them (1 is linear). Memory is the peak of a process that trains
with and of one that trains without the ledger. On a machine that does other work meanwhile, ``--cpu-time`` counts processor time.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from counterpoise.ledger import coupling_table, head_kernel
from counterpoise.presets import method as make_method
from counterpoise.tasks import task as make_task
from counterpoise.trainer.checkpoint import LoopState
from counterpoise.trainer.collect import collect, measured
from counterpoise.trainer.config import Config, parse_config
from counterpoise.trainer.loop import load_policy
from counterpoise.trainer.observe import observe
from counterpoise.trainer.update import adamw, take_step

KERNEL_SIZES = (4096, 49152, 576)  # tokens, vocabulary, hidden size: those of SmolLM2-135M


class Cost(NamedTuple):
    """Seconds of one rollout batch."""

    step_s: float
    update_s: float
    ledger_s: float
    num_tokens: int


def main() -> None:
    args = arguments()
    if args.memory is not None:
        base = peak()
        batches(args, [args.memory] if args.memory else [], args.prompts, repeats=1)
        print(json.dumps({"base_bytes": base, "peak_bytes": peak()}))
        return
    out: dict[str, Any] = {
        "device": device_name(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "args": vars(args),
    }
    out["cost"] = [costs(args, axes) for axes in (["sign"], ["sign", "category"])]
    out["growth"] = growth(args)
    out["memory"] = memory(args)
    out["kernel"] = kernel(args)
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")


def costs(args: argparse.Namespace, axes: list[str]) -> dict[str, Any]:
    found = batches(args, axes, args.prompts, args.repeats)
    step_s, update_s, ledger_s = (
        statistics.median(getattr(cost, name) for cost in found) for name in ("step_s", "update_s", "ledger_s")
    )
    row = {"axes": axes, "step_s": step_s, "update_s": update_s, "ledger_s": ledger_s, "num_tokens": found[-1].num_tokens}
    row |= {"ratio": ledger_s / step_s, "update": ledger_s / update_s, "slowdown": ledger_s / step_s / 10}
    print(
        f"{'+'.join(axes):<14} step {step_s:6.2f} s (updates {update_s:.2f} s)  ledger {ledger_s:6.2f} s  "
        f"ratio {row['ratio']:.2f}  update {row['update']:.2f}  slowdown at every: 10 {row['slowdown']:.0%}",
        flush=True,
    )
    return row


def growth(args: argparse.Namespace) -> dict[str, float]:
    small, large = (batches(args, ["sign"], prompts, args.repeats) for prompts in (max(1, args.prompts // 4), args.prompts))
    per_token = [statistics.median(cost.ledger_s / cost.num_tokens for cost in found) for found in (small, large)]
    found = {
        "ledger_us_per_token_quarter": 1e6 * per_token[0],
        "ledger_us_per_token": 1e6 * per_token[1],
        "growth": per_token[1] / per_token[0],
    }
    print(
        f"growth         {found['growth']:.2f} (1 is linear): {1e6 * per_token[0]:.0f} -> {1e6 * per_token[1]:.0f} us a token",
        flush=True,
    )
    return found


def memory(args: argparse.Namespace) -> dict[str, float]:
    """Peaks of two child processes: one trains, one trains with the ledger. ``above`` leaves out what was there before the first batch."""
    base, train, ledger = 0, 0, 0
    for axes in ("", "sign"):
        command = [sys.executable, __file__, *sys.argv[1:], "--memory", axes]
        done = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip().splitlines()[-1])
        base, train, ledger = done["base_bytes"], done["peak_bytes"] if not axes else train, done["peak_bytes"]
    found = {"base_mib": base / 2**20, "train_mib": train / 2**20, "ledger_mib": ledger / 2**20}
    found |= {"ratio": ledger / train, "above": (ledger - base) / (train - base)}
    print(
        f"memory         peak {train / 2**20:.0f} MiB without, {ledger / 2**20:.0f} MiB with: {found['ratio']:.2f} "
        f"({found['above']:.2f} above the {base / 2**20:.0f} MiB of imports)",
        flush=True,
    )
    return found


def kernel(args: argparse.Namespace) -> dict[str, float]:
    num, vocabulary, width = args.kernel
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden_MD = torch.randn(num, width, generator=generator).to(device)
    weight_VD = (torch.randn(vocabulary, width, generator=generator) / width**0.5).to(device)
    target_M = torch.randint(0, vocabulary, (num,), generator=generator).to(device)
    before, began = peak(), now(args)
    found = head_kernel(hidden_MD, weight_VD, target_M)
    coupling_table(found, target_M, target_M % 32, target_M % 2)
    seconds, extra = now(args) - began, peak() - before
    dense, what = 4 * num * num * vocabulary, f"{num} tokens x {vocabulary} x {width}"
    print(f"head kernel    {what}: {seconds:.1f} s, {extra / 2**20:.0f} MiB more ([n, n, V] would be {dense / 2**40:.1f} TiB)")
    return {"seconds": seconds, "extra_mib": extra / 2**20, "dense_mib": dense / 2**20}


def batches(args: argparse.Namespace, axes: list[str], prompts: int, repeats: int) -> list[Cost]:
    """The same rollout batch ``repeats`` times after one warm-up, trained on and accounted for; without axes, trained on alone."""
    config = config_of(args, axes, prompts)
    method, task = make_method(**config.method), make_task(**config.task)
    policy, _ = load_policy(config, method)
    optimizer, out = adamw(policy.model, config.optimizer), []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats + 1):
            marks = [now(args)]
            collected = measured(policy, method, config, collect(policy, task, config, 0, 0), None)
            credit = method.assign(collected.batch)
            plan = method.plan(collected.batch, config.optimizer.steps_per_batch)
            marks.append(now(args))
            ledger_s = update_s = 0.0
            start = now(args)
            with observe(Path(folder), policy, optimizer, collected, credit, config, LoopState()) as ledger:
                ledger_s += now(args) - start
                for row_R in plan:
                    rows = method.rows(collected.batch, credit, row_R)
                    times = [now(args)]
                    ledger.before()
                    times.append(now(args))
                    update = take_step(policy.model, optimizer, method, rows, collected, config)
                    times.append(now(args))
                    ledger.after(update)
                    times.append(now(args))
                    ledger_s += (times[1] - times[0]) + (times[3] - times[2])
                    update_s += times[2] - times[1]
                start = now(args)
            ledger_s += now(args) - start
            out.append(Cost(marks[1] - marks[0] + update_s, update_s, ledger_s, int(collected.batch.mask_NT.sum())))
    return out[1:]


def config_of(args: argparse.Namespace, axes: list[str], prompts: int) -> Config:
    return parse_config(
        {
            "model": args.model,
            "task": {"name": "arithmetic"},
            "method": {"name": args.method},
            "rollouts": {"prompts": prompts, "group_size": args.group_size, "max_new_tokens": args.max_new_tokens},
            "optimizer": {"lr": 1e-5, "steps_per_batch": args.steps_per_batch},
            "ledger": {"every": 1 if axes else 0, "decompose": axes},
            "trackers": [],
        }
    )


def peak() -> int:
    """Most memory of this process so far: of the accelerator where there is one, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.is_file():  # getrusage would start from the peak of the process that started this one
        return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def now(args: argparse.Namespace) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.process_time() if args.cpu_time else time.perf_counter()


def device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--method", default="grpo")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--steps-per-batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernel", type=int, nargs=3, default=KERNEL_SIZES, metavar=("TOKENS", "VOCABULARY", "HIDDEN"))
    parser.add_argument("--cpu-time", action="store_true", help="count processor time instead of time on the wall")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
