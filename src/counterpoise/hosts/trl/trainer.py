"""counterpoise inside TRL: token credit, plans and losses for ``GRPOTrainer``.

    from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer
    trainer = CreditGRPOTrainer(model, reward_funcs=[...], args=CreditGRPOConfig(method="delta"),
    train_dataset=...)

Three of TRL's methods are overridden; each calls super, none copies TRL:

    _generate_and_score_completions   credit, once a generation over all processes, as TRL's (B, T) advantages
    _prepare_inputs                   the plan's micro-batches in place of TRL's shuffled ones
    _compute_loss                     losses that TRL lacks; the ledger
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

try:
    import trl
    from trl.trainer.grpo_trainer import GRPOTrainer
except ImportError as error:
    raise ImportError(
        f"counterpoise.hosts.trl needs TRL: pip install 'counterpoise[trl]' ({error})"
    ) from error

from counterpoise.hosts.trl.batch import (
    add_columns,
    assign,
    gather_columns,
    token_batch,
    wanted_columns,
    whole_batch,
)
from counterpoise.hosts.trl.checks import check_trainer, check_version
from counterpoise.hosts.trl.config import CreditGRPOConfig
from counterpoise.hosts.trl.ledger import Ledger
from counterpoise.hosts.trl.loss import own_loss, prepare_update
from counterpoise.hosts.trl.plan import UpdateRows, make_plan, micro_batches, num_updates, trls_plan
from counterpoise.hosts.trl.scoring import REWARDS, SCORE, record_calls, record_scores
from counterpoise.hosts.trl.state import CreditState, credit_state
from counterpoise.plans import audit
from counterpoise.types import Plan, TokenBatch

__all__ = ["CreditGRPOConfig", "CreditGRPOTrainer", "CreditMixin"]

# a mixin whose super is GRPOTrainer once it is mixed in
Host = GRPOTrainer if TYPE_CHECKING else object


class CreditMixin(Host):
    """The three overrides alone, for a subclass of ``GRPOTrainer`` of your own: ``class
    Mine(CreditMixin, MyGRPOTrainer)``.
    """

    args: Any
    model: Any
    accelerator: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(trl.__version__)
        super().__init__(*args, **kwargs)
        config = self.args
        if not isinstance(config, CreditGRPOConfig):
            raise ValueError(
                f"{type(self).__name__}: args must be a CreditGRPOConfig, got"
                f" {type(config).__name__}."
            )
        self.credit_setup = config.setup()
        check_trainer(self, self.credit_setup)
        self.credit_ledger = Ledger(self, self.credit_setup)
        self.credit_plan: Plan | None = None
        self._credit_fresh: dict[str, Any] | None = None
        self._credit_updates: list[UpdateRows] = []
        self.add_callback(CreditState())
        self.add_callback(self.credit_ledger)
        made = self.credit_setup
        self._credit_is_off = made.is_uniform and not made.has_own_plan and not config.ledger_every

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's generation with our credit as its advantages."""
        if self._credit_is_off or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        made, state = self.credit_setup, credit_state(self)
        more = self.credit_ledger.is_due(state.generation)
        entropy, hidden = wanted_columns(made, more)
        with (
            record_calls(self, REWARDS) as rewards,
            record_scores(self, entropy=entropy, hidden=hidden) as seen,
        ):
            output = super()._generate_and_score_completions(inputs)
        batch = token_batch(self, made, output, rewards[-1], seen, more)
        credit = assign(
            self,
            made,
            batch,
            output["advantages"],
            state.method_state,
            batch_number=state.generation,
        )
        state.method_state, state.generation = credit.state, state.generation + 1
        if not made.is_uniform:
            output["advantages"] = credit.credit_NT if made.method.rules else credit.advantage_N
            self._logs["advantages"].extend(self.accelerator.gather(credit.advantage_N).tolist())
        add_columns(output, batch, credit)
        _log(self, credit.metrics)
        self._credit_fresh, self._credit_metrics = output, credit.metrics
        return output

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        """TRL's micro-batch; after a generation the plan's micro-batches are put in place of TRL's."""
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self._credit_is_off:
            return inputs
        if self._credit_fresh is not None:
            self._take_generation(self._credit_fresh)
            self._credit_fresh = None
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        if self.credit_setup.has_own_loss:
            prepare_update(self, self.credit_setup, self._credit_updates)
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, or one of ours on TRL's forward."""
        trl_loss = super()._compute_loss
        if self._credit_is_off or not self.model.training:
            return trl_loss(model, inputs)
        if self.credit_setup.has_own_loss:
            total, logp_NT, loss = own_loss(self, self.credit_setup, trl_loss, model, inputs)
        else:
            with record_calls(self, SCORE) as results:
                total = trl_loss(model, inputs)
            logp_NT, loss = results[-1][0], None
        self.credit_ledger.note(inputs, total, logp_NT, loss)
        return total

    def _take_generation(self, output: dict[str, Any]) -> None:
        """Plan a fresh generation over all processes, and open the ledger where it is due."""
        made, generation = self.credit_setup, credit_state(self).generation - 1
        is_due = self.credit_ledger.is_due(generation)
        if not made.has_own_plan and not is_due:
            return self.credit_ledger.skim(generation, output, self._credit_metrics)
        columns = gather_columns(self, output)
        batch, credit = whole_batch(self, columns)
        if made.has_own_plan:
            plan = self.credit_plan = made.method.plan(
                batch, num_updates(self), seed=self.args.seed, batch_number=generation
            )
            _check_room(plan, batch)
            shape = (self.accelerator.num_processes, self.args.gradient_accumulation_steps)
            self._credit_updates = make_plan(made, batch, credit, plan, *shape)
            self._buffered_inputs = micro_batches(self, columns, self._credit_updates)
        else:
            plan = trls_plan(self, batch, generation)
        numbers = _plan_numbers(plan, batch) if plan is not None else {}
        _log(self, numbers)
        if not is_due:
            return self.credit_ledger.skim(generation, output, self._credit_metrics | numbers)
        self.credit_ledger.open(generation, batch, credit, columns, self._credit_metrics | numbers)
        if plan is not None:
            self.credit_ledger.write_plan(generation, plan)
        return None


class CreditGRPOTrainer(CreditMixin, GRPOTrainer):
    """``GRPOTrainer`` with credit for every token.

    Takes what ``GRPOTrainer`` takes; ``args`` is a ``CreditGRPOConfig``.
    """


def _log(trainer: Any, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(float(value))


def _plan_numbers(plan: Plan, batch: TokenBatch) -> dict[str, float]:
    seen = audit(plan, batch)
    return {
        "plan/pairs_kept": seen.pairs_kept,
        "plan/prompts_split_frac": seen.prompts_split_frac,
        "plan/positive_frac_min": min(seen.positive_frac),
        "plan/positive_frac_max": max(seen.positive_frac),
        "plan/rows_left_out": float(seen.num_left_out),
    }


def _check_room(plan: Plan, batch: TokenBatch) -> None:
    """Updates that are far larger than TRL's would be a surprise for the memory."""
    room = batch.num_rollouts // len(plan)
    largest = max(len(batch_number) for batch_number in plan)
    if largest > room:
        warnings.warn(
            f"the plan's largest update has {largest} rows where TRL's has {room}: its"
            " micro-batches are larger.",
            stacklevel=2,
        )
