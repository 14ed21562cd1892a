"""What each method costs inside TRL, as a share of TRL's own batch (generation, scoring and
updates).

    OMP_NUM_THREADS=1 python benchmarks/bench_trl.py [--methods delta ktae] [--updates 4 1]
    [--generations 6] [--out PATH]

The bundled model (0.4 M parameters) on its arithmetic task, CPU. Plain ``GRPOTrainer`` and every
method train side by side in one process, turn by turn: generation k of each, then generation k + 1.
The learning rate is 0, so that all of them sample the same rollouts and do the same work (checked).
Times are processor times of the trainer's thread; medians over generations.

    own     time in counterpoise's overrides and ledger, outside of TRL's methods, divided by the
            rest of the same trainer's batch. Precise on a busy machine too; leaves out the gradient
            of a loss of ours and the copying of hidden states (both are in total).
    total   time of the batch / plain TRL's time for the same batch - 1. Everything is in it, and it
            is as noisy as the machine: ``uniform`` runs nothing of ours.

``updates`` is the number of optimizer updates a generation. With several TRL scores the rollouts
itself and rules read that forward; with one it does not, and a rule that reads log-probs, entropies
or hidden states costs a forward of its own."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import tempfile
import threading
import time
import warnings
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from counterpoise.hosts.trl import CreditGRPOConfig, CreditMixin
from counterpoise.policy import locate
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.types import Prompt

TASK, NUM_PROMPTS, GROUP_SIZE = Arithmetic(), 8, 8
METHODS = (
    "uniform",
    "dapo",
    "delta",
    "top_entropy",
    "crf_ntf",
    "ktae",
    "ibpo",
    "gtpo",
    "stapo",
    "ar",
    "f_grpo",
    "fade",
)
METHODS += ("gmpo", "ctpo", "clip_cov", "tpo", "dfpo_min", "dfpo_orth")
# named settings beside the presets
VARIANTS: dict[str, dict[str, Any]] = {
    "delta, proxy topk": {"method": "delta", "method_axes": {"credit": {"proxy": "topk"}}},
    "delta, query_preserved": {"method": "delta", "plan": "query_preserved"},
    "delta, ledger of every generation": {"method": "delta", "ledger_every": 1},
}
# with one update a generation these alone differ from what they cost with several
READERS = ("uniform", "dapo", "delta", "top_entropy", "crf_ntf", "ktae", "delta, proxy topk")
LIMITS = {"delta": 0.03}
OVERRIDDEN = ("_generate_and_score_completions", "_prepare_inputs", "_compute_loss")


class Stopwatch:
    """Processor time by who runs: ours in the overrides, TRL's in the methods that they call by
    super. One a thread.
    """

    def __init__(self) -> None:
        self.spent, self.stack, self.since = {"ours": 0.0, "trl": 0.0}, ["trl"], time.thread_time()

    def switch(self, to: str | None) -> None:
        """Enter a part, or leave the current one (None)."""
        now = time.thread_time()
        self.spent[self.stack[-1]] += now - self.since
        self.since = now
        _ = self.stack.append(to) if to else self.stack.pop()

    def around(self, part: str, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.switch(part)
            try:
                return method(*args, **kwargs)
            finally:
                self.switch(None)

        return timed


def watched(kind: type, watch: Stopwatch) -> type:
    """The trainer's class with its overrides timed, and TRL's own methods inside of them."""
    below = {name: watch.around("trl", getattr(GRPOTrainer, name)) for name in OVERRIDDEN}
    base = type("TimedTRL", (GRPOTrainer,), below)
    if kind is GRPOTrainer:
        return base
    mixed = type("Mixed", (CreditMixin, base), {})
    return type(
        "Timed", (mixed,), {name: watch.around("ours", getattr(mixed, name)) for name in OVERRIDDEN}
    )


class Turn(TrainerCallback):
    """Gives the floor to the next trainer after each generation, and keeps the time of each own
    turn.
    """

    def __init__(self, updates: int) -> None:
        self.updates, self.watch, self.times, self.own = updates, Stopwatch(), [], []
        self.mine, self.done = threading.Event(), threading.Event()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.pause()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.updates == 0:
            self.watch.switch("trl")
            self.watch.switch(None)
            ours, trls = self.watch.spent["ours"], self.watch.spent["trl"]
            self.times.append(ours + trls)
            self.own.append(ours / trls)
            self.pause()

    def pause(self) -> None:
        """Random numbers go on where this trainer left off, whatever the others drew."""
        drawn = torch.get_rng_state()
        self.mine.clear()
        self.done.set()
        self.mine.wait()
        torch.set_rng_state(drawn)
        self.watch.spent, self.watch.since = {"ours": 0.0, "trl": 0.0}, time.thread_time()

    def give(self) -> None:
        """Let the trainer run one turn."""
        self.done.clear()
        self.mine.set()
        self.done.wait()


def reward(
    prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any
) -> list[float]:
    texts = [completion[0]["content"] for completion in completions]
    return [
        TASK.reward(Prompt("", asked[0]["content"], right), text)
        for asked, text, right in zip(prompts, texts, answer)
    ]


def trainer(settings: dict[str, Any] | None, updates: int, generations: int, turn: Turn) -> Any:
    """Plain TRL (None) or a method."""
    asked = islice(TASK.prompts("train", seed=0), NUM_PROMPTS * (generations + 1))
    rows = [
        {"prompt": [{"role": "user", "content": prompt.text}], "answer": prompt.answer}
        for prompt in asked
    ]
    args: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "num_generations": GROUP_SIZE,
        "per_device_train_batch_size": NUM_PROMPTS * GROUP_SIZE // 4,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 4 // updates,
        "max_steps": updates * (generations + 1),
        "max_completion_length": 96,
        "learning_rate": 0.0,
        "logging_steps": updates,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    kind, config = (
        (GRPOTrainer, GRPOConfig) if settings is None else (CreditMixin, CreditGRPOConfig)
    )
    kwargs: dict[str, Any] = {
        "reward_funcs": reward,
        "train_dataset": Dataset.from_list(rows),
        "callbacks": [turn],
    }
    made: Any = watched(kind, turn.watch)(
        model=locate("bundled").place, args=config(**args, **settings or {}), **kwargs
    )
    for name in ("on_pre_optimizer_step", "on_optimizer_step") if settings else ():
        setattr(
            made.credit_ledger, name, turn.watch.around("ours", getattr(made.credit_ledger, name))
        )
    return made


def measure_cases(
    cases: dict[str, dict[str, Any] | None], updates: int, generations: int
) -> dict[str, Turn]:
    """Times of every trainer's turns; the first generation is a warm-up."""
    turns: dict[str, Turn] = {}
    tokens: dict[str, float] = {}
    for name, settings in cases.items():
        turns[name] = Turn(updates)
        made = trainer(settings, updates, generations, turns[name])

        def run(made: Any = made, name: str = name) -> None:
            torch.manual_seed(0)
            made.train()
            tokens[name] = max(
                row["num_tokens"] for row in made.state.log_history if "num_tokens" in row
            )
            turns[name].done.set()

        threading.Thread(target=run, daemon=True).start()
        turns[name].done.wait()
    for _ in range(generations + 1):
        for turn in turns.values():
            turn.give()
    for turn in turns.values():
        turn.give()
    assert len(set(tokens.values())) == 1, f"the trainers did not do the same work: {tokens}"
    return turns


def summary(turns: dict[str, Turn]) -> dict[str, Any]:
    plain_s, found = turns.pop("trl").times[1:], {}
    for name, turn in turns.items():
        total = sorted(mine / plain - 1 for mine, plain in zip(turn.times[1:], plain_s))
        own = sorted(turn.own[1:])
        found[name] = {"own": statistics.median(own), "own_range": [own[0], own[-1]]}
        found[name] |= {"total": statistics.median(total), "total_range": [total[0], total[-1]]}
    return {"trl_step_s": statistics.median(plain_s), "methods": found}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--methods",
        nargs="*",
        help="default: all; those that read a scoring forward where there is one update",
    )
    parser.add_argument("--updates", type=int, nargs="*", default=[4, 1], choices=(1, 2, 4))
    parser.add_argument("--generations", type=int, default=6)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one thread",
        "versions": {name: version(name) for name in ("torch", "transformers", "trl")},
        "rollouts": NUM_PROMPTS * GROUP_SIZE,
        "generations": args.generations,
        "limits": LIMITS,
    }
    for updates in args.updates:
        names = args.methods or ([*METHODS, *VARIANTS] if updates > 1 else READERS)
        cases = {"trl": None, **{name: VARIANTS.get(name, {"method": name}) for name in names}}
        found = results[f"updates_{updates}"] = summary(
            measure_cases(cases, updates, args.generations)
        )
        print(
            f"{updates} updates a generation: plain TRL {found['trl_step_s']:.2f} s of processor"
            " time a generation"
        )
        for name, one in found["methods"].items():
            low, high = one["total_range"]
            print(
                f"  {name:<36} own {one['own']:7.2%}   total {one['total']:+7.1%} ({low:+.1%} to"
                f" {high:+.1%})",
                flush=True,
            )
    results["load_average"] = os.getloadavg()[0]
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
