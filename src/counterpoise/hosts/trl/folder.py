"""The run folder of a TRL training: the same files as the built-in trainer's, so that
``counterpoise report`` and ``view`` read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from counterpoise.hosts.trl.method import Setup
from counterpoise.run.environment import process_facts
from counterpoise.run.files import write_json, write_text
from counterpoise.run.schema import SCHEMA_VERSION
from counterpoise.types import Credit, TokenBatch


def create_folder(folder: Path, trainer: Any, made: Setup) -> None:
    """``config.yaml`` and ``manifest.json``, once a run."""
    if (folder / "manifest.json").is_file():
        return
    args = trainer.args
    config = {
        "seed": args.seed,
        "host": "trl",
        "model": getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__,
        "method": json.loads(json.dumps(made.method.describe(), default=str)),
        "rollouts": {
            "prompts": args.generation_batch_size // trainer.num_generations,
            "group_size": trainer.num_generations,
        },
        "optimizer": {
            "lr": args.learning_rate,
            "updates_per_batch": max(
                1, args.steps_per_generation // args.gradient_accumulation_steps
            ),
        },
        "ledger": {"every": args.ledger_every, "decompose": list(args.ledger_decompose)},
    }
    write_text(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    facts = {
        **process_facts(),
        "seed": args.seed,
        "device": str(args.device),
    }
    write_json(folder / "manifest.json", {"schema_version": SCHEMA_VERSION, "host": "trl", **facts})


def rollout_table(
    batch_number: int,
    tokenizer: Any,
    prompt_ids: list[list[int]],
    batch: TokenBatch,
    credit: Credit,
) -> dict[str, Any]:
    """Columns of ``rollouts/batch_*.parquet``: one row a rollout, token columns as lists without
    padding.
    """
    ids = _lists(batch.token_ids_NT, batch.mask_NT)
    group = batch.group_N.tolist()
    width = batch.max_length or batch.mask_NT.shape[1]
    table = {
        "batch": [batch_number] * batch.num_rollouts,
        "rollout": list(range(batch.num_rollouts)),
        "group": group,
        "prompt_id": [f"{batch_number}-{g}" for g in group],
        "prompt": tokenizer.batch_decode(prompt_ids, skip_special_tokens=True),
        "answer": [""] * batch.num_rollouts,
        "text": tokenizer.batch_decode(ids, skip_special_tokens=True),
        "reward": batch.reward_N.tolist(),
        "advantage": credit.advantage_N.tolist(),
        "stop_reason": ["stop" if len(row) < width else "length" for row in ids],
        "prompt_ids": prompt_ids,
        "token_ids": ids,
        "loss_mask": [[True] * len(row) for row in ids],
        "credit": _lists(credit.credit_NT, batch.mask_NT),
        "weight": _lists(credit.weight_NT, batch.mask_NT),
        "sampler_logp": _lists(batch.sampler_logp_NT, batch.mask_NT),
    }
    return (
        table
        if batch.entropy_NT is None
        else {**table, "entropy": _lists(batch.entropy_NT, batch.mask_NT)}
    )


def _lists(value_NT: Tensor, mask_NT: Tensor) -> list[list[Any]]:
    flat = value_NT.cpu()[mask_NT.cpu()].split(mask_NT.sum(1).tolist())
    return [
        row.to(torch.float32).tolist() if row.is_floating_point() else row.tolist() for row in flat
    ]
