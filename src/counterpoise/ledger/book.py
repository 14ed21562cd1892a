"""The ledger of one batch: opened before its first update, it accounts for each,
then gives a table and a summary.

    book = Book(model, optimizer, batch, prompt_ids, credit, token_texts, settings)
    for rows in batches:
        book.before()
        ...                                             # the update, by whoever trains
        book.after(rows, loss, clip_factor)
    book.table(batch), book.summary()

Axes as in ``types``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.ledger.account import account
from counterpoise.ledger.calculus.decompose import forward_mode
from counterpoise.ledger.calculus.logprobs import Params, Texts, copy_params, of_model
from counterpoise.ledger.calculus.optimizers import update_counts
from counterpoise.ledger.measures.categories import categories, name_tokens
from counterpoise.ledger.measures.classes import Facts, check_axes, token_classes
from counterpoise.ledger.measures.residual import residuals
from counterpoise.ledger.measures.sharing import sharing
from counterpoise.ledger.summary import mean_of, summary, tax
from counterpoise.ledger.table import token_table
from counterpoise.maths.reduce import derived_seed
from counterpoise.maths.transfer import fetch
from counterpoise.maths.turns import token_advantage
from counterpoise.types import Credit, Rows, TokenBatch, TokenLoss

OWN_TOKENS = 8  # of an update
_FORWARD_MODE: WeakKeyDictionary[nn.Module, tuple[bool | None, str]] = (
    WeakKeyDictionary()
)  # tried once a model


class Settings(NamedTuple):
    """What to tell apart and how to score.

    Args:
        axes: decompositions, see ``classes.DECOMPOSITIONS``; the first one also gives the
            cancellation.
        categories: token texts -> category names.
        temperature, token_budget: as in training.
        autocast: precision of the training forward.
        kernels: its layers, where they are not the model's own.
        own_tokens: tokens of each update whose own part is computed; 0 leaves it out.
        seed: of their draw; another one for every batch.
    """

    axes: Sequence[str] = ("sign",)
    categories: Callable[[Sequence[str]], list[str]] = categories
    temperature: float = 1.0
    token_budget: int = 16384
    autocast: Callable[[], AbstractContextManager] = nullcontext
    kernels: Callable[[], AbstractContextManager] = nullcontext
    own_tokens: int = OWN_TOKENS
    seed: int = 0


DEFAULT = Settings()


class Entry(NamedTuple):
    """The columns of one update, [R, T], wherever they were computed; ``row_R`` on the CPU."""

    row_R: Tensor
    columns: dict[str, Tensor]


class Book:
    """Holds the columns of a batch while its updates happen; reads the model and
    the optimizer and changes neither.

    Args:
        prompt_ids: the prompt's token ids of every rollout.
        token_texts: token ids -> the text of each.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        optimizer: torch.optim.Optimizer,
        batch: TokenBatch,
        prompt_ids: Sequence[Sequence[int]],
        credit: Credit,
        token_texts: Callable[[list[int]], list[str]],
        settings: Settings = DEFAULT,
    ) -> None:
        check_axes(settings.axes)
        self.model, self.optimizer, self.batch, self.credit, self.settings = (
            model,
            optimizer,
            batch,
            credit,
            settings,
        )
        ids_NT, mask_NT = fetch([batch.token_ids_NT, batch.mask_NT])
        self.texts = Texts(prompt_ids, ids_NT, mask_NT, settings.temperature, settings.token_budget)
        distinct_I, index_NT = torch.unique(ids_NT, return_inverse=True)
        self.vocabulary = token_texts(distinct_I.tolist())
        names, why = name_tokens(settings.categories, self.vocabulary)
        self.facts = _facts(batch, credit, names, index_NT)
        self.notes: list[str] = [] if why is None else [why]
        self._columns: dict[str, Tensor] = {"vocabulary_index": index_NT}
        self._taxes: list[dict[str, float]] = []
        self._entries: list[Entry] = []  # not in the columns yet
        self.residuals: list[dict[str, float]] = []
        self._noise_floor: Tensor | float | None = None
        self._live: dict[str, nn.Parameter] = {}  # of the update that is watched
        self._before: Params | None = None
        self._gradient: Params | None = None
        self._hook: Any = None

    @property
    def columns(self) -> dict[str, Tensor]:
        """[N, T] on the CPU, NaN where a rollout took part in no update."""
        self._settle()
        return self._columns

    @property
    def taxes(self) -> list[dict[str, float]]:
        """The learning tax of every update."""
        self._settle()
        return self._taxes

    def before(self) -> None:
        """Keep the parameters, and the gradient when the optimizer gets it; call just before an
        update.
        """
        self._live = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._before = copy_params({name: p.detach() for name, p in self._live.items()})
        self._gradient = None
        self._hook = self.optimizer.register_step_pre_hook(self._keep_gradient)

    def after(self, rows: Rows, loss: TokenLoss, clip_factor: float = 1.0) -> None:
        """Account for the update just taken.

        The host waits for an accelerator once, to read what the update used; what it computes from
        there on is read when somebody asks for it.

        Args:
            rows: the rollouts it was trained on (``row_R`` are rows of the batch).
            loss: what its loss returned for them.
            clip_factor: by which the gradient was scaled before the batch.
        """
        assert self._before is not None, "before() comes before after()"
        known = read_update(rows, loss, update_counts(self.optimizer, self._live))
        row_R = known.rows.row_R
        texts = self.texts.select(row_R)
        entry = account(
            self.model,
            self.optimizer,
            self._before,
            texts,
            known.rows,
            known.loss,
            clip_factor,
            token_classes(self.settings.axes, self.facts.select(row_R)),
            self._gradient,
            self.settings.autocast,
            self.settings.kernels,
            is_batched=self._forward_mode(texts),
            noise_floor=self._noise_floor,
            own_tokens=self.settings.own_tokens,
            seed=derived_seed(self.settings.seed, len(self.residuals), "own"),
            count_P=known.count_P.tolist(),
        )
        self._noise_floor = entry.noise_floor  # rounding is that of the batch
        self._keep(known, entry.columns)
        for note in entry.notes:
            self._note(note)
        self.let_go()

    def skip(self) -> None:
        """An update without a rollout: it is counted, and there is nothing to account for."""
        self.residuals.append({})
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing of the update: it is accounted for, or there is no memory to do it."""
        self._before, self._gradient, self._live = None, None, {}
        if self._hook is not None:
            self._hook.remove()

    def table(self, batch_number: int) -> dict[str, Any]:
        """Columns of ``tokens/batch_*.parquet``: one row per token of the batch; null where the
        plan left a rollout out.
        """
        return token_table(
            batch_number, self.batch, self.credit, self.facts, self.columns, self.vocabulary
        )

    def summary(self) -> dict[str, float]:
        """The numbers of the batch, keys as in docs/guides/ledger.md without the prefix."""
        out = summary(self.facts, self.columns)
        out |= {f"residual/{name}": value for name, value in mean_of(self.residuals).items()}
        return out | {f"tax/{name}": value for name, value in mean_of(self.taxes).items()}

    def _forward_mode(self, texts: Texts) -> bool | None:
        assert self._before is not None
        if self.model not in _FORWARD_MODE:
            _FORWARD_MODE[self.model] = forward_mode(
                of_model(self.model, texts, self.settings.autocast), self._before
            )
        is_batched, why = _FORWARD_MODE[self.model]
        if is_batched is None:
            self._note(
                f"the model has no forward-mode path ({why}): the table has no predicted change and"
                " no parts. Load it with attn_implementation='eager' or 'sdpa'."
            )
        return is_batched

    def _keep_gradient(self, *_: Any) -> None:
        live = self._live
        self._gradient = copy_params({n: p.grad for n, p in live.items() if p.grad is not None})
        self._gradient |= {n: torch.zeros_like(p) for n, p in live.items() if p.grad is None}

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _keep(self, known: Known, columns: dict[str, Tensor]) -> None:
        """Columns of an update, to be read later, and its residuals."""
        rows, number = known.rows, float(len(self.residuals))
        update_RT = torch.full(rows.mask_NT.shape, number)
        self._entries.append(Entry(rows.row_R, columns | {"update": update_RT}))
        # walking a trie is many small steps: on the CPU, where each costs least
        ids_RT = self.texts.token_ids_NT[rows.row_R]
        self.residuals.append(residuals(ids_RT, rows, known.loss))

    def _settle(self) -> None:
        """Write what the updates left into the columns: one wait for all of them."""
        entries, self._entries = self._entries, []
        values = iter(fetch([value for entry in entries for value in entry.columns.values()]))
        for entry in entries:
            columns = {name: next(values) for name in entry.columns}
            for name, value_RT in columns.items():
                self._write(name, entry.row_R, value_RT.detach())
            self._taxes.append(tax(columns.get("kl"), self.facts.select(entry.row_R)))

    def _write(self, name: str, row_R: Tensor, value_RT: Tensor) -> None:
        value_RT = value_RT if value_RT.is_floating_point() else value_RT.to(torch.float32)
        column = self._columns.setdefault(
            name, value_RT.new_full(self.batch.mask_NT.shape, torch.nan)
        )
        column[row_R] = value_RT


@contextmanager
def within_memory(book: Book | None, give_up: Callable[[str], None]) -> Iterator[None]:
    """Out of memory, the block's account is given up, with a line that says so: an observer must
    not end a run that fits without it.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        if book is not None:
            book.let_go()
        torch.cuda.empty_cache()
        give_up(
            "no memory to account for a batch: it has no table. Lower the token budget"
            " (optimizer.token_budget of a recipe), or take fewer classes in ledger.decompose."
        )


def _facts(batch: TokenBatch, credit: Credit, names: list[str], index_NT: Tensor) -> Facts:
    distinct = list(dict.fromkeys(names))
    number = {name: k for k, name in enumerate(distinct)}
    category_I = torch.tensor([number[name] for name in names])
    columns = (batch.token_ids_NT, batch.mask_NT, batch.group_N, token_advantage(credit, batch))
    ids_NT, mask_NT, group_N, advantage_NT, logp_NT = fetch([*columns, batch.sampler_logp_NT])
    return Facts(
        mask_NT=mask_NT,
        advantage_NT=advantage_NT,
        sampler_logp_NT=logp_NT,
        category_NT=category_I[index_NT],
        category_names=distinct,
        sharing=sharing(ids_NT, mask_NT, group_N, advantage_NT),
    )


class Known(NamedTuple):
    """What the host knows of an update, on the CPU; ``count_P``: see ``update_counts``."""

    rows: Rows
    loss: TokenLoss
    count_P: Tensor


def read_update(rows: Rows, loss: TokenLoss, count_P: Tensor) -> Known:
    """The same on the CPU, with one wait for all of it."""
    columns = [*rows, *loss, count_P]
    values = iter(fetch([column.detach() for column in columns if column is not None]))
    known: list[Any] = [None if column is None else next(values) for column in columns]
    cut = len(rows)
    return Known(Rows(*known[:cut]), TokenLoss(*known[cut:-1]), known[-1])
