"""The ledger in the training loop: which batches it accounts for, where its numbers go, what it
carries from batch to batch.

The ledger only looks: a run with it and a run without it are equal bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.ledger.book import Book, Settings, within_memory
from counterpoise.ledger.measures.drift import drift, fill_bank, score_solutions
from counterpoise.ledger.measures.jitter import jitter
from counterpoise.ledger.summary import mean_of
from counterpoise.ledger.table import join_passes
from counterpoise.maths.reduce import derived_seed, masked_mean
from counterpoise.policy import Policy
from counterpoise.rollouts import RolloutBatch
from counterpoise.run.files import Columns
from counterpoise.types import Credit, Rows, TokenLoss

log = logging.getLogger("counterpoise.ledger")

State = dict[str, Any]  # JSON, carried from batch to batch


class Recording(NamedTuple):
    """What a run records.

    Args:
        every: every so many batches are accounted for; 0 records nothing.
        bank: prompts of the solution bank.
        success: a reward of at least this much counts as solved.
        book: how a batch is accounted for.
    """

    every: int
    bank: int
    success: float
    book: Settings


def is_due(every: int, batch_number: int) -> bool:
    """Whether a batch is accounted for."""
    return bool(every) and batch_number % every == 0


def columns_at(every: int, batch_number: int) -> frozenset[str]:
    """The columns that the ledger of a batch reads, whatever the method needs."""
    return frozenset({"trainer_logp_NT"} if is_due(every, batch_number) else ())


@contextmanager
def observe(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    collected: RolloutBatch,
    credit: Credit,
    recording: Recording,
    batch_number: int,
    state: State | None,
    num_updates: int,
) -> Iterator[Observer]:
    """Watch the updates of one batch, ``num_updates`` in each pass over it; afterwards ``metrics``
    (keys ``ledger/...``), ``tokens`` (the table, None where there is none) and ``state`` (JSON, for
    the next batch) are there.
    """
    observer = Observer(policy, collected, recording, batch_number, state, num_updates)
    if is_due(recording.every, batch_number):
        observer.open_books(optimizer, credit)
    yield observer
    if recording.every:
        observer.close()


class Observer:
    """``before()`` and ``after(...)`` around each update; on batches that are not accounted for it
    keeps the run's series only.
    """

    def __init__(
        self,
        policy: Policy,
        collected: RolloutBatch,
        recording: Recording,
        batch_number: int,
        state: State | None,
        num_updates: int,
    ) -> None:
        self.policy, self.collected = policy, collected
        self.recording, self.batch_number = recording, batch_number
        self.num_updates = num_updates
        self.metrics: dict[str, float] = {}
        self.tokens: Columns | None = None
        self.state: State = dict(state or {})
        self._grad_norms: list[float] = []
        self._books: list[Book] = []  # one per pass over the batch
        self._next_book: Callable[[], Book] | None = None

    def open_books(self, optimizer: torch.optim.Optimizer, credit: Credit) -> None:
        """Account for the batch."""
        collected, how = self.collected, self.recording.book
        rollouts = (collected.batch, collected.prompt_ids, credit)

        def next_book() -> Book:
            number = len(self._books)
            seed = derived_seed(how.seed, number, "pass") if number else how.seed
            settings = how._replace(seed=seed)
            return Book(self.policy.model, optimizer, *rollouts, self._texts, settings)

        self._next_book = next_book

    @property
    def _book(self) -> Book | None:
        """That of the pass that goes on."""
        return self._books[-1] if self._books else None

    def before(self) -> None:
        if self._next_book is not None and len(self._grad_norms) % self.num_updates == 0:
            self._books.append(self._next_book())
        with within_memory(self._book, self._give_up):
            if self._book is not None:
                self._book.before()

    def after(self, rows: Rows, loss: TokenLoss, clip_factor: float, grad_norm: float) -> None:
        self._grad_norms.append(grad_norm)
        with within_memory(self._book, self._give_up):
            if self._book is not None:
                self._book.after(rows, loss, clip_factor)

    def close(self) -> None:
        """Gather the table and the numbers, carry the state on."""
        self._fill_bank()
        if self._books:
            tables = [book.table(self.batch_number) for book in self._books]
            self.tokens = join_passes(tables, self.num_updates)
            taxes = [tax for book in self._books for tax in book.taxes]
            numbers = mean_of([book.summary() for book in self._books])
            self.metrics |= numbers | self._cumulative(taxes) | self._drift()
            for note in [note for book in self._books for note in book.notes]:
                self._say(note)
        jitters, self.state["jitter"] = jitter(self.state.get("jitter"), self._series())
        self.metrics |= {f"jitter/{name}": value for name, value in jitters.items()}
        self.metrics = {f"ledger/{name}": value for name, value in self.metrics.items()}

    def _give_up(self, why: str) -> None:
        self._books, self._next_book = [], None
        self._say(why)

    def _series(self) -> dict[str, float]:
        batch = self.collected.batch
        series = {
            "reward": float(batch.reward_N.mean()),
            "accuracy": float((batch.reward_N >= self.recording.success).float().mean()),
        }
        if batch.entropy_NT is not None:
            series["entropy"] = float(masked_mean(batch.entropy_NT, batch.mask_NT))
        return series | {"grad_norm": sum(self._grad_norms) / max(1, len(self._grad_norms))}

    def _cumulative(self, taxes: list[dict[str, float]]) -> dict[str, float]:
        total: dict[str, float] = dict(self.state.get("tax", {}))
        for tax in taxes:
            for name, value in tax.items():
                total[name] = total.get(name, 0.0) + value
        self.state["tax"] = total
        return {f"tax/cumulative_{name}": value for name, value in total.items()}

    def _fill_bank(self) -> None:
        size, bank = self.recording.bank, self.state.get("bank", [])
        if len(bank) >= size:
            return
        batch = self.collected.batch
        ids = [
            row[keep].tolist() for row, keep in zip(batch.token_ids_NT.cpu(), batch.mask_NT.cpu())
        ]
        names = [self.collected.prompts[g].id for g in batch.group_N.tolist()]
        self.state["bank"] = fill_bank(
            bank,
            size,
            names,
            self.collected.prompt_ids,
            ids,
            (batch.reward_N >= self.recording.success).tolist(),
        )

    def _drift(self) -> dict[str, float]:
        bank = self.state.get("bank", [])
        if self.recording.bank and not bank:
            self._say(
                "the solution bank is empty: no prompt so far has two distinct verified solutions,"
                " so solution drift is not told yet. Raise rollouts.group_size or take an easier"
                " task."
            )
        numbers, self.state["bank"] = drift(bank, self._score)
        return {f"drift/{name}": value for name, value in numbers.items()}

    def _score(self, prompt_ids: list[list[int]], solutions: list[list[int]]) -> Tensor:
        book = self.recording.book
        with book.kernels():
            return score_solutions(
                self.policy.model,
                prompt_ids,
                solutions,
                temperature=book.temperature,
                token_budget=book.token_budget,
            )

    def _texts(self, ids: list[int]) -> list[str]:
        return self.policy.tokenizer.batch_decode(
            [[token] for token in ids], skip_special_tokens=False
        )

    def _say(self, note: str) -> None:
        """One line in the log, once per run."""
        said = self.state.setdefault("said", [])
        if note not in said:
            said.append(note)
            log.warning("ledger: %s", note)
