"""Milliseconds per member and batch when many members train at once, for every preset.

    python benchmarks/bench_arena.py --members 32 --out arena.json
    python benchmarks/bench_arena.py --members 8 --methods grpo --runs 2    # on two CPU cores

A Llama of 0.9 M parameters with random weights answers arithmetic prompts: 32 x 8 rollouts of 40
tokens per batch and member, 4 updates. The grader does its usual work, and then draws the reward
from a hash of the answer, so that groups are mixed and no method rests. ``--runs`` times the
trainer too: as many runs at the same time, a process and a thread each; what one takes for a batch
is divided by their number.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from machine import device_name, now
from transformers import LlamaConfig, LlamaForCausalLM

from counterpoise.arena.batch import bench_of
from counterpoise.arena.collect import collect_stack
from counterpoise.arena.crew import Crew
from counterpoise.arena.member import Member
from counterpoise.arena.shared import shares_stack
from counterpoise.arena.stack import stack_of
from counterpoise.arena.update import apply_updates
from counterpoise.catalogue.presets import PRESETS
from counterpoise.catalogue.registry import method as make_method
from counterpoise.policy import REFERENCE, Policy, load_model
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.config import Config, parse_config
from counterpoise.trainer.importance import score_tokens
from counterpoise.trainer.update import adamw, apply_update
from counterpoise.types import Prompt

PARTS = ("collect", "update")
# methods for conversations: an environment cannot be stacked
TURNS = {"turn_rloo", "gigpo", "mt_grpo", "igpo", "turn_credit"}


class Mixed(Arithmetic):
    """Arithmetic whose reward is 1 for about a third of all answers, whatever they say; the second
    half of each counts as the answer.
    """

    def reward(self, prompt: Prompt, text: str) -> float:
        right = super().reward(prompt, text)
        return max(right, float(zlib.crc32(text.encode()) % 3 == 0))

    def answer_start(self, prompt: Prompt, text: str) -> int:
        return len(text) // 2


def small_llama(policy: Policy, device: str) -> Policy:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=policy.model.config.vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return policy._replace(model=LlamaForCausalLM(config).to(device))


def recipe(seed: int, name: str, args: argparse.Namespace) -> Config:
    return parse_config(
        {
            "seed": seed,
            "method": {"name": name},
            "num_batches": 100,
            "rollouts": {"prompts": 32, "group_size": 8, "max_new_tokens": args.tokens},
            "optimizer": {"lr": 1e-5, "updates_per_batch": 4},
            "device": args.device,
        }
    )


def time_method(
    name: str, policy: Policy, crew: Crew, args: argparse.Namespace
) -> dict[str, float]:
    """Median milliseconds per member and batch, whole and by part."""
    method = make_method(name)
    members = [Member(recipe(seed, name, args), method) for seed in range(args.members)]
    bench, times = bench_of(stack_of(policy.model, args.members), crew), []
    for number in range(args.batches + 2):
        marks = [now()]
        collected = collect_stack(bench, members, number)
        marks.append(now())
        apply_updates(bench, members, collected)
        marks.append(now())
        for member, prepared in zip(members, collected.prepared):
            member.state, member.num_prompts = prepared.state, member.num_prompts + 32
        times.append([b - a for a, b in itertools.pairwise(marks)])
    assert not any(member.stopped for member in members)
    return medians(times[2:], args.members)


def time_runs(name: str, args: argparse.Namespace) -> dict[str, float]:
    """The same of separate runs, ``args.runs`` of them at the same time."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.runs, mp_context=spawn) as pool:
        jobs = [pool.submit(time_run, name, seed, args) for seed in range(args.runs)]
        times = [row for job in jobs for row in job.result()]
    return medians(times, args.runs)


def time_run(name: str, seed: int, args: argparse.Namespace) -> list[list[float]]:
    """Seconds of each batch of one run in this process, by part."""
    torch.set_num_threads(1)
    config, method, task = recipe(seed, name, args), make_method(name), Mixed()
    policy, times = small_llama(load_model("bundled"), args.device), []
    has_reference = bool(method.needs & REFERENCE)
    reference = small_llama(policy, args.device).model if has_reference else None
    optimizer = adamw(policy.model, config.optimizer)
    for number in range(args.batches + 2):
        marks = [now()]
        sampler = RolloutSampler(policy, task, config, number, needs=method.needs)
        collected = measure_columns(policy, method, config, collect(method, sampler), reference)
        collected, _ = score_tokens(policy, method, task, config, collected, number)
        credit = method.assign(collected.batch)
        marks.append(now())
        for row_R in method.plan(collected.batch, config.optimizer.updates_per_batch):
            rows = method.rows(collected.batch, credit, row_R)
            apply_update(policy.model, optimizer, method, rows, collected, config)
        marks.append(now())
        times.append([b - a for a, b in itertools.pairwise(marks)])
    return times[2:]


def medians(times: Sequence[Sequence[float]], num_members: int) -> dict[str, float]:
    def median(values: Sequence[float]) -> float:
        return round(1000 * statistics.median(values) / num_members, 3)

    parts = {name: median([row[k] for row in times]) for k, name in enumerate(PARTS)}
    return {"total": median([sum(row) for row in times]), **parts}


def tell(name: str, row: dict[str, float]) -> None:
    print(f"{name:14}", "  ".join(f"{part} {ms:7.2f}" for part, ms in row.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--batches", type=int, default=5)
    stacked = [name for name in PRESETS if name not in TURNS and shares_stack(make_method(name))]
    parser.add_argument("--methods", nargs="*", default=stacked)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--runs", type=int, default=0, help="time so many separate runs too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    policy = load_model("bundled")
    workers = max(0, (os.cpu_count() or 1) - 2) if args.workers is None else args.workers
    crew = Crew(policy, Mixed(), recipe(0, "grpo", args), workers if args.device == "cuda" else 0)
    policy = small_llama(policy, args.device)
    rows = {}
    for name in args.methods:
        rows[name] = time_method(name, policy, crew, args)
        tell(name, rows[name])
        if args.runs:
            rows[f"{name}, separate runs"] = time_runs(name, args)
            tell(f"{args.runs} runs", rows[f"{name}, separate runs"])
    crew.close()
    if args.out:
        facts = {"machine": device_name(), "settings": {k: str(v) for k, v in vars(args).items()}}
        args.out.write_text(json.dumps({**facts, "ms_per_member_and_batch": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
