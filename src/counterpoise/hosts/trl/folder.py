"""The run folder of a TRL training: the same files as the built-in trainer's, so that
``counterpoise report`` and ``view`` read them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.turns import conversations
from counterpoise.maths.trie import row_mask
from counterpoise.rollouts import Conversation, RolloutBatch
from counterpoise.run.write import create_run
from counterpoise.types import Prompt, TokenBatch

if TYPE_CHECKING:
    from counterpoise.hosts.trl.config import CreditGRPOConfig


def create_folder(folder: Path, trainer: Any, setup: Setup) -> None:
    """``config.yaml`` and ``manifest.json``, once per run."""
    if (folder / "manifest.json").is_file():
        return
    args = trainer.args
    config = {
        "seed": args.seed,
        "host": "trl",
        "model": getattr(trainer.model.config, "_name_or_path", "") or type(trainer.model).__name__,
        "method": _describe(setup),
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
        "ledger": {
            "every": args.ledger_every,
            "decompose": list(args.ledger_decompose),
            "own_tokens": args.ledger_own_tokens,
        },
    }
    facts = {"host": "trl", "name": run_name(args), "seed": args.seed, "device": str(args.device)}
    create_run(folder, config, facts)


def _describe(setup: Setup) -> dict[str, Any]:
    """The method as JSON; of TRL's own training only the plan is ours."""
    axes = json.loads(json.dumps(setup.method.describe(), default=str))
    kept = ("name", "plan") if setup.has_own_plan else ("name",)
    return {name: axes[name] for name in kept} if setup.is_uniform else axes


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
