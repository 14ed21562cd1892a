"""counterpoise inside TRL: token credit, plans and losses for ``GRPOTrainer``.

    from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer
    args = CreditGRPOConfig(method="delta")
    trainer = CreditGRPOTrainer(model, reward_funcs=[...], args=args, train_dataset=...)

What TRL calls a generation is a batch here. Three of TRL's methods are overridden; each calls
super, none copies TRL:

    _generate_and_score_completions   credit, once per batch over all processes, as TRL's (B, T)
                                      advantages
    _prepare_inputs                   the plan's micro-batches in place of TRL's shuffled ones
    _compute_loss                     losses that TRL lacks; the ledger
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

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
    columns_to_score,
    gather_columns,
    token_batch,
    whole_batch,
)
from counterpoise.hosts.trl.checks import check_trainer, check_version
from counterpoise.hosts.trl.config import CreditGRPOConfig
from counterpoise.hosts.trl.ledger import Ledger
from counterpoise.hosts.trl.loss import own_loss, prepare_update
from counterpoise.hosts.trl.plan import (
    UpdateRows,
    check_room,
    deal_updates,
    micro_batches,
    num_updates,
    trl_plan,
)
from counterpoise.hosts.trl.scoring import REWARDS, SCORE, record_calls, record_scores
from counterpoise.hosts.trl.state import CreditState, credit_state
from counterpoise.plans.audit import plan_metrics
from counterpoise.types import Plan

__all__ = ["CreditGRPOConfig", "CreditGRPOTrainer", "CreditMixin"]

# a mixin whose super is GRPOTrainer once it is mixed in
Host = GRPOTrainer if TYPE_CHECKING else object


class CreditMixin(Host):
    """The three overrides alone, for a subclass of ``GRPOTrainer`` of your own: ``class
    Mine(CreditMixin, MyGRPOTrainer)``.
    """

    # TRL leaves their types open: sizes that may be None until it has filled them in, a gather of
    # anything
    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    processing_class: Any
    num_generations: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(trl.__version__)
        super().__init__(*args, **kwargs)
        config = self.args
        if not isinstance(config, CreditGRPOConfig):
            raise ValueError(
                f"{type(self).__name__}: args must be a CreditGRPOConfig, got"
                f" {type(config).__name__}."
            )
        setup = self.credit_setup = config.setup()
        check_trainer(self, setup)
        self.credit_ledger = Ledger(self, self.credit_setup)
        self.credit_plan: Plan | None = None
        self._credit_new: dict[str, Any] | None = None
        self._credit_updates: list[UpdateRows] = []
        self.add_callback(CreditState())
        self.add_callback(self.credit_ledger)
        self._credit_is_off = not (
            config.ledger_every or setup.has_own_plan or not setup.is_uniform
        )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with our credit as its advantages."""
        if self._credit_is_off or not self.model.training:
            return super()._generate_and_score_completions(inputs)
        setup, state = self.credit_setup, credit_state(self)
        more = self.credit_ledger.is_due(state.num_batches)
        entropy, hidden = columns_to_score(setup, more)
        with (
            record_calls(self, REWARDS) as rewards,
            record_scores(self, entropy=entropy, hidden=hidden) as scores,
        ):
            output = super()._generate_and_score_completions(inputs)
        batch = token_batch(self, setup, output, rewards[-1], scores, more)
        credit = assign(
            self,
            setup,
            batch,
            output["advantages"],
            state.method_state,
            batch_number=state.num_batches,
        )
        state.method_state, state.num_batches = credit.state, state.num_batches + 1
        if not setup.is_uniform:
            output["advantages"] = credit.credit_NT if setup.method.rules else credit.advantage_N
            self._logs["advantages"].extend(self.accelerator.gather(credit.advantage_N).tolist())
        add_columns(output, batch, credit)
        _log(self, credit.metrics)
        self._credit_new, self._credit_metrics = output, credit.metrics
        return output

    def _prepare_inputs(self, generation_batch: dict[str, Any]) -> dict[str, Any]:
        """TRL's micro-batch; in a new batch the plan's micro-batches are put in place of TRL's."""
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training or self._credit_is_off:
            return inputs
        if self._credit_new is not None:
            self._take_batch(self._credit_new)
            self._credit_new = None
            assert self._buffered_inputs is not None
            inputs = self._buffered_inputs[self._step % self.args.steps_per_generation]
        if self.credit_setup.has_own_loss:
            prepare_update(self, self.credit_setup, self._credit_updates)
        return inputs

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
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

    def _take_batch(self, output: dict[str, Any]) -> None:
        """Plan a new batch over all processes, and open the ledger where it is due."""
        setup, number = self.credit_setup, credit_state(self).num_batches - 1
        is_due = self.credit_ledger.is_due(number)
        if not setup.has_own_plan and not is_due:
            return self.credit_ledger.skim(number, output, self._credit_metrics)
        columns = gather_columns(self, output)
        batch, credit = whole_batch(self, columns)
        if setup.has_own_plan:
            plan = self.credit_plan = setup.method.plan(
                batch, num_updates(self), seed=self.args.seed, batch_number=number
            )
            check_room(plan, batch)
            shape = (self.accelerator.num_processes, self.args.gradient_accumulation_steps)
            self._credit_updates = deal_updates(setup, batch, credit, plan, *shape)
            self._buffered_inputs = micro_batches(self, columns, self._credit_updates)
        else:
            plan = trl_plan(self, batch, number)
        plan_numbers = plan_metrics(plan, batch) if plan is not None else {}
        _log(self, plan_numbers)
        metrics = self._credit_metrics | plan_numbers
        if not is_due:
            return self.credit_ledger.skim(number, output, metrics)
        self.credit_ledger.open(number, batch, credit, columns, metrics)
        if plan is not None:
            self.credit_ledger.write_plan(number, plan)
        return None


class CreditGRPOTrainer(CreditMixin, GRPOTrainer):
    """``GRPOTrainer`` with credit for every token.

    Takes what ``GRPOTrainer`` takes; ``args`` is a ``CreditGRPOConfig``.
    """


def _log(trainer: CreditMixin, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(float(value))
