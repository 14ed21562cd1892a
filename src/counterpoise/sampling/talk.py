"""Conversations in the engine: a row keeps its slot and its cache while the other side answers.

A slot is free, running, or held: its row has ended a turn and waits. What the other side says is
read token by token in the steps in which other rows draw; a long answer is read in one pass, with
all that came before it.

Axes: B slots, R slots of a look.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from counterpoise.sampling.slots import Answer, Dialogue, Settings

if TYPE_CHECKING:
    from counterpoise.sampling.engine import Engine

LONG = 48  # tokens of an answer from which on it is read in one pass
COMPACT_FRAC = 0.75  # the batch shrinks once no more than this share of it is in use
FREE = -1


class Table:
    """Which row has which slot, as the host knows it: a slot that ends forgets its row."""

    def __init__(self, num_slots: int) -> None:
        self.row_of = [FREE] * num_slots
        self.slot_of: dict[int, int] = {}
        self.running: set[int] = set()

    @property
    def free(self) -> list[int]:
        return [slot for slot, row in enumerate(self.row_of) if row == FREE]

    def seat(self, slot: int, row: int) -> None:
        self.row_of[slot], self.slot_of[row] = row, slot
        self.running.add(row)

    def leave(self, row: int) -> None:
        self.row_of[self.slot_of.pop(row)] = FREE


def hold_conversations(
    engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings, dialogue: Dialogue
) -> None:
    """Sample every row until its conversation is over."""
    columns = engine.columns
    columns.given_NT.fill_(-1)
    columns.limit_N[:-1] = torch.tensor([dialogue.first_limit(row) for row in range(len(prompts))])
    columns.limit_N[-1] = settings.max_new_tokens
    for column, start in zip(engine.slots, (0, 0, 0, len(prompts), False)):
        column.fill_(start)
    waiting = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
    table = Table(len(engine.slots.row_B))
    while True:
        _hear(engine, table, dialogue)
        # with nothing to draw there is time to wait for an answer
        is_idle = not table.running and not (waiting and table.free)
        answers = dialogue.answers(wait=is_idle) if len(table.slot_of) > len(table.running) else []
        for answer in answers:
            if answer.token_ids is None:
                table.leave(answer.row)
        _go_on(engine, table, prompts, [a for a in answers if a.token_ids is not None])
        free = table.free
        if waiting and len(free) >= min(len(waiting), max(1, len(table.row_of) // 8)):
            taken, waiting = waiting[: len(free)], waiting[len(free) :]
            _seat(engine, table, free, taken, [prompts[row] for row in taken])
        if not table.slot_of:
            return
        if table.running:
            if not waiting and len(table.slot_of) <= COMPACT_FRAC * len(table.row_of):
                _compact(engine, table, settings)
            engine.advance(len(table.row_of), settings)


def _hear(engine: Engine, table: Table, dialogue: Dialogue) -> None:
    """Hand over the rows whose turn has ended since the last look."""
    is_alive = engine.slots.alive_B[: len(table.row_of)].tolist()
    ended = sorted(row for row in table.running if not is_alive[table.slot_of[row]])
    if not ended:
        return
    row_R = torch.tensor(ended, device=engine.slots.row_B.device)
    lengths = engine.columns.length_N[row_R].tolist()
    ids = engine.columns.token_ids_NT[row_R, : max(lengths)].tolist()
    for row, row_ids, length in zip(ended, ids, lengths):
        table.running.discard(row)
        dialogue.hear(row, row_ids[:length])


def _go_on(
    engine: Engine, table: Table, prompts: Sequence[Sequence[int]], answers: list[Answer]
) -> None:
    """Rows go on after the turn they ended, with the tokens of the answer given, not drawn."""
    if not answers:
        return
    columns, slots, device = engine.columns, engine.slots, engine.slots.row_B.device
    row_R = torch.tensor([answer.row for answer in answers], device=device)
    length_R = columns.length_N[row_R]
    given = [answer.token_ids or [] for answer in answers]
    row_G, given_G, at_G = (
        torch.tensor(values, dtype=torch.long, device=device)
        for values in (
            [answer.row for answer, ids in zip(answers, given) for _ in ids],
            [token for ids in given for token in ids],
            [n + k for n, ids in zip(length_R.tolist(), given) for k in range(len(ids))],
        )
    )
    columns.given_NT[row_G, at_G] = given_G
    columns.token_ids_NT[row_G, at_G] = given_G
    columns.limit_N[row_R] = torch.tensor([answer.limit for answer in answers], device=device)
    short = [k for k, ids in enumerate(given) if len(ids) < LONG]
    if short:
        short_R = torch.tensor(short, device=device)
        some_R, length_S = row_R[short_R], length_R[short_R]
        slot_R = torch.tensor([table.slot_of[answers[k].row] for k in short], device=device)
        # the last token of the turn was drawn and not yet read
        slots.token_B[slot_R] = columns.token_ids_NT[some_R, length_S - 1]
        size_S = torch.tensor([len(prompts[answers[k].row]) for k in short], device=device)
        slots.position_B[slot_R] = size_S + length_S - 1
        slots.age_B[slot_R] = length_S
        slots.row_B[slot_R] = some_R
        slots.alive_B[slot_R] = True
        table.running.update(answers[k].row for k in short)
    _read_long(engine, table, prompts, [a for a in answers if len(a.token_ids or []) >= LONG])


def _read_long(
    engine: Engine, table: Table, prompts: Sequence[Sequence[int]], answers: list[Answer]
) -> None:
    """Rows with long answers are read anew, in one pass."""
    if not answers:
        return
    rows = [answer.row for answer in answers]
    ages = [
        length + len(answer.token_ids or [])
        for answer, length in zip(answers, engine.columns.length_N[rows].tolist())
    ]
    texts = engine.columns.token_ids_NT[rows, : max(ages)].tolist()
    contexts = [[*prompts[row], *ids[:age]] for row, ids, age in zip(rows, texts, ages)]
    _seat(engine, table, [table.slot_of[row] for row in rows], rows, contexts, ages)


def _seat(
    engine: Engine,
    table: Table,
    free: Sequence[int],
    rows: Sequence[int],
    contexts: Sequence[Sequence[int]],
    ages: Sequence[int] | None = None,
) -> None:
    slot_R = torch.tensor(free[: len(rows)], device=engine.slots.row_B.device)
    engine.admit(slot_R, rows, contexts, ages)
    for slot, row in zip(free, rows):
        table.seat(slot, row)


def _compact(engine: Engine, table: Table, settings: Settings) -> None:
    """Fewer slots, where a step costs by their number."""
    if engine.is_native(settings):
        return
    num_slots = len(table.row_of)
    is_kept_B = torch.zeros_like(engine.slots.alive_B)
    is_kept_B[:num_slots] = torch.tensor([row != FREE for row in table.row_of])
    moved = engine.compact(is_kept_B, num_slots)
    for source, target in zip(moved.from_R.tolist(), moved.to_R.tolist()):
        row = table.row_of[source]
        table.row_of[target], table.slot_of[row] = row, target
    del table.row_of[moved.num_slots :]
