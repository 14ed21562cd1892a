"""verl's trainers with credit for every token and with plans:
``trainer.v1.trainer_mode=counterpoise/sync`` (colocate_async, separate_async).

The driver holds the whole batch: ids, prompts, log-probs and entropies. Four methods are
overridden; each calls super, none copies verl:

    _compute_advantage    lends the batch's columns to the estimator that verl calls, and logs what
                          the rules report
    _balance_batch        reorders the rows that verl has balanced, so that each update holds what
                          the plan says
    _save_checkpoint, _load_checkpoint    the method's state beside verl's
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from counterpoise.hosts.verl.checks import check_config, check_installed, check_own_trainer, mode_of

check_installed()

# ruff: noqa: E402
import torch
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

from counterpoise.hosts.verl import plan, turns
from counterpoise.hosts.verl.batch import (
    graded_rollouts,
    is_filler,
    last_outputs,
    leave_out,
    named_successes,
    token_columns,
    turn_fields,
)
from counterpoise.hosts.verl.estimators import Loan, lending
from counterpoise.hosts.verl.method import PREFIX
from counterpoise.hosts.verl.state import load_state, save_state

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transfer_queue import KVBatchMeta

# a mixin whose super is one of verl's trainers once it is mixed in
Host = PPOTrainer if TYPE_CHECKING else object


class CreditMixin(Host):
    """The overrides alone, for a trainer of your own: ``class Mine(CreditMixin, PPOTrainerSync)``,
    registered under ``counterpoise/sync``.
    """

    def __init__(self, config: DictConfig) -> None:
        # verl compares the mode with its own names in many places
        mode = config.trainer.v1.trainer_mode = mode_of(config.trainer.v1.trainer_mode)
        self.credit_setup, self.plan_setup = check_config(config, mode)
        self.credit_state: dict[str, Any] | None = None
        super().__init__(config)

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if self.credit_setup is None:
            return super()._compute_advantage(batch, metrics)
        fields = turn_fields(batch)
        turns.check_fields(self.credit_setup, batch.keys, fields)
        reads_rewards_only = self.credit_setup.method.reads_rewards_only
        loan = Loan(
            {} if reads_rewards_only else token_columns(batch, fields),
            last_outputs(batch.keys),
            named_successes(batch, batch.keys, self.credit_setup.success_key),
            torch.tensor([turns.is_lost(own) for own in fields]),
            self.credit_state,
            self.global_steps,
        )
        with lending(loan):
            batch = super()._compute_advantage(batch, metrics)
        if loan.credit is not None:
            self.credit_state = loan.credit.state
            numbers = loan.credit.metrics | turns.metrics(fields)
            metrics.update({f"{PREFIX}{key}": value for key, value in numbers.items()})
        return batch

    def _balance_batch(
        self,
        batch: KVBatchMeta,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> KVBatchMeta:
        batch = super()._balance_batch(batch, metrics, logging_prefix, keep_minibatch)
        if self.plan_setup is None:
            return batch
        rollouts = graded_rollouts(batch, self.plan_setup.success_key)
        size = _update_size(self.config)
        updates = plan.plan_updates(
            self.plan_setup, rollouts, len(batch) // size, self.global_steps
        )
        left_out = set(rollouts.keys).difference(*updates)
        batch = leave_out(batch, left_out, self.tokenizer.eos_token_id)
        fillers = [key for key, tag in zip(batch.keys, batch.tags) if is_filler(tag)]
        updates = plan.fill_updates(updates, fillers, size)
        metrics.update(plan.metrics(updates, rollouts))
        return _deal(batch, updates, _num_ranks(self), metrics, logging_prefix)

    def _save_checkpoint(self) -> None:
        # before verl's files: verl marks the checkpoint as complete at the end of its own
        if self.credit_setup is not None:
            method = self.credit_setup.method
            save_state(self.config.trainer, self.global_steps, method, self.credit_state)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.credit_setup is not None and self.global_steps > 0:
            method = self.credit_setup.method
            self.credit_state = load_state(self.config.trainer, self.global_steps, method)


def _deal(
    batch: KVBatchMeta,
    updates: plan.Updates,
    num_ranks: int,
    metrics: dict[str, Any],
    logging_prefix: str,
) -> KVBatchMeta:
    """The batch rank by rank, each update shared out evenly by verl's measure of work."""
    seq_len = {key: tag["seq_len"] for key, tag in zip(batch.keys, batch.tags)}
    workload = calculate_workload(torch.tensor(list(seq_len.values()))).tolist()
    ranks = plan.by_rank(updates, dict(zip(seq_len, workload)), num_ranks, _even_parts)
    place = {key: k for k, key in enumerate(batch.keys)}
    partitions = [[place[key] for key in rank] for rank in ranks]
    metrics.update(log_seqlen_unbalance(list(seq_len.values()), partitions, prefix=logging_prefix))
    return batch.select_keys([key for rank in ranks for key in rank])


def _even_parts(workload: list[int], num_ranks: int) -> list[list[int]]:
    return get_seqlen_balanced_partitions(workload, k_partitions=num_ranks, equal_size=True)


def _update_size(config: DictConfig) -> int:
    """Rows of one update, over all ranks."""
    return config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n


def _num_ranks(trainer: CreditMixin) -> int:
    """Data-parallel ranks of the actor; verl has looked them up while it balanced the batch."""
    return max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1


@register_trainer(f"{PREFIX}sync")
class CreditSync(CreditMixin, PPOTrainerSync):
    """verl's synchronous trainer with counterpoise's credit and plans."""


@register_trainer(f"{PREFIX}colocate_async")
class CreditColocateAsync(CreditMixin, PPOTrainerColocateAsync):
    """The same for verl's asynchronous trainer whose rollouts share the trainer's GPUs."""


@register_trainer(f"{PREFIX}separate_async")
class CreditSeparateAsync(CreditMixin, PPOTrainerSeparateAsync):
    """The same for verl's asynchronous trainer with GPUs of its own for rollouts."""


def say_what_is_not_read(trainer: Any) -> None:
    """verl's own trainers check counterpoise's settings at their start, too; nothing else of them
    is touched.
    """
    start = trainer.__init__

    @functools.wraps(start)
    def check_and_start(self: PPOTrainer, config: DictConfig) -> None:
        if not isinstance(self, CreditMixin):
            check_own_trainer(config)
        start(self, config)

    trainer.__init__ = check_and_start


say_what_is_not_read(PPOTrainer)
