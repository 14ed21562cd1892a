"""A model that is large for one card: memory and seconds of a batch by setting.

    python benchmarks/bench_memory.py --tokenizer HF_FOLDER --data gsm8k.jsonl --json out.json

Weights are random, of Qwen2.5-1.5B's shape (``--layers`` and ``--hidden`` make it smaller), so
every rollout runs to its end and rewards are by chance; both sides of every group are trained on.
Each setting trains in a process of its own: a batch to warm up, then ``--batches`` more. Memory is
what the allocator held at most, sampling included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import torch
from bench_step import ours
from machine import device_name

SETTINGS = {
    "float32": [],
    "bfloat16": ["dtype=bfloat16"],
    "bfloat16, 8-bit moments": ["dtype=bfloat16", "optimizer.moments=8bit"],
    "bfloat16, 8-bit moments, checkpointing": [
        "dtype=bfloat16",
        "optimizer.moments=8bit",
        "optimizer.activation_checkpointing=true",
    ],
    "LoRA on bfloat16": ["dtype=bfloat16", "lora={r: 16}"],
    "LoRA on bfloat16, checkpointing": [
        "dtype=bfloat16",
        "lora={r: 16}",
        "optimizer.activation_checkpointing=true",
    ],
}


def main() -> None:
    args = arguments()
    if args.who:
        args.set = [*SETTINGS[args.who], "task.reward=bench_memory:by_chance", *args.set]
        print(json.dumps(ours(args)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = args.model or save_random(args, Path(folder))
        for name in args.settings:
            command = [sys.executable, __file__, *sys.argv[1:], "--model", weights, "--who", name]
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if run.returncode:
                found[name] = {"failed": run.returncode}
                print(f"{name:<40} failed", flush=True)
                continue
            found[name] = json.loads(run.stdout.strip().splitlines()[-1])
            seconds = statistics.median(found[name]["seconds"])
            peak = found[name]["peak_bytes"] / 2**30
            print(f"{name:<40} {seconds:6.2f} s per batch, {peak:5.1f} GiB", flush=True)
            write(args, found)


def write(args: argparse.Namespace, found: dict[str, object]) -> None:
    if args.json:
        facts = {"date": time.strftime("%Y-%m-%d"), "device": device_name()}
        args_told = {key: value for key, value in vars(args).items() if key not in ("json", "who")}
        facts |= {"torch": torch.__version__, "args": args_told}
        Path(args.json).write_text(json.dumps({**facts, "runs": found}, indent=1) + "\n")


def save_random(args: argparse.Namespace, folder: Path) -> str:
    """Random weights, made where they are fast to make, with the tokenizer of another model."""
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 128) * 128,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 35 // 6,
        num_hidden_layers=args.layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    return str(folder)


def by_chance(prompt: object, text: str) -> float:
    """A reward that a random model earns half of the time, the same for the same text."""
    return float(zlib.crc32(text.encode()) % 2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokenizer", required=True, help="a Hugging Face folder")
    parser.add_argument("--model", help="a Hugging Face folder instead of random weights")
    parser.add_argument("--data", help="a jsonl file with body, question, answer")
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=220)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--batches", type=int, default=1)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--set", action="append", default=[], help="an override of the recipe")
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--who", help=argparse.SUPPRESS)
    parser.set_defaults(warmup=1)
    return parser.parse_args()


if __name__ == "__main__":
    main()
