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

Two of the Trainer's, which save and load a checkpoint, keep the average of a teacher in it.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trl
from torch import Tensor, nn
from trl.trainer.grpo_trainer import GRPOTrainer

from counterpoise.hosts.trl.batch import (
    assign,
    columns_to_score,
    gather_columns,
    is_success,
    no_columns,
    spread_columns,
    token_batch,
    total_reward,
    whole_batch,
    with_sampler,
)
from counterpoise.hosts.trl.checks import check_class, check_trainer, check_version
from counterpoise.hosts.trl.config import CreditGRPOConfig
from counterpoise.hosts.trl.ledger import Ledger
from counterpoise.hosts.trl.live import live_columns, live_rows, loss_mask
from counterpoise.hosts.trl.loss import (
    kl_of_real_rows,
    off_policy_by_rollout,
    own_loss,
    prepare_update,
)
from counterpoise.hosts.trl.plan import (
    UpdateRows,
    check_room,
    deal_updates,
    live_plan,
    micro_batches,
    trl_plan,
)
from counterpoise.hosts.trl.readings import Graded, hear_feedback
from counterpoise.hosts.trl.scoring import (
    REWARDS,
    SCORE,
    Scores,
    check_text_only,
    record_calls,
    record_scores,
)
from counterpoise.hosts.trl.state import CreditState, credit_state
from counterpoise.hosts.trl.teacher import (
    Clock,
    measure_teacher,
    restore_teacher,
    save_teacher,
    teacher_of,
)
from counterpoise.hosts.trl.turns import (
    Told,
    check_scores,
    gather_talks,
    keep_arguments,
    told_rows,
    turn_columns,
)
from counterpoise.plans.audit import plan_metrics
from counterpoise.rollouts import Conversation
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
    beta: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_version(trl.__version__)
        check_class(type(self))
        super().__init__(*args, **kwargs)
        config = self.args
        if not isinstance(config, CreditGRPOConfig):
            raise ValueError(
                f"{type(self).__name__}: args must be a CreditGRPOConfig, got"
                f" {type(config).__name__}."
            )
        setup = self.credit_setup = config.setup()
        check_trainer(self, setup)
        self.credit_teacher = teacher_of(self, setup)
        self._credit_clock = Clock()
        self.credit_ledger = Ledger(self, self.credit_setup)
        self.credit_plan: Plan | None = None
        self._credit_new: dict[str, Any] | None = None
        self._credit_updates: list[UpdateRows] = []
        self._credit_talks: list[Conversation] | None = None
        self._credit_has_warned = False
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
        calls: list[tuple[Any, ...]] = []
        with (
            record_calls(self, REWARDS, keep_arguments(calls)) as rewards,
            record_scores(self, entropy=entropy, hidden=hidden) as scores,
            hear_feedback(self) as heard,
        ):
            output = super()._generate_and_score_completions(inputs)
        if setup.has_own_plan or self.args.ledger_every:
            check_text_only(output, "plan or ledger")
        told, graded = told_rows(self, *calls[-1]), Graded(calls[-1][0], calls[-1][1], heard)
        self._credit_metrics = self._give_credit(output, rewards[-1], scores, more, told, graded)
        _log(self, self._credit_metrics)
        self._credit_new = output
        return output

    def _give_credit(
        self,
        output: dict[str, Any],
        reward_by_function: Tensor,
        scores: list[Scores],
        more: bool,
        told_N: list[Told] | None,
        graded: Graded,
    ) -> dict[str, float]:
        """Our columns into TRL's dict, the credit as its advantages; the metrics."""
        setup, state, mask_NT = self.credit_setup, credit_state(self), loss_mask(output)
        reward_N = total_reward(self, reward_by_function)
        told = None if told_N is None else turn_columns(self, told_N, mask_NT, reward_N)
        check_scores(setup, told)
        self._credit_talks = told.talks if told else None
        output |= told.columns if told else {}
        live = live_rows(self, setup, mask_NT, told.sound(reward_N) if told else reward_N)
        with self._credit_clock.time(self) if self.credit_teacher else nullcontext():
            success_N = is_success(self, setup, reward_by_function)
            taught, numbers = measure_teacher(self, output, graded, success_N, live)
        batch = token_batch(self, setup, output, reward_by_function, scores, live, more, taught)
        metrics = {"credit/left_out_frac": live.left_out_frac, **numbers}
        if batch is None:
            output |= no_columns(live, mask_NT)
        else:
            number = state.num_batches
            credit = assign(self, setup, batch, live, state.method_state, batch_number=number)
            state.method_state = credit.state
            output |= spread_columns(batch, credit, live, mask_NT.shape[1])
            metrics |= credit.metrics
        state.num_batches += 1
        if not setup.is_uniform:
            output["advantages"] = output["cp_credit" if setup.method.rules else "cp_advantage"]
            self._logs["advantages"].extend(
                self.accelerator.gather(output["cp_advantage"]).tolist()
            )
        return metrics

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
        if self._credit_updates and self.credit_setup.has_own_loss:
            prepare_update(self, self.credit_setup, self._credit_updates)
        return inputs

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss, or one of ours on TRL's forward."""
        trl_loss = super()._compute_loss
        if self._credit_is_off or not self.model.training:
            return trl_loss(model, inputs)
        with kl_of_real_rows(self, inputs):
            if self._credit_updates and self.credit_setup.has_own_loss:
                total, logp_NT, loss = own_loss(self, self.credit_setup, trl_loss, model, inputs)
            else:
                with record_calls(self, SCORE) as results, off_policy_by_rollout(self, inputs):
                    total = trl_loss(model, inputs)
                logp_NT, loss = results[-1][0], None
        self.credit_ledger.note(inputs, total, logp_NT, loss)
        return total

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """With the average of a teacher, if there is one."""
        super()._save_checkpoint(model, trial)
        if self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial))
            save_teacher(self.credit_teacher, folder / f"checkpoint-{self.state.global_step}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        restore_teacher(self.credit_teacher, Path(resume_from_checkpoint))

    def _take_batch(self, output: dict[str, Any]) -> None:
        """Plan a new batch over all processes, and open the ledger where it is due."""
        setup, number = self.credit_setup, credit_state(self).num_batches - 1
        is_due = self.credit_ledger.is_due(number)
        if not setup.has_own_plan and not is_due:
            return self.credit_ledger.skim(number, output, self._credit_metrics)
        talks = gather_talks(self, output["cp_row"]) if is_due else None
        columns = live_columns(gather_columns(self, output))
        self._credit_updates = []
        if not len(columns["cp_row"]):
            return self.credit_ledger.skim(number, output, self._credit_metrics)
        batch, credit = whole_batch(self, columns)
        if setup.has_own_plan:
            plan = self.credit_plan = live_plan(self, setup, batch, number)
            check_room(self, plan)
            self._credit_updates = deal_updates(self, setup, batch, credit, plan)
            self._buffered_inputs = micro_batches(self, columns, self._credit_updates)
        else:
            plan = trl_plan(self, batch, number)
        plan_numbers = plan_metrics(
            [row_R for row_R in plan if len(row_R)], setup.method.see(batch)
        )
        _log(self, plan_numbers)
        metrics = self._credit_metrics | plan_numbers
        if not is_due:
            return self.credit_ledger.skim(number, output, metrics)
        told = with_sampler(batch, columns)
        self.credit_ledger.open(number, told, credit, columns, metrics, talks)
        return self.credit_ledger.write_plan(number, plan)


class CreditGRPOTrainer(CreditMixin, GRPOTrainer):
    """``GRPOTrainer`` with credit for every token.

    Takes what ``GRPOTrainer`` takes; ``args`` is a ``CreditGRPOConfig``.
    """


def _log(trainer: CreditMixin, metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        trainer._metrics["train"][name].append(float(value))
