"""The ledger in the training loop: which batches it accounts for, where its numbers go, what it
carries from batch to batch.

The ledger only looks: a run with it and a run without it are equal bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from counterpoise.ledger import Book, Settings, fill_bank, load_categories, within_memory
from counterpoise.ledger.measures.drift import drift
from counterpoise.ledger.measures.jitter import jitter
from counterpoise.maths.reduce import masked_mean
from counterpoise.policy import Policy, measure
from counterpoise.run.checkpoint import LoopState
from counterpoise.run.write import write_tokens
from counterpoise.trainer.collect import autocast
from counterpoise.trainer.config import Config
from counterpoise.trainer.update import Update, budget_that_fits
from counterpoise.types import Credit, RolloutBatch

log = logging.getLogger("counterpoise.ledger")


@contextmanager
def observe(
    run_dir: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    collected: RolloutBatch,
    credit: Credit,
    config: Config,
    state: LoopState,
) -> Iterator[Observer]:
    """Watch the updates of one batch; afterwards ``metrics`` (keys ``ledger/...``)
    and ``state`` (JSON) are there.
    """
    observer = Observer(run_dir, policy, optimizer, collected, credit, config, state)
    yield observer
    if config.ledger.every:
        observer.close()


class Observer:
    """``before()`` and ``after(update)`` around each update; on batches that are not chosen
    it keeps the run's series only.
    """

    def __init__(
        self,
        run_dir: Path,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        collected: RolloutBatch,
        credit: Credit,
        config: Config,
        state: LoopState,
    ) -> None:
        self.run_dir, self.policy, self.collected, self.config, self.batch_number = (
            run_dir,
            policy,
            collected,
            config,
            state.batch_number,
        )
        self.metrics: dict[str, float] = {}
        self.state: dict[str, Any] = dict(state.ledger or {})
        self._grad_norms: list[float] = []
        self._book: Book | None = None
        settings = config.ledger
        if settings.every and state.batch_number % settings.every == 0:
            how = Settings(
                axes=settings.decompose,
                categories=load_categories(settings.categories),
                temperature=config.rollouts.temperature,
                token_budget=budget_that_fits(policy.model, config),
                autocast=lambda: autocast(policy.model),
            )
            self._book = Book(
                policy.model,
                optimizer,
                collected.batch,
                collected.prompt_ids,
                credit,
                self._texts,
                how,
            )

    def before(self) -> None:
        with within_memory(self._book, self._give_up):
            if self._book is not None:
                self._book.before()

    def after(self, update: Update) -> None:
        self._grad_norms.append(update.grad_norm)
        with within_memory(self._book, self._give_up):
            if self._book is not None:
                self._book.after(update.rows, update.loss, update.clip_factor)

    def close(self) -> None:
        """Write the table, gather the numbers, carry the state on."""
        self._fill_bank()
        if self._book is not None:
            write_tokens(self.run_dir, self.batch_number, self._book.table(self.batch_number))
            self.metrics |= (
                self._book.summary() | self._cumulative(self._book.taxes) | self._drift()
            )
            for note in self._book.notes:
                self._say(note)
        found, self.state["jitter"] = jitter(self.state.get("jitter"), self._series())
        self.metrics |= {f"jitter/{name}": value for name, value in found.items()}
        self.metrics = {f"ledger/{name}": value for name, value in self.metrics.items()}

    def _give_up(self, why: str) -> None:
        self._book = None
        self._say(why)

    def _series(self) -> dict[str, float]:
        batch = self.collected.batch
        series = {
            "reward": float(batch.reward_N.mean()),
            "accuracy": float((batch.reward_N >= self.config.success).float().mean()),
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
        size, bank = self.config.ledger.bank, self.state.get("bank", [])
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
            (batch.reward_N >= self.config.success).tolist(),
        )

    def _drift(self) -> dict[str, float]:
        bank = self.state.get("bank", [])
        if self.config.ledger.bank and not bank:
            self._say(
                "the solution bank is empty: no prompt so far has two distinct verified solutions,"
                " so solution drift is not told yet. Raise rollouts.group_size or take an easier"
                " task."
            )
        found, self.state["bank"] = drift(bank, self._score)
        return {f"drift/{name}": value for name, value in found.items()}

    def _score(self, prompt_ids: list[list[int]], solutions: list[list[int]]) -> Tensor:
        device = self.collected.batch.mask_NT.device
        width = max(len(ids) for ids in solutions)
        ids_NT = torch.tensor([ids + [0] * (width - len(ids)) for ids in solutions], device=device)
        mask_NT = torch.tensor(
            [[t < len(ids) for t in range(width)] for ids in solutions], device=device
        )
        settings = {
            "temperature": self.config.rollouts.temperature,
            "token_budget": budget_that_fits(self.policy.model, self.config),
        }
        found = measure(
            self.policy.model, prompt_ids, ids_NT, mask_NT, {"trainer_logp_NT"}, **settings
        )
        return found["trainer_logp_NT"].sum(1)

    def _texts(self, ids: list[int]) -> list[str]:
        return self.policy.tokenizer.batch_decode(
            [[token] for token in ids], skip_special_tokens=False
        )

    def _say(self, note: str) -> None:
        """One line in the log, once a run."""
        said = self.state.setdefault("said", [])
        if note not in said:
            said.append(note)
            log.warning("ledger: %s", note)
