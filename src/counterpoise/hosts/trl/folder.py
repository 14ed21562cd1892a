"""The run folder of a TRL training: the same files as the built-in trainer's, so that
``counterpoise report`` and ``view`` read them.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.turns import conversations
from counterpoise.maths.trie import row_mask
from counterpoise.rollouts import Conversation, RolloutBatch
from counterpoise.run import write
from counterpoise.run.read import read_mapping
from counterpoise.trainer.resume import differences
from counterpoise.types import Prompt, TokenBatch

if TYPE_CHECKING:
    from counterpoise.hosts.trl.config import CreditGRPOConfig

log = logging.getLogger("counterpoise.ledger")
# settings that tell no runs apart: what is written and where, how a batch is cut, where it runs ...
OBSERVERS = (
    *("output_dir", "run_name", "project", "disable_tqdm", "debug", "skip_memory_metrics"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation"),
    *("generation_batch_size", "gradient_checkpointing", "gradient_checkpointing_kwargs"),
    *("use_cpu", "local_rank", "accelerator_config", "parallelism_config", "fsdp", "fsdp_config"),
    *("deepspeed", "full_determinism", "torch_empty_cache_steps", "resume_from_checkpoint"),
    *("vllm_group_port", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("num_completions_to_print", "num_generations_eval", "prediction_loss_only"),
)
OBSERVER_GROUPS = (
    *("log_", "logging_", "save_", "eval_", "per_device_eval_", "batch_eval_", "bf16_full_"),
    *("fp16_full_", "hub_", "push_", "report_", "trackio_", "dataloader_", "ddp_", "do_"),
    *("include_", "ignore_", "restore_", "vllm_server_", "ledger_"),
)
# ... and those that ``config.yaml`` has in another place
ELSEWHERE = (
    *("seed", "data_seed", "learning_rate", "num_generations", "method", "method_axes", "plan"),
    "max_completion_length",
)


def begin_folder(folder: Path, trainer: Any, setup: Setup, batch_number: int) -> None:
    """Before the first batch that this process writes. Batch 0 starts a run: an earlier one in the
    folder is replaced. A later batch continues it: what was written from there on is forgotten, and
    settings that have changed are noted.
    """
    config, has_run = run_config(trainer, setup), (folder / "manifest.json").is_file()
    if has_run and batch_number:
        changes = differences(read_mapping(folder / "config.yaml"), config)
        write.rewind(folder, batch_number)
        if changes:
            write.write_changes(folder, batch_number, changes, config)
        return
    if has_run:
        log.warning("%s: the account of an earlier training is replaced.", folder)
    args = trainer.args
    facts = {"host": "trl", "name": run_name(args), "seed": args.seed, "device": str(args.device)}
    write.create_run(folder, config, facts)


def run_config(trainer: Any, setup: Setup) -> dict[str, Any]:
    """What decides what the training learns, and the ledger's settings."""
    args = trainer.args
    # a threshold of one reward function is none of the reward
    by_total = args.success is not None and args.success_reward is None
    config = {
        "seed": args.seed,
        "host": "trl",
        "model": getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__,
        **({"task": {"success": args.success}} if by_total else {}),
        "method": _describe(setup, args),
        "rollouts": {
            "prompts": args.generation_batch_size // trainer.num_generations,
            "group_size": trainer.num_generations,
            "max_new_tokens": trainer.max_completion_length,
        },
        "optimizer": {
            "lr": args.learning_rate,
            "updates_per_batch": max(
                1, args.steps_per_generation // args.gradient_accumulation_steps
            ),
        },
        "trl": {"reward_funcs": list(trainer.reward_func_names), **changed_settings(args, setup)},
        "ledger": {
            "every": args.ledger_every,
            "decompose": list(args.ledger_decompose),
            "own_tokens": args.ledger_own_tokens,
        },
    }
    return json.loads(json.dumps(config, default=str))


def changed_settings(args: CreditGRPOConfig, setup: Setup) -> dict[str, Any]:
    """Settings that differ from their defaults, without those that ``config.yaml`` has elsewhere,
    that the method sets, or that only say what is written and where.
    """
    by_method = setup.trl_fields.keys() - {"beta"}  # no axis of the method tells it
    said = {*OBSERVERS, *ELSEWHERE, *by_method, *(() if args.success_reward else ("success",))}
    return {
        field.name: value
        for field in dataclasses.fields(args)
        if field.name not in said
        and not field.name.startswith(OBSERVER_GROUPS)
        and (value := getattr(args, field.name)) not in (None, _default(field))
    }


def _default(field: dataclasses.Field) -> Any:
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def _describe(setup: Setup, args: CreditGRPOConfig) -> dict[str, Any]:
    """The method as JSON, without the axes that are TRL's own."""
    axes = setup.method.describe()
    if setup.is_uniform:
        kept = ("name", "plan") if setup.has_own_plan else ("name",)
        return {name: axes[name] for name in kept}
    theirs = {
        *(() if args.method_loss else ("loss", "reduction")),
        *(() if args.method_advantage else ("advantage",)),
    }
    return {name: value for name, value in axes.items() if name not in theirs}


def run_name(args: CreditGRPOConfig) -> str:
    """The name that the user gave to the run, else that of its output folder."""
    output = str(args.output_dir)
    return args.run_name if args.run_name not in (None, "", output) else Path(output).resolve().name


def rollout_batch(
    batch_number: int,
    tokenizer: Any,
    prompt_ids: list[list[int]],
    batch: TokenBatch,
    talks: list[Conversation] | None,
) -> RolloutBatch:
    """A generation as the built-in trainer would hold it; TRL's tasks have no reference answer."""

    def decode(rows: list[list[int]]) -> list[str]:
        return tokenizer.batch_decode(rows, skip_special_tokens=True)

    kept_NT = row_mask(batch.mask_NT).cpu()
    ids = [row[keep].tolist() for row, keep in zip(batch.token_ids_NT.cpu(), kept_NT)]
    first_row = {g: row for row, g in reversed(list(enumerate(batch.group_N.tolist())))}
    rows = [first_row[g] for g in sorted(first_row)]
    questions = decode([prompt_ids[k] for k in rows])
    width = batch.max_length or batch.mask_NT.shape[1]
    return RolloutBatch(
        prompts=[Prompt(f"{batch_number}-{g}", text, "") for g, text in enumerate(questions)],
        prompt_ids=prompt_ids,
        texts=decode(ids),
        stop_reason=["stop" if len(row) < width else "length" for row in ids],
        batch=batch,
        num_grader_failures=0,
        grader_messages=[],
        conversations=conversations(batch, decode, talks or []),
    )
