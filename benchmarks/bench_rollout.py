"""Sampling speed: our engine, our generic path, ``generate`` with a dynamic cache or a static one
and torch.compile, vLLM if installed (``--model`` must be a Hugging Face folder for it).

    python benchmarks/bench_rollout.py --model bundled --rows 256
    python benchmarks/bench_rollout.py --model smollm2 --rows 512 2048 --dtype bfloat16 --compile
    python benchmarks/bench_rollout.py --turns --rows 256 --repeats 7

Ratios within one run: medians of several repetitions after a warm-up, everybody samples the same
number of tokens (stop tokens are off). The time to the first token of all rows is that of a call
for one token.
``--turns`` times conversations with the built-in environments instead, against single-turn sampling
of as many rows of the same mean length (turns and replies), all drawn.
``--first-token`` also times a fresh process from its start to its first token (model on disk,
kernels compiled before or not)."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from machine import now

from counterpoise.policy import Policy, encode_prompts, load_model
from counterpoise.sampling import Rollouts, sample
from counterpoise.sampling.conversation import converse
from counterpoise.sampling.play import Play
from counterpoise.tasks import task
from counterpoise.trainer.config import Config, parse_config
from counterpoise.trainer.conversations import begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--rows", type=int, nargs="+", default=[256])
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--compile",
        action="store_true",
        help="also generate with a static cache and torch.compile (slow to start)",
    )
    parser.add_argument("--only", nargs="+", help="contestants to run; default: all")
    parser.add_argument(
        "--first-token", action="store_true", help="also time a fresh process up to its first token"
    )
    parser.add_argument("--turns", action="store_true", help="conversations, not single turns")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return one_token(args)
    first_token_s = since_start() if args.first_token else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.turns:
        return conversations(args, device)
    model = load_model(args.model, dtype=getattr(torch, args.dtype), device=device).model.eval()
    out = []
    for rows in args.rows:
        prompt_ids = torch.randint(
            5, model.config.vocab_size, (rows // args.group_size, args.prompt_tokens)
        ).tolist()
        for name, run in contestants(model, prompt_ids, args).items():
            if args.only and name not in args.only:
                continue
            first = timed(functools.partial(run, args.new_tokens))
            seconds = median_of(args.repeats, functools.partial(run, args.new_tokens))
            run(1)
            one = median_of(args.repeats, functools.partial(run, 1))
            speed = rows * args.new_tokens / seconds
            out.append(
                {
                    "rows": rows,
                    "name": name,
                    "tokens_per_s": round(speed),
                    "first_token_s": round(one, 4),
                    "first_call_s": round(first, 2),
                }
            )
            print(
                f"{rows:>5} rows  {name:<18} {speed:>10,.0f} tokens/s   first token"
                f" {1000 * one:,.0f} ms   first call {first:.1f} s",
                flush=True,
            )
        here = [o for o in out if o["rows"] == rows]
        for base in (o for o in here if o["name"] == "generate"):
            for o in here:
                o["ratio_to_generate"] = round(o["tokens_per_s"] / base["tokens_per_s"], 2)
            print(
                "      ratio to generate:",
                {o["name"]: o["ratio_to_generate"] for o in here},
                flush=True,
            )
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
            json.dump({**facts, "first_token_s": first_token_s, "results": out}, file, indent=1)


def conversations(args: argparse.Namespace, device: str) -> None:
    """Tokens per second, turns and replies, with an environment and without one."""
    policy, results = load_model("bundled_turns", device=device), []
    settings = {"max_new_tokens": 32, "max_turn_tokens": 8, "max_turns": 8}
    config = parse_config({"chat": False, "rollouts": settings})
    for rows, name in itertools.product(args.rows, ("guess", "mastermind", "lookup")):
        one = conversation_speed(policy, config, name, rows, args)
        results.append(one)
        print(
            "{rows:>5} rows  {environment:<11} {turns:.1f} turns, {tokens} tokens,"
            " {drawn_frac:.0%} drawn: {tokens_per_s:>7,} tokens/s, single turns"
            " {single_tokens_per_s:>7,}, ratio {ratio:.2f}".format(**one),
            flush=True,
        )
    if args.json:
        facts = {"device": device, "torch": torch.__version__, "args": vars(args)}
        with open(args.json, "w") as file:
            json.dump({**facts, "results": results}, file, indent=1)


def conversation_speed(
    policy: Policy, config: Config, name: str, rows: int, args: argparse.Namespace
) -> dict[str, object]:
    """One environment; both sides in turn, so that they share the neighbours of a busy machine."""
    room, how = task(name), {"group_size": args.group_size, "seed": 0}
    prompts = list(itertools.islice(room.prompts("train", 0), rows // args.group_size))
    ids = encode_prompts(policy, [prompt.text for prompt in prompts], chat=False)
    group = [p for p in range(len(prompts)) for _ in range(args.group_size)]
    row_ids = [ids[p] for p in group]

    def play() -> tuple[Play, Rollouts]:
        talk = begin(policy, room, prompts, row_ids, group, config, 0)
        limits = {"max_tokens": talk.max_tokens, "stop_ids": policy.stop_ids, "max_rows": rows}
        return talk, converse(policy.model, row_ids, talk, seed=0, **limits)

    talk, rollouts = play()
    num_tokens = int(rollouts.mask_NT.sum())
    length = round(num_tokens / rows)

    def plain() -> None:
        sample(policy.model, ids, max_new_tokens=length, stop_ids=[-1], max_rows=rows, **how)

    plain()
    pairs = [(timed(play), timed(plain)) for _ in range(args.repeats)]
    speeds = [(num_tokens / a, rows * length / b) for a, b in pairs]
    return {
        "rows": rows,
        "environment": name,
        "turns": round(sum(len(row.spans) for row in talk.rows) / rows, 2),
        "tokens": length,
        "drawn_frac": round(sum(row.num_drawn for row in talk.rows) / num_tokens, 3),
        "tokens_per_s": round(statistics.median(a for a, _ in speeds)),
        "single_tokens_per_s": round(statistics.median(b for _, b in speeds)),
        "ratio": round(statistics.median(a / b for a, b in speeds), 3),
    }


def one_token(args: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(args.model, dtype=getattr(torch, args.dtype), device=device).model.eval()
    ids = [list(range(5, 5 + args.prompt_tokens))] * (args.rows[0] // args.group_size)
    sample(
        model,
        ids,
        group_size=args.group_size,
        max_new_tokens=1,
        stop_ids=[-1],
        seed=0,
        max_rows=1 << 30,
    ).token_ids_NT.tolist()


def since_start() -> float:
    """Seconds from the start of a process to the first token of every row, the median of three
    processes.
    """
    found = []
    for _ in range(3):
        began = time.perf_counter()
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--child"], check=True)
        found.append(round(time.perf_counter() - began, 2))
    print(
        "from process start to first token", *(f"{seconds:.1f} s" for seconds in found), flush=True
    )
    return statistics.median(found)


def contestants(
    model, prompt_ids: list[list[int]], args: argparse.Namespace
) -> dict[str, Callable[[int], object]]:
    """What is compared, each a function of the number of new tokens; every one draws from the
    untruncated distribution at temperature 1.
    """
    ours = dict(group_size=args.group_size, stop_ids=[-1], seed=0, max_rows=1 << 30)
    whole = torch.tensor(
        [prompt for prompt in prompt_ids for _ in range(args.group_size)], device=model.device
    )
    theirs = dict(attention_mask=torch.ones_like(whole), do_sample=True, top_k=0)

    def generate(num: int, **more: str) -> object:
        return model.generate(whole, min_new_tokens=num, max_new_tokens=num, **theirs, **more)

    runs: dict[str, Callable[[int], object]] = {
        "engine": lambda num: sample(model, prompt_ids, max_new_tokens=num, **ours),
        "generic path": lambda num: sample(
            model, prompt_ids, max_new_tokens=num, engine=False, **ours
        ),
        "generate": generate,
    }
    if args.compile:
        runs["generate compiled"] = lambda num: generate(num, cache_implementation="static")
    if importlib.util.find_spec("vllm") is not None:
        runs["vllm"] = lambda num: vllm_generate(whole.tolist(), num, args)
    return runs


def vllm_generate(prompts: list[list[int]], num: int, args: argparse.Namespace) -> object:
    """Prompts are read anew, as ours are; within the call vLLM shares them over their rows."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    engine = vllm_engine(args.model, args.dtype, max(args.rows))
    engine.reset_prefix_cache()
    settings = SamplingParams(max_tokens=num, ignore_eos=True, detokenize=False, logprobs=0)
    return engine.generate([{"prompt_token_ids": ids} for ids in prompts], settings, use_tqdm=False)


@functools.cache
def vllm_engine(model: str, dtype: str, rows: int):
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    return LLM(
        model,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_num_seqs=rows,
        max_model_len=1024,
        gpu_memory_utilization=0.5,
    )


def median_of(repeats: int, run: Callable[[], object]) -> float:
    return statistics.median(timed(run) for _ in range(repeats))


def timed(run: Callable[[], object]) -> float:
    began = now()
    with torch.no_grad():
        run()
    return now() - began


if __name__ == "__main__":
    main()
