"""The tokens of one batch as ordered columns, read when they are asked for.

A batch without a tokens table is read from its rollouts table.

Axes: N rollouts, T tokens of the whole batch in order of (group, rollout, position).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from counterpoise.errors import nearest
from counterpoise.run.read import RunFolder
from counterpoise.text import spans
from counterpoise.viewer.replays import read_credit, replay_files
from counterpoise.viewer.texts import token_texts

TURNS = ("turn_advantage",)  # lists, one entry per turn
ORDER = ("group", "rollout", "position")
LISTS = (
    *("token_ids", "loss_mask", "credit", "weight", "sampler_logp", "trainer_logp", "entropy"),
    "turn",
)


class Column(NamedTuple):
    """Values of a column: float64 or float32 (NaN is missing), int64, or int32 codes of ``words``
    (-1 is missing).
    """

    value_T: np.ndarray
    words: list[str] | None = None
    is_flag: bool = False


class BatchTokens:
    """Tokens of one batch; ``column`` reads a column once and keeps it.

    Args:
        names: columns that can be read.
        start_N: offset of each rollout, with the end of the last.
        read: reads a column in file order; ``order_T`` brings it into ours.
    """

    def __init__(
        self,
        run: RunFolder,
        batch: int,
        source: str,
        names: list[str],
        group_N: np.ndarray,
        rollout_N: np.ndarray,
        start_N: np.ndarray,
        read: Callable[[str], Column],
    ) -> None:
        self.replays = replay_files(run, batch) if source != "evals" else {}
        self.run, self.batch, self.source, self._read = run, batch, source, read
        self.names = [*names, *self.replays]
        self.group_N, self.rollout_N, self.start_N = group_N, rollout_N, start_N
        self._columns: dict[str, Column] = {}
        self._lock = threading.RLock()  # one thread reads, the others wait for what it read

    @property
    def num_bytes(self) -> int:
        """Memory of the columns that were read so far."""
        return sum(column.value_T.nbytes for column in list(self._columns.values()))

    def column(self, name: str) -> Column:
        """A column in order; ValueError if the files do not have it."""
        with self._lock:
            return self._column(name)

    def _column(self, name: str) -> Column:
        if name not in self._columns:
            if name == "text":
                self._columns[name] = self._texts()
            elif name in ("node_positive", "node_negative") and name not in self.names:
                self._columns |= self._shared()
            elif name in self.replays:
                where_T = (self._column(at).value_T for at in ("rollout", "position"))
                self._columns[name] = Column(read_credit(self.replays[name], name, *where_T))
            elif name in self.names:
                self._columns[name] = self._read(name)
            else:
                raise ValueError(
                    f"{self.run.name!r}: batch {self.batch} has no column {name!r}."
                    f" {nearest(name, self.names)}"
                )
        return self._columns[name]

    def span(self, group: int) -> slice:
        """Tokens of a prompt; ValueError if the batch has no such prompt."""
        rows = np.flatnonzero(self.group_N == group)
        if not len(rows):
            known = np.unique(self.group_N)
            raise ValueError(
                f"{self.run.name!r}: batch {self.batch} has no prompt {group}. It has"
                f" {len(known)}, from {known[0]} to {known[-1]}."
            )
        return slice(int(self.start_N[rows[0]]), int(self.start_N[rows[-1] + 1]))

    def first(self, *names: str) -> np.ndarray:
        """The value at the first token of each rollout, of the first of the columns that is there;
        NaN without.
        """
        for name in names:
            if name in self.names:
                return np.asarray(self.column(name).value_T[self.start_N[:-1]], float)
        return np.full(len(self.group_N), np.nan)

    def sums(self, name: str) -> np.ndarray:
        """Sum over the tokens of each rollout; NaN without the column."""
        if name not in self.names:
            return np.full(len(self.group_N), np.nan)
        total_T = np.r_[0.0, np.cumsum(np.nan_to_num(np.asarray(self.column(name).value_T, float)))]
        return total_T[self.start_N[1:]] - total_T[self.start_N[:-1]]

    @property
    def sign_N(self) -> np.ndarray:
        """Sign of each rollout's advantage; of its reward where there is no advantage; 0 where its
        turns have both signs.
        """
        if {"turn", "sign"} <= set(self.names):
            return np.sign(sum(self._sign_ends()))
        return np.nan_to_num(np.sign(self.first("sign", "advantage", "reward")))

    @property
    def is_mixed_N(self) -> np.ndarray:
        """Rollouts whose turns have both signs."""
        if not {"turn", "sign"} <= set(self.names):
            return np.zeros(len(self.group_N), bool)
        low_N, high_N = self._sign_ends()
        return (low_N < 0) & (high_N > 0)

    def _sign_ends(self) -> tuple[np.ndarray, np.ndarray]:
        """The smallest and the largest sign of each rollout's tokens."""
        sign_T = np.nan_to_num(np.asarray(self.column("sign").value_T, float))
        start_N = self.start_N[:-1]
        return np.minimum.reduceat(sign_T, start_N), np.maximum.reduceat(sign_T, start_N)

    def _texts(self) -> Column:
        """The text of every token; where the file has none, from a tokenizer or from other batches
        of the run, else the id.
        """
        if "text" in self.names:
            return self._read("text")
        ids_T = (
            self.column("token_id").value_T
            if "token_id" in self.names
            else np.zeros(int(self.start_N[-1]), np.int64)
        )
        distinct, code_T = np.unique(ids_T, return_inverse=True)
        return Column(
            code_T.astype(np.int32),
            token_texts(self.run, [int(i) for i in np.nan_to_num(distinct)]),
        )

    def _shared(self) -> dict[str, Column]:
        sign_T = np.repeat(self.sign_N, np.diff(self.start_N))
        return shared_counts(self.column("text").value_T, sign_T, self.group_N, self.start_N)


def shared_counts(
    code_T: np.ndarray, sign_T: np.ndarray, group_N: np.ndarray, start_N: np.ndarray
) -> dict[str, Column]:
    """How many rollouts of each sign share a token's (prompt, prefix, token), for files that do not
    say.
    """
    length_N, node_N = np.diff(start_N), group_N.astype(np.int64)
    out = {1: np.zeros(len(code_T), np.int64), -1: np.zeros(len(code_T), np.int64)}
    for position in range(int(length_N.max(initial=0))):
        row_R = np.flatnonzero(length_N > position)
        at_R = start_N[row_R] + position
        _, node_R = np.unique(np.stack([node_N[row_R], code_T[at_R]]), axis=1, return_inverse=True)
        node_N[row_R] = node_R.reshape(-1)
        for side, count_T in out.items():
            count_T[at_R] = np.bincount(node_N[row_R], sign_T[at_R] == side)[node_N[row_R]]
    return {"node_positive": Column(out[1]), "node_negative": Column(out[-1])}


def open_batch(run: RunFolder, batch: int, folder: str = "") -> BatchTokens:
    """The tokens of a batch; ValueError if its files hold nothing to show.

    Args:
        folder: ``evals`` for the samples of an evaluation after so many batches; else the ledger's
            tokens, or the rollouts where it has none.
    """
    for name in (folder,) if folder else ("tokens", "rollouts"):
        read = _from_tokens if name == "tokens" else _from_rollouts
        tokens = read(run, batch, name) if batch in run.batches(name) else None
        if tokens is not None:
            return tokens
    raise ValueError(" ".join([_absence(run, batch, folder), *run.problems]))


def _absence(run: RunFolder, batch: int, folder: str) -> str:
    """A batch that is not there, beside those that are."""
    known = set(run.batches("tokens")) | set(run.batches("rollouts"))
    known = sorted(run.batches(folder) if folder else known)
    what = "samples of the evaluation after" if folder else "tokens or rollouts of"
    if batch in known:
        return f"{run.name!r}: no readable {what} batch {batch}."
    return f"{run.name!r}: no {what} batch {batch}. There are: {spans(known) or 'none'}."


def _from_tokens(run: RunFolder, batch: int, folder: str) -> BatchTokens | None:
    names = run.columns("tokens", batch)
    table = run.table("tokens", batch, ORDER) if names else None
    if (
        table is None
        or not _has_numbers(run, f"tokens of batch {batch}", table, ORDER)
        or not table.num_rows
    ):
        return None
    group, rollout, position = (table.column(name).to_numpy() for name in ORDER)
    num_rows, order_T = len(group), np.lexsort((position, rollout, group))
    key_3T = np.stack([group, rollout, position])[:, order_T]
    # a batch that was trained on in several passes has a row per token and pass: the first is shown
    order_T = order_T[np.r_[True, (key_3T[:, 1:] != key_3T[:, :-1]).any(0)]]
    group, rollout = group[order_T], rollout[order_T]
    start = np.flatnonzero(np.r_[True, (rollout[1:] != rollout[:-1]) | (group[1:] != group[:-1])])

    def read(name: str) -> Column:
        values = run.table("tokens", batch, [name])
        if values is None or values.num_rows != num_rows:
            raise ValueError(f"{run.name!r}: column {name!r} of batch {batch} cannot be read.")
        column = as_column(values.column(name))
        return column._replace(value_T=column.value_T[order_T])

    known = [
        name for name in names if name != "batch" and name not in _unreadable(run, "tokens", batch)
    ]
    return BatchTokens(
        run, batch, "tokens", known, group[start], rollout[start], np.r_[start, len(group)], read
    )


def _from_rollouts(run: RunFolder, batch: int, folder: str) -> BatchTokens | None:
    run.columns(folder, batch)
    table = run.table(folder, batch, ("group", "rollout", "reward", "advantage", *LISTS, *TURNS))
    if (
        table is None
        or not _has_numbers(run, f"{folder} of batch {batch}", table, ("group", "rollout"))
        or not table.num_rows
    ):
        return None
    if "token_ids" not in table.column_names or not _is_list(table, "token_ids"):
        run.note(f"{folder} of batch {batch} have no token_ids; not shown.")
        return None
    table = table.take(
        pa.array(np.lexsort((table.column("rollout").to_numpy(), table.column("group").to_numpy())))
    )
    length_N = pc.fill_null(pc.list_value_length(table.column("token_ids")), 0).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
    start_N = np.r_[0, np.cumsum(length_N)]
    columns = {
        name: Column(np.repeat(table.column(name).to_numpy(), length_N))
        for name in ("group", "rollout")
    }
    columns["position"] = Column(np.arange(start_N[-1]) - np.repeat(start_N[:-1], length_N))
    for name in table.column_names:
        if name in LISTS and _is_list(table, name):
            flat = pc.list_flatten(table.column(name))  # pyright: ignore[reportAttributeAccessIssue]
            key = "token_id" if name == "token_ids" else name
            columns |= {key: as_column(flat)} if len(flat) == start_N[-1] else {}
        elif name in ("reward", "advantage"):
            columns[name] = Column(np.repeat(as_column(table.column(name)).value_T, length_N))
    columns |= _derive(columns)
    group_N, rollout_N = table.column("group").to_numpy(), table.column("rollout").to_numpy()
    if "turn" in columns and "token_id" in columns and "reward" in columns:
        columns, kept_N, start_N = _of_turns(columns, table, group_N, start_N)
        group_N, rollout_N = group_N[kept_N], rollout_N[kept_N]
    return BatchTokens(
        run, batch, folder, list(columns), group_N, rollout_N, start_N, columns.__getitem__
    )


def _of_turns(
    columns: dict[str, Column], table: pa.Table, group_N: np.ndarray, start_N: np.ndarray
) -> tuple[dict[str, Column], np.ndarray, np.ndarray]:
    """The columns without the environment's tokens, which rollouts have others, and where those
    begin. What is shared was counted with all of them.
    """
    turn_T, length_N = columns["turn"].value_T, np.diff(start_N)
    if "turn_advantage" in table.column_names and _is_list_of_numbers(table, "turn_advantage"):
        rows = table.column("turn_advantage").to_pylist()
        value_T = [
            row[int(turn)] if row and 0 <= turn < len(row) else None
            for row, part_T in zip(rows, np.split(turn_T, start_N[1:-1]))
            for turn in part_T
        ]
        columns["turn_advantage"] = Column(np.array(value_T, float))
        columns["sign"] = Column(np.sign(np.nan_to_num(np.array(value_T, float))))
    sign_T = columns["sign"].value_T if "sign" in columns else np.sign(columns["reward"].value_T)
    columns |= shared_counts(columns["token_id"].value_T, sign_T, group_N, start_N)
    keep_T = turn_T >= 0
    num_N = np.bincount(
        np.repeat(np.arange(len(length_N)), length_N)[keep_T], minlength=len(group_N)
    )
    kept = {name: c._replace(value_T=c.value_T[keep_T]) for name, c in columns.items()}
    return kept, num_N > 0, np.r_[0, np.cumsum(num_N[num_N > 0])]


def as_column(values: pa.ChunkedArray) -> Column:
    """An arrow column as numbers, or as codes and words."""
    if (
        pa.types.is_dictionary(values.type)
        or pa.types.is_string(values.type)
        or pa.types.is_large_string(values.type)
    ):
        encoded = (
            values.combine_chunks()
            if pa.types.is_dictionary(values.type)
            else values.combine_chunks().dictionary_encode()
        )
        encoded = encoded.combine_chunks() if isinstance(encoded, pa.ChunkedArray) else encoded
        codes = pc.fill_null(encoded.indices.cast(pa.int32()), -1).to_numpy(zero_copy_only=False)
        return Column(codes, [str(word) for word in encoded.dictionary.to_pylist()])
    if pa.types.is_boolean(values.type):
        return Column(pc.cast(values, pa.float32()).to_numpy(), is_flag=True)
    if pa.types.is_integer(values.type) and values.null_count == 0:
        return Column(values.to_numpy().astype(np.int64))
    if pa.types.is_float32(values.type):
        return Column(values.to_numpy())
    if not pa.types.is_floating(values.type) and not pa.types.is_integer(values.type):
        return Column(np.full(len(values), np.nan))  # lists where numbers should be
    return Column(pc.cast(values, pa.float64()).to_numpy())


def _derive(columns: dict[str, Column]) -> dict[str, Column]:
    out = {}
    if "sampler_logp" in columns:
        out["confidence"] = Column(np.exp(columns["sampler_logp"].value_T))
    if {"sampler_logp", "trainer_logp"} <= columns.keys():
        gap_T = columns["trainer_logp"].value_T - columns["sampler_logp"].value_T
        out["sampler_gap"] = Column(gap_T)
    if "advantage" in columns:
        out["sign"] = Column(np.sign(columns["advantage"].value_T))
    return out


def _has_numbers(run: RunFolder, where: str, table: pa.Table, names: tuple[str, ...]) -> bool:
    """Whether the columns that order the tokens are whole numbers without gaps; if not, a problem
    says so.
    """
    for name in names:
        if name not in table.column_names:
            run.note(f"{where}: no column {name!r}; not shown.")
            return False
        if not pa.types.is_integer(table.schema.field(name).type) or table.column(name).null_count:
            run.note(f"{where}: column {name!r} must hold whole numbers; not shown.")
            return False
    return True


def _is_list(table: pa.Table, name: str) -> bool:
    return pa.types.is_list(table.schema.field(name).type) or pa.types.is_large_list(
        table.schema.field(name).type
    )


def _is_list_of_numbers(table: pa.Table, name: str) -> bool:
    inner = table.schema.field(name).type.value_type if _is_list(table, name) else pa.null()
    return pa.types.is_floating(inner) or pa.types.is_integer(inner)


def _unreadable(run: RunFolder, folder: str, batch: int) -> set[str]:
    """Columns of types that are neither numbers, flags nor words."""
    return {name for name, kind in run.types(folder, batch).items() if not _is_known(kind)}


def _is_known(kind: pa.DataType) -> bool:
    words = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    coded = pa.types.is_dictionary(kind) and (
        pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)
    )
    return (
        words
        or coded
        or pa.types.is_boolean(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
    )
