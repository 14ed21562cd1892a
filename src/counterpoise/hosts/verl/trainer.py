"""verl's trainers with credit for every token and with plans:
``trainer.v1.trainer_mode=counterpoise/sync`` (colocate_async, separate_async).

The driver holds the whole batch: ids, prompts, log-probs and entropies. Four methods are
overridden; each calls super, none copies verl:

    _compute_advantage    lends the batch's columns to the estimator that verl calls, and logs what the rules report
    _balance_batch        reorders the rows that verl has balanced, so that each update holds what the plan says
    _save_checkpoint, _load_checkpoint    the method's state beside verl's
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterpoise.hosts.verl.method import PREFIX, Setup, check_installed, check_version

check_installed()

# ruff: noqa: E402
import torch
import transfer_queue as tq
import verl
from torch import Tensor
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1 import (
    PPOTrainer,
    PPOTrainerColocateAsync,
    PPOTrainerSeparateAsync,
    PPOTrainerSync,
    register_trainer,
)
from verl.utils.seqlen_balancing import (
    calculate_workload,
    get_seqlen_balanced_partitions,
    log_seqlen_unbalance,
)

from counterpoise.hosts.verl.checks import check_config, mode_of
from counterpoise.hosts.verl.estimators import Loan, lending
from counterpoise.hosts.verl.plan import Rollouts, by_rank, fill_updates, make_plan, plan_numbers

# column of a TokenBatch -> verl's field; the sampler's log-probs are the inference engine's where
# verl keeps them
FIELDS = {
    "token_ids_NT": "responses",
    "mask_NT": "response_mask",
    "sampler_logp_NT": "rollout_log_probs",
    "trainer_logp_NT": "old_log_probs",
    "entropy_NT": "entropy",
    "ref_logp_NT": "ref_log_prob",
}
STATE = "counterpoise.json"

# a mixin whose super is one of verl's trainers once it is mixed in
Host = PPOTrainer if TYPE_CHECKING else object


class CreditMixin(Host):
    """The overrides alone, for a trainer of your own: ``class Mine(CreditMixin, PPOTrainerSync)``,
    registered under ``counterpoise/sync``.
    """

    def __init__(self, config: Any) -> None:
        check_version(verl.__version__)
        # verl compares the mode with its own names in many places
        mode = config.trainer.v1.trainer_mode = mode_of(config.trainer.v1.trainer_mode)
        self.credit_setup, self.plan_setup = check_config(config, mode)
        self.credit_state: dict[str, Any] | None = None
        super().__init__(config)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        if self.credit_setup is None:
            return super()._compute_advantage(batch, metrics)
        loan = Loan(_columns(batch), self.credit_state, self.global_steps)
        with lending(loan):
            batch = super()._compute_advantage(batch, metrics)
        if loan.credit is not None:
            self.credit_state = loan.credit.state
            metrics.update(
                {f"counterpoise/{name}": value for name, value in loan.credit.metrics.items()}
            )
        return batch

    def _balance_batch(
        self,
        batch: Any,
        metrics: Any,
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> Any:
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        if self.plan_setup is None:
            return batch
        rollouts, size = _rollouts(batch), _update_size(self.config)
        updates = make_plan(self.plan_setup, rollouts, len(batch) // size, self.global_steps)
        batch = _without(
            batch, set(rollouts.keys).difference(*updates), self.tokenizer.eos_token_id
        )
        updates = fill_updates(
            updates, [key for key, tag in zip(batch.keys, batch.tags) if _is_filler(tag)], size
        )
        seq_len = {key: tag["seq_len"] for key, tag in zip(batch.keys, batch.tags)}
        workload = dict(
            zip(seq_len, calculate_workload(torch.tensor(list(seq_len.values()))).tolist())
        )
        ranks = by_rank(updates, workload, _num_ranks(self), _even_parts)
        place = {key: k for k, key in enumerate(batch.keys)}
        metrics.update(plan_numbers(updates, rollouts))
        partitions = [[place[key] for key in rank] for rank in ranks]
        metrics.update(
            log_seqlen_unbalance(list(seq_len.values()), partitions, prefix=logging_prefix)
        )
        return batch.select_keys([key for rank in ranks for key in rank])

    def _save_checkpoint(self) -> None:
        # before verl's files: verl marks the checkpoint as complete at the end of its own
        if self.credit_setup is not None:
            path = Path(
                self.config.trainer.default_local_dir, f"global_step_{self.global_steps}", STATE
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps(
                    {"method": self.credit_setup.method.describe(), "state": self.credit_state}
                )
            )
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.credit_setup is not None and self.global_steps > 0:
            self.credit_state = _read_state(
                self.config.trainer, self.global_steps, self.credit_setup
            )


def _rollouts(batch: Any) -> Rollouts:
    """The batch without verl's fillers."""
    found = {
        key: tag["response_len"] for key, tag in zip(batch.keys, batch.tags) if not _is_filler(tag)
    }
    _check_keys(list(found))
    data = tq.kv_batch_get(
        keys=list(found), partition_id=batch.partition_id, select_fields=["rm_scores"]
    )
    return Rollouts(
        list(found),
        data.to_padded_tensor()["rm_scores"].sum(-1).float(),
        torch.tensor(list(found.values())),
    )


def _without(batch: Any, left_out: set[str], eos_token_id: int) -> Any:
    """The batch with fillers in place of the rollouts that the plan leaves out; those are taken out
    of verl's queue as used ones are.
    """
    if not left_out:
        return batch
    tq.kv_clear(keys=sorted(left_out), partition_id=batch.partition_id)
    kept = batch.select_keys([key for key in batch.keys if key not in left_out])
    return upsample_batch_to_divisible_size(kept, len(batch), eos_token_id)


def _is_filler(tag: dict[str, Any]) -> bool:
    return tag.get("is_padding", False)


def _update_size(config: Any) -> int:
    """Rows of one update, over all ranks."""
    return config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n


def _columns(batch: Any) -> dict[str, Tensor]:
    """The batch's columns on the driver, padded; read before verl's rollout correction may empty
    masks.
    """
    _check_keys(batch.keys)
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS.values())
    ).to_padded_tensor()
    columns = {name: data.get(field, None) for name, field in FIELDS.items()}
    columns = {name: value for name, value in columns.items() if value is not None}
    columns.setdefault("sampler_logp_NT", columns["trainer_logp_NT"])
    columns["mask_NT"] = columns["mask_NT"].bool()
    return columns


def _check_keys(keys: list[str]) -> None:
    several = [key for key in keys if not key.endswith("_0")]
    if several:
        raise ValueError(
            f"session {several[0].rsplit('_', 1)[0]} gave more than one trajectory, and credit"
            " needs one a rollout. Let the agent loop return one output a session, or use an"
            " estimator of verl's own."
        )


def _num_ranks(trainer: Any) -> int:
    """Data-parallel ranks of the actor; verl has looked them up while it balanced the batch."""
    return max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1


def _even_parts(workload: list[int], num_ranks: int) -> list[list[int]]:
    return get_seqlen_balanced_partitions(workload, k_partitions=num_ranks, equal_size=True)


def _read_state(trainer_config: Any, batch_number: int, made: Setup) -> dict[str, Any] | None:
    folder = (
        trainer_config.resume_from_path if trainer_config.resume_mode == "resume_path" else None
    )
    path = Path(
        folder or Path(trainer_config.default_local_dir, f"global_step_{batch_number}"), STATE
    )
    if not path.exists():
        warnings.warn(
            f"{path} is missing: method {made.method.name!r} starts with a fresh state at batch"
            f" {batch_number}.",
            stacklevel=3,
        )
        return None
    saved = json.loads(path.read_text())
    if saved["method"] != made.method.describe():
        raise ValueError(
            f"{path} was written by {saved['method']}, this run is {made.method.describe()}. Resume"
            " with the same method."
        )
    return saved["state"]


@register_trainer(f"{PREFIX}sync")
class CreditSync(CreditMixin, PPOTrainerSync):
    """verl's synchronous trainer with counterpoise's credit and plans."""


@register_trainer(f"{PREFIX}colocate_async")
class CreditColocateAsync(CreditMixin, PPOTrainerColocateAsync):
    """The same for verl's asynchronous trainer whose rollouts share the trainer's GPUs."""


@register_trainer(f"{PREFIX}separate_async")
class CreditSeparateAsync(CreditMixin, PPOTrainerSeparateAsync):
    """The same for verl's asynchronous trainer with GPUs of its own for rollouts."""
