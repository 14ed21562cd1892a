"""TRL with vLLM on one GPU: is `uniform` plain TRL, do methods train, are weights sent?

    python benchmarks/check_vllm.py HF_FOLDER --json out.json

One engine of vLLM serves all trainings of this process (TRL's colocate mode); each begins with its
own weights, which TRL sends before the first generation. Every part is told as it ends, so that a
run that is cut off has what came before.

pairs    plain GRPOTrainer and CreditGRPOTrainer(method="uniform") with the same seed, for every
         mode of TRL's importance-sampling correction: losses, gradient norms and weights
methods  DelTA, NTF, FADE, whole prompts: the numbers TRL logs
ledger   the gap between vLLM's and the trainer's log-probs: as TRL logs it, as the ledger has it
sync     log-probs of a fixed text by vLLM and by the trainer, before weights are sent and after
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from machine import device_name
from transformers import set_seed

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
SETTINGS: dict[str, Any] = {
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "steps_per_generation": 2,
    "gradient_accumulation_steps": 1,
    "max_completion_length": 64,
    "learning_rate": 1e-5,
    "bf16": True,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.15,
    "vllm_max_model_length": 512,
    "seed": 1,
}
KEPT = ("loss", "grad_norm", "reward", "entropy", "completions/mean_length")
KEPT_KINDS = ("sampling/", "credit/", "plan/", "controller/")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--sleep", action="store_true", help="vLLM's sleep mode")
    parser.add_argument("--json", help="write the numbers to this file")
    args = parser.parse_args()
    share_engine()
    out: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "device": device_name()}
    out |= {"torch": torch.__version__, "model": Path(args.model).name, "sleep": args.sleep}
    out["parts"] = []
    for name in args.parts:
        for one in PARTS[name](args):
            out["parts"].append({"part": name, **one})
            print(json.dumps(out["parts"][-1]), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(out, indent=1) + "\n")


def share_engine() -> None:
    """TRL makes an engine per trainer; here all of them get the first one."""
    from trl.generation import vllm_generation

    engines: list[Any] = []
    make = vllm_generation.LLM

    def engine(*args: Any, **settings: Any) -> Any:
        if not engines:
            engines.append(make(*args, **settings))
        return engines[0]

    vllm_generation.LLM = engine


def data() -> Dataset:
    rows = []
    for i in range(512):
        a, b = 3 + i % 47, 2 + (7 * i) % 31
        text = f"What is {a} + {b}? Answer with the number."
        rows.append({"prompt": [{"role": "user", "content": text}], "answer": str(a + b)})
    return Dataset.from_list(rows)


def has_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    return [float(right in c[0]["content"]) for c, right in zip(completions, answer)]


def train(args: argparse.Namespace, *, ours: bool, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer that has trained, and what it logged."""
    if ours:
        from counterpoise.hosts.trl import CreditGRPOConfig as Config
        from counterpoise.hosts.trl import CreditGRPOTrainer as Trainer
    else:
        from trl import GRPOConfig as Config
        from trl import GRPOTrainer as Trainer
    settings = {**SETTINGS, "max_steps": 4, **settings}
    settings.setdefault("output_dir", tempfile.mkdtemp())
    began = time.perf_counter()
    trainer = Trainer(
        model=args.model,
        reward_funcs=has_answer,
        args=Config(vllm_enable_sleep_mode=args.sleep, **settings),
        train_dataset=data(),
    )
    ready = time.perf_counter()
    set_seed(settings["seed"])
    trainer.train()
    log = [row for row in trainer.state.log_history if "train_runtime" not in row]
    told = {
        key: [row[key] for row in log if key in row]
        for key in sorted({key for row in log for key in row})
        if key in KEPT or key.startswith(KEPT_KINDS)
    }
    seconds = {"start_s": ready - began, "train_s": time.perf_counter() - ready}
    return trainer, {"updates": trainer.state.global_step, **seconds, "log": told}


def pairs(args: argparse.Namespace) -> Any:
    set_seed(1)
    _, first = train(args, ours=False, max_steps=1)  # makes the engine
    yield {"engine_start_s": first["start_s"]}
    for mode in MODES:
        how = {"vllm_importance_sampling_mode": mode}
        plain, theirs = train(args, ours=False, **how)
        weights = [p.detach().clone() for p in plain.model.parameters()]
        uniform, own = train(args, ours=True, method="uniform", **how)
        with torch.no_grad():
            apart = max(
                float((a - b).abs().max()) for a, b in zip(weights, uniform.model.parameters())
            )
        same = {
            key: theirs["log"][key] == own["log"].get(key)
            for key in theirs["log"]
            if key in KEPT or key.startswith("sampling/")
        }
        yield {"mode": mode, "same": same, "weights_apart": apart, "trl": theirs, "ours": own}


def methods(args: argparse.Namespace) -> Any:
    for name, plan in (
        ("delta", None),
        ("ntf_whitened", None),
        ("fade", None),
        ("dapo", "query_preserved"),
    ):
        how = {"max_steps": 8, "steps_per_generation": 4}
        if plan:
            how["plan"] = plan
        _, told = train(args, ours=True, method=name, **how)
        yield {"method": name, "plan": plan, **told}


def ledger(args: argparse.Namespace) -> Any:
    import pyarrow.parquet as pq

    folder = tempfile.mkdtemp()
    _, told = train(args, ours=True, method="delta", ledger_every=1, output_dir=folder)
    files = sorted(Path(folder).glob("counterpoise/tokens/*.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    gaps = [abs(row["sampler_gap"]) for row in rows if row.get("sampler_gap") is not None]
    yield {
        "files": len(files),
        "tokens": len(rows),
        "ledger_mean_gap": statistics.mean(gaps) if gaps else None,
        "ledger_max_gap": max(gaps, default=None),
        "trl_mean_gap": told["log"].get("sampling/sampling_logp_difference/mean"),
        "trl_max_gap": told["log"].get("sampling/sampling_logp_difference/max"),
        **told,
    }


def sync(args: argparse.Namespace) -> Any:
    """With a large rate, so that old weights and new ones are far apart."""
    trainer, told = train(args, ours=True, method="uniform", learning_rate=2e-4)
    generation, tokenizer = trainer.vllm_generation, trainer.processing_class
    text = "The sum of three and four is seven. The sum of two and nine is eleven."
    ids = tokenizer(text)["input_ids"]
    if args.sleep:
        yield {"left_out": "vLLM sleeps between generations and has no weights to compare"}
        return
    before = gap(trainer, generation.llm, ids)  # vLLM has the weights of the last generation
    generation.sync_weights()
    yield {"mean_gap_before": before, "mean_gap_after": gap(trainer, generation.llm, ids), **told}


def gap(trainer: Any, engine: Any, ids: list[int]) -> float:
    """Mean |log-prob by vLLM - log-prob by the trainer's weights| over the tokens of a text."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    engine.reset_prefix_cache()
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0)
    (output,) = engine.generate([{"prompt_token_ids": ids}], settings, use_tqdm=False)
    theirs = [said[token].logprob for said, token in zip(output.prompt_logprobs[1:], ids[1:])]
    device = trainer.model.device
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        logits = trainer.model(torch.tensor([ids], device=device)).logits[0, :-1].float()
    own = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]].tolist()
    return statistics.mean(abs(a - b) for a, b in zip(theirs, own))


def guarded(part: Any) -> Any:
    """A part that fails says so and leaves the others their turn."""

    def run(args: argparse.Namespace) -> Any:
        try:
            yield from part(args)
        except Exception as error:
            traceback.print_exc()
            yield {"failed": f"{type(error).__name__}: {error}"[:500]}

    return run


PARTS = {f.__name__: guarded(f) for f in (pairs, methods, ledger, sync)}


if __name__ == "__main__":
    main()
