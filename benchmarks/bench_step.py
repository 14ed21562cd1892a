"""A whole RL batch: our trainer against TRL's GRPOTrainer on the same model, prompts, lengths,
reward and optimizer.

    python benchmarks/bench_step.py                                # the bundled model on arithmetic
    python benchmarks/bench_step.py --model smollm2 --data asdiv.jsonl --prompts 64 --new-tokens 112
    python benchmarks/bench_step.py --model HF_FOLDER --data gsm8k.jsonl --vllm

A batch is one batch: sampling, grading, credit and ``--updates`` updates, files
written as each trainer writes them by default (ours without ledger, evaluation and checkpoints; TRL
without checkpoints). Seconds are medians after ``--warmup`` batches. Each runs in a process of its
own, one after the other, ``--rounds`` times in turn; memory is that process's peak: allocated on
the accelerator where there is one, else resident. TRL updates with micro-batches of prompts x group
/ updates rows (``--trl-rows`` where memory does not hold them) and without activation
checkpointing, which is its fastest setting; with ``--vllm`` it also samples with vLLM in its own
process (colocate). Both weights are float32, with bfloat16 autocast on an accelerator.

On CUDA the update's share of the card's bfloat16 peak is printed (model FLOPs utilisation): 6
operations per parameter of a matrix and token, and attention's, over the seconds of the update. A
prompt counts once for its rollouts, as it is read."""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from flops import PEAK_FLOPS, update_flops
from machine import device_name, now, peak

TRL = ("trl", "trl vllm")
OURS = ("ours", "ours plain", "ours compiled", "ours delta")
INSTRUCTION = (
    "{question}\nSolve it step by step in a few short lines. End with: The answer is <number>."
)


def main() -> None:
    args = arguments()
    if args.who:
        print(json.dumps(trl(args) if args.who in TRL else ours(args)))
        return
    names = args.only or [
        "ours",
        "trl",
        *(["trl vllm"] if args.vllm else []),
        *(["ours plain"] if args.plain else []),
        *(["ours compiled"] if args.compile else []),
        *(["ours delta"] if args.delta else []),
    ]
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _, name in itertools.product(range(args.rounds), names):
        command = [sys.executable, __file__, *sys.argv[1:], "--who", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
        show(name, found[name][-1])
    medians = {
        name: statistics.median(second for run in runs for second in run["seconds"])
        for name, runs in found.items()
    }
    peaks = {name: max(run["peak_bytes"] for run in runs) for name, runs in found.items()}
    ratios = {
        f"{name} / {other}": {
            "speed": medians[other] / medians[name],
            "memory": peaks[name] / peaks[other],
        }
        for name, other in itertools.product(names, TRL)
        if name not in TRL and other in names
    }
    for pair, ratio in ratios.items():
        print(f"{pair}: {ratio['speed']:.2f} x as fast, peak memory {ratio['memory']:.2f} of its")
    if args.json:
        facts = {
            "date": time.strftime("%Y-%m-%d"),
            "device": device_name(),
            "torch": torch.__version__,
            "args": vars(args),
        }
        Path(args.json).write_text(
            json.dumps({**facts, "median_s": medians, "ratios": ratios, "runs": found}, indent=1)
            + "\n"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="bundled")
    parser.add_argument(
        "--data",
        help="a jsonl file with body, question, answer; default: the built-in arithmetic task",
    )
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument(
        "--trl-rows", type=int, help="rows of TRL's micro-batches, where a whole update is too much"
    )
    parser.add_argument(
        "--vllm", action="store_true", help="also TRL with vLLM in its process (colocate)"
    )
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--plain", action="store_true", help="also ours with optimizer.kernels=torch"
    )
    parser.add_argument("--compile", action="store_true", help="also ours with optimizer.compile")
    parser.add_argument("--delta", action="store_true", help="also ours with DelTA (row proxy)")
    parser.add_argument("--only", nargs="+", choices=(*TRL, *OURS), help="these contestants alone")
    parser.add_argument(
        "--set", action="append", default=[], help="an override of our recipe, a.b=c"
    )
    parser.add_argument("--json", help="write the numbers to this file")
    parser.add_argument("--who", help=argparse.SUPPRESS)
    return parser.parse_args()


def show(name: str, run: dict[str, Any]) -> None:
    seconds = statistics.median(run["seconds"])
    print(
        f"{name:<10} {seconds:7.2f} s a batch   peak {run['peak_bytes'] / 2**30:.2f} GiB  "
        f" {run['note']}",
        flush=True,
    )


def recipe(args: argparse.Namespace, run_dir: str) -> dict[str, Any]:
    task: dict[str, Any] = {"name": "arithmetic"}
    if args.data:
        task = {
            "name": "jsonl",
            "path": args.data,
            "question": ["body", "question"],
            "answer": "answer",
        }
        task |= {"answer_regex": "[^(]+", "instruction": INSTRUCTION}
    return {
        "run_dir": run_dir,
        "model": args.model,
        "task": task,
        "method": {"name": "delta" if args.who == "ours delta" else "dapo"},
        "num_batches": args.warmup + args.batches,
        "rollouts": {
            "prompts": args.prompts,
            "group_size": args.group_size,
            "max_new_tokens": args.new_tokens,
        },
        "optimizer": {
            "lr": 1e-6,
            "updates_per_batch": args.updates,
            "compile": args.who == "ours compiled",
            "kernels": "torch" if args.who == "ours plain" else "auto",
        },
        "eval": {"every": 0},
        "ledger": {"every": 0},
        "checkpoint_every": 0,
        "trackers": [],
    }


def ours(args: argparse.Namespace) -> dict[str, Any]:
    import yaml

    from counterpoise.trainer.config import load_config
    from counterpoise.trainer.loop import train
    from counterpoise.trainer.progress import Progress

    times: list[float] = []

    class Stopwatch(Progress):
        def show(self, step: int, metrics: dict[str, Any], seconds: dict[str, float]) -> None:
            times.append(now())

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        settings = recipe(args, f"{folder}/run")
        settings["num_batches"] += 1  # the last batch of a run writes a checkpoint and is left out
        file.write_text(yaml.safe_dump(settings))
        began = now()
        train(load_config(file, args.set), progress=Stopwatch(quiet=True))
        timing = [
            json.loads(line)
            for line in (Path(folder) / "run/timing.jsonl").read_text().splitlines()
        ]
        metrics = [
            json.loads(line)
            for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
        ]
        flops = update_flops(Path(folder) / "run")
    stages = {
        key: round(statistics.median(row[key] for row in timing[args.warmup :]), 4)
        for key in timing[0]
        if key.endswith("_s")
    }
    length = statistics.mean(row["rollouts/length"] for row in metrics)
    speed = flops / stages["update_s"] if flops else None
    best = PEAK_FLOPS.get(device_name())
    return {
        "seconds": differences([began, *times])[args.warmup : -1],
        "peak_bytes": peak(),
        "stages_s": stages,
        "update_flops": flops,
        "update_tflops_per_s": speed / 1e12 if speed else None,
        "update_mfu": speed / best if speed and best else None,
        "note": (
            f"mean length {length:.0f}, "
            + " ".join(f"{key} {value:.3f}" for key, value in stages.items())
            + (f", update {speed / 1e12:.3g} TFLOP/s" if speed else "")
            + (f", {speed / best:.1%} of the card's peak" if speed and best else "")
        ),
    }


def trl(args: argparse.Namespace) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    from counterpoise.policy import load_model
    from counterpoise.tasks import task as make_task
    from counterpoise.types import Prompt

    settings = recipe(args, "")
    task = make_task(**settings["task"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    policy = load_model(args.model, dtype=torch.float32, device=device)
    prompts = list(
        itertools.islice(task.prompts("train", 0), args.prompts * settings["num_batches"])
    )
    rows = [
        {
            "prompt": [{"role": "user", "content": p.text}],
            "text": p.text,
            "answer": p.answer,
            "id": str(p.id),
        }
        for p in prompts
    ]

    def reward(
        completions: list[Any], text: list[str], answer: list[Any], id: list[str], **_: Any
    ) -> list[float | None]:
        parts = zip(text, answer, id, completions)
        return [
            task.reward(Prompt(id=i, text=t, answer=a), c[0]["content"]) for t, a, i, c in parts
        ]

    times: list[float] = []

    class Stopwatch(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % args.updates == 0:
                times.append(now())

    whole = args.prompts * args.group_size // args.updates
    micro_rows = args.trl_rows or whole
    micro_batches = whole // micro_rows
    vllm: dict[str, Any] = {}
    if args.who == "trl vllm":
        vllm = dict(use_vllm=True, vllm_mode="colocate", vllm_max_model_length=1024)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=micro_rows,
            gradient_accumulation_steps=micro_batches,
            steps_per_generation=args.updates * micro_batches,
            num_generations=args.group_size,
            max_completion_length=args.new_tokens,
            max_steps=settings["num_batches"] * args.updates,
            learning_rate=settings["optimizer"]["lr"],
            beta=0.0,
            loss_type="dapo",
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=args.updates,
            **vllm,
        )
        trainer = GRPOTrainer(
            model=policy.model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=policy.tokenizer,
            callbacks=[Stopwatch()],
        )
        began = now()
        trainer.train()
    lengths = [
        row["completions/mean_length"]
        for row in trainer.state.log_history
        if "completions/mean_length" in row
    ]
    note = f"mean length {statistics.mean(lengths):.0f}"
    return {
        "seconds": differences([began, *times])[args.warmup :],
        "peak_bytes": peak(),
        "note": note,
    }


def differences(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


if __name__ == "__main__":
    main()
