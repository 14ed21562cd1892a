"""The ledger inside TRL: what each update of a chosen batch did to every token, as files and as
TRL's metrics.

A token's coefficient is read off the loss that was trained on, TRL's or ours: minus its derivative
by the token's log-prob. The ledger only looks: training with and without it is equal bit for bit.
Where the model is sharded (FSDP, DeepSpeed) a single process cannot score it before and after an
update; then the columns of the loss alone are kept.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from counterpoise.hosts.trl.folder import begin_folder, rollout_batch
from counterpoise.hosts.trl.live import FILLER, loss_mask
from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.plan import num_updates
from counterpoise.hosts.trl.scoring import record_calls
from counterpoise.ledger.account import loss_columns
from counterpoise.ledger.book import Book, Settings, read_update, within_memory
from counterpoise.ledger.summary import mean_of
from counterpoise.ledger.table import join_passes
from counterpoise.maths.reduce import derived_seed, masked_mean
from counterpoise.rollouts import Conversation
from counterpoise.run import write
from counterpoise.run.files import Columns
from counterpoise.run.schema import INSIDE_TRL
from counterpoise.trainer.metrics import turn_metrics
from counterpoise.types import Credit, Plan, Rows, TokenBatch, TokenLoss

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

log = logging.getLogger("counterpoise.ledger")


class LossBook(Book):
    """The book of a sharded model: what the loss used, without the log-probs after the update."""

    def before(self) -> None:
        """Nothing to keep."""

    def after(self, rows: Rows, loss: TokenLoss, clip_factor: float = 1.0) -> None:
        known = read_update(rows, loss, torch.zeros(0))  # the optimizer is not asked
        self._keep(known, loss_columns(known.rows, known.loss))

    def summary(self) -> dict[str, float]:
        return {f"residual/{name}": value for name, value in mean_of(self.residuals).items()}


class Ledger(TrainerCallback):
    """Watches the updates of every n-th batch.

    Files are in ``output_dir/counterpoise``, the layout of a run folder.
    """

    def __init__(self, trainer: CreditMixin, setup: Setup) -> None:
        self.trainer, self.setup = trainer, setup
        self.folder = Path(trainer.args.output_dir) / INSIDE_TRL
        self.book: Book | None = None
        self._is_open, self._has_begun = False, False
        self._parts: list[dict[str, Tensor]] = []
        self._tables: list[Columns] = []
        self._summaries: list[dict[str, float]] = []
        self._prompt_ids: list[list[int]] = []
        self._watch = contextlib.ExitStack()
        self._norms: list[Any] = []

    @property
    def is_sharded(self) -> bool:
        return bool(self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled)

    def is_due(self, batch_number: int) -> bool:
        every = self.trainer.args.ledger_every
        return bool(every) and batch_number % every == 0

    def open(
        self,
        batch_number: int,
        batch: TokenBatch,
        credit: Credit,
        columns: dict[str, Any],
        metrics: dict[str, float],
        talks: list[Conversation] | None,
    ) -> None:
        """Before the first update of a batch, on every process; the main one keeps the book."""
        self._is_open, self._num_updates, self._number = True, 0, batch_number
        self._batch, self._credit, self._metrics = batch, credit, metrics
        self._tables, self._summaries = [], []
        if not self.trainer.accelerator.is_main_process:
            return
        self._begin(batch_number)
        self._prompt_ids = [
            row[keep.bool()].tolist()
            for row, keep in zip(columns["prompt_ids"].cpu(), columns["prompt_mask"].cpu())
        ]
        self.book = self._new_book()
        tokenizer = self.trainer.processing_class
        rollouts = rollout_batch(batch_number, tokenizer, self._prompt_ids, batch, talks)
        self._metrics = metrics | turn_metrics(rollouts)
        write.write_rollouts(self.folder, batch_number, rollouts, credit)

    def _begin(self, batch_number: int) -> None:
        """The run folder, before this process writes into it for the first time."""
        if not self._has_begun:
            begin_folder(self.folder, self.trainer, self.setup, batch_number)
            self._has_begun = True

    def _new_book(self) -> Book:
        """For one pass over the batch; with ``num_iterations`` there are several."""
        trainer = self.trainer
        settings = Settings(
            axes=trainer.args.ledger_decompose,
            temperature=trainer.temperature,
            autocast=trainer.accelerator.autocast,
            own_tokens=trainer.args.ledger_own_tokens,
            seed=derived_seed(trainer.args.seed, self._number, f"ledger {len(self._tables)}"),
        )
        kind = LossBook if self.is_sharded else Book
        model = trainer.accelerator.unwrap_model(trainer.model)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        columns = (self._batch, self._prompt_ids, self._credit)
        return kind(model, optimizer, *columns, self._texts, settings)

    def write_plan(self, batch_number: int, plan: Plan) -> None:
        if self.trainer.accelerator.is_main_process:
            write.write_plan(self.folder, batch_number, plan.manifest)

    def note(
        self, inputs: dict[str, Any], total: Tensor, logp_NT: Tensor, loss: TokenLoss | None
    ) -> None:
        """A micro-batch: its rows and the coefficients with which their tokens enter the update."""
        if not self._is_open:
            return
        if not self._parts:
            self._norms = self._watch.enter_context(
                record_calls(self.trainer.accelerator, "clip_grad_norm_")
            )
        (grad_NT,) = torch.autograd.grad(total, logp_NT, retain_graph=True)
        coef_NT = -grad_NT.detach().float() / self.trainer.accelerator.num_processes
        before_NT = inputs.get("old_per_token_logps")
        ratio_NT = (
            torch.ones_like(coef_NT)
            if before_NT is None
            else (logp_NT.detach() - before_NT).exp().float()
        )
        self._parts.append(
            {
                "row": inputs["cp_row"],
                "coef": coef_NT,
                "ratio": ratio_NT if loss is None else loss.ratio_NT,
            }
        )

    def on_pre_optimizer_step(self, *args: object, **kwargs: object) -> None:
        if self._is_open:
            self._watch.close()
            with within_memory(self.book, self._give_up):
                if self.book is not None:
                    self.book.before()

    def on_optimizer_step(self, *args: object, **kwargs: object) -> None:
        if not self._is_open:
            return
        row_R, coef_NT, ratio_NT = self._gather()
        with within_memory(self.book, self._give_up):
            if self.book is not None and not len(row_R):
                self.book.skip()
            elif self.book is not None:
                rows = self.setup.method.rows(self._batch, self._credit, row_R)
                self.book.after(rows, _token_loss(rows, coef_NT, ratio_NT), self._clip_factor())
        self._parts, self._num_updates = [], self._num_updates + 1
        if self._num_updates % num_updates(self.trainer) == 0:
            self._end_pass()

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """A batch whose last updates did not happen is written as far as it came."""
        if self._is_open and self._num_updates:
            if self._num_updates % num_updates(self.trainer):  # else the last pass is kept already
                self._keep_pass()
            self.close()

    def _end_pass(self) -> None:
        self._keep_pass()
        if self._num_updates == num_updates(self.trainer) * self.trainer.num_iterations:
            self.close()
        elif self.book is not None:
            self.book = self._new_book()

    def _keep_pass(self) -> None:
        if self.book is None:
            return
        self._tables.append(self.book.table(self._number))
        self._summaries.append(self.book.summary())

    def close(self) -> None:
        """Write the token table and the numbers."""
        self._is_open = False
        if not self.trainer.accelerator.is_main_process:
            return
        numbers = {} if self.book is None else self._numbers(self.book)
        batch, more = self._batch, {}
        if batch.entropy_NT is not None:
            more = {"entropy/mean": float(masked_mean(batch.entropy_NT, batch.mask_NT))}
        self._append(
            self._number, batch.reward_N, batch.length_N, {**more, **self._metrics, **numbers}
        )
        self.book = None

    def _numbers(self, book: Book) -> dict[str, float]:
        write.write_tokens(
            self.folder, self._number, join_passes(self._tables, num_updates(self.trainer))
        )
        numbers = {f"ledger/{name}": value for name, value in mean_of(self._summaries).items()}
        for name, value in numbers.items():
            self.trainer._metrics["train"][name].append(value)
        for note in book.notes:
            log.warning("ledger: %s", note)
        return numbers

    def _give_up(self, why: str) -> None:
        self.book = None
        log.warning("ledger: %s", why)

    def skim(self, batch_number: int, output: dict[str, Any], metrics: dict[str, float]) -> None:
        """A batch that is not accounted for: its numbers alone, so that curves of the run
        folder have no holes.
        """
        if not self.trainer.args.ledger_every:
            return
        gather = self.trainer.accelerator.gather
        reward_N, length_N = gather(output["cp_reward"]), gather(loss_mask(output).sum(1))
        is_live_N = gather(output["cp_row"]) != FILLER
        if self.trainer.accelerator.is_main_process:
            self._append(batch_number, reward_N[is_live_N], length_N[is_live_N], metrics)

    def _append(
        self, batch_number: int, reward_N: Tensor, length_N: Tensor, metrics: dict[str, float]
    ) -> None:
        self._begin(batch_number)
        numbers = {
            "reward/mean": float(reward_N.mean()),
            "rollouts/num": len(reward_N),
            "rollouts/length": float(length_N.float().mean()),
            "optimizer/lr": self.trainer._get_learning_rate(),
        }
        write.append_row(self.folder, "metrics", batch_number, {**numbers, **metrics})

    def _gather(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the batch, coefficients, ratios: of all processes, fillers left out."""
        accelerator, columns = self.trainer.accelerator, []
        for name in ("row", "coef", "ratio"):
            value = torch.cat([part[name] for part in self._parts]).contiguous()
            if value.ndim > 1 and accelerator.num_processes > 1:
                value = accelerator.pad_across_processes(value, dim=1)
            columns.append(accelerator.gather(value))
        is_real_R = columns[0] != FILLER
        return columns[0][is_real_R], columns[1][is_real_R], columns[2][is_real_R]

    def _clip_factor(self) -> float:
        limit = self.trainer.args.max_grad_norm
        return (
            min(1.0, limit / (float(self._norms[0]) + 1e-6))
            if limit > 0 and self._norms and not self.is_sharded
            else 1.0
        )

    def _texts(self, ids: list[int]) -> list[str]:
        return self.trainer.processing_class.batch_decode(
            [[token] for token in ids], skip_special_tokens=False
        )


def _token_loss(rows: Rows, total_NT: Tensor, ratio_NT: Tensor) -> TokenLoss:
    """TRL's losses do not tell coefficient and reduction apart: the reduction is the method's
    column, the coefficient what is left.
    """
    coef_NT = torch.where(
        rows.scale_NT > 0, total_NT / torch.where(rows.scale_NT > 0, rows.scale_NT, 1), 0
    )
    is_cut_NT = (coef_NT == 0) & (rows.credit_NT != 0) & rows.mask_NT
    return TokenLoss(torch.zeros_like(coef_NT), ratio_NT, is_cut_NT, coef_NT)
