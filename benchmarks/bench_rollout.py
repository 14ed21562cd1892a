"""Sampling speed: our engine, our generic path, ``generate`` with a dynamic cache, ``generate`` with a static cache and torch.compile.

    python benchmarks/bench_rollout.py --model bundled --rows 256
    python benchmarks/bench_rollout.py --model smollm2 --rows 512 2048 --dtype bfloat16 --compile

Ratios within one run: medians of several repetitions after a warm-up, everybody samples the same number of tokens (stop tokens are off).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from counterpoise.rollouts import load_model, sample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--compile", action="store_true", help="also generate with a static cache and torch.compile (slow to start)"
    )
    parser.add_argument("--json", help="write the numbers to this file")
    args = parser.parse_args()
    began = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(args.model, dtype=getattr(torch, args.dtype), device=device).model.eval()
    out = []
    for rows in args.rows:
        prompt_ids = torch.randint(5, model.config.vocab_size, (rows // args.group_size, args.prompt_tokens)).tolist()
        for name, run in contestants(model, prompt_ids, args).items():
            first = timed(run)
            seconds = statistics.median(timed(run) for _ in range(args.repeats))
            speed = rows * args.new_tokens / seconds
            out.append({"rows": rows, "name": name, "tokens_per_s": round(speed), "first_call_s": round(first, 2)})
            print(f"{rows:>5} rows  {name:<18} {speed:>10,.0f} tokens/s   first call {first:.1f} s", flush=True)
        base = next(o for o in out if o["rows"] == rows and o["name"] == "generate")
        for o in out:
            if o["rows"] == rows:
                o["ratio_to_generate"] = round(o["tokens_per_s"] / base["tokens_per_s"], 2)
        print("      ratio to generate:", {o["name"]: o["ratio_to_generate"] for o in out if o["rows"] == rows}, flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    facts = {
        "device": name,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "args": vars(args),
        "date": time.strftime("%Y-%m-%d"),
    }
    if args.json:
        with open(args.json, "w") as file:
            json.dump({**facts, "since_start_s": round(time.perf_counter() - began, 1), "results": out}, file, indent=1)


def contestants(model, prompt_ids: list[list[int]], args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """What is compared; every one draws from the untruncated distribution at temperature 1."""
    ours = dict(group_size=args.group_size, max_new_tokens=args.new_tokens, stop_ids=[-1], seed=0, max_rows=1 << 30)
    whole = torch.tensor([prompt for prompt in prompt_ids for _ in range(args.group_size)], device=model.device)
    theirs = dict(
        attention_mask=torch.ones_like(whole),
        do_sample=True,
        top_k=0,
        min_new_tokens=args.new_tokens,
        max_new_tokens=args.new_tokens,
    )
    runs = {
        "engine": lambda: sample(model, prompt_ids, **ours),
        "generic path": lambda: sample(model, prompt_ids, engine=False, **ours),
        "generate": lambda: model.generate(whole, **theirs),
    }
    if args.compile:
        runs["generate compiled"] = lambda: model.generate(whole, cache_implementation="static", **theirs)
    return runs


def timed(run: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    with torch.no_grad():
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
