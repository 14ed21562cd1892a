"""The token table: one row per response token, columns named in ``counterpoise.run.schema``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from counterpoise.ledger.measures.changes import CHANGES
from counterpoise.ledger.measures.classes import Facts
from counterpoise.maths.select import picker
from counterpoise.maths.turns import token_advantage
from counterpoise.run.files import Columns
from counterpoise.run.schema import PART_PREFIX, TOKEN_COLUMNS
from counterpoise.types import Credit, TokenBatch

Pick = Callable[[Tensor], Tensor]  # of a column [N, T] the tokens of the batch


def token_table(
    batch_number: int,
    batch: TokenBatch,
    credit: Credit,
    facts: Facts,
    columns: dict[str, Tensor],
    vocabulary: Sequence[str],
) -> dict[str, Any]:
    """Arrow columns of the whole batch, in the order of the schema, those of turns and parts last.

    NaN becomes null; repeated strings are dictionaries.

    Args:
        columns: [N, T] on the CPU: what ``account`` found, NaN where a rollout took part in no
            update; ``vocabulary_index`` into
            ``vocabulary``.
    """
    pick = picker(batch.mask_NT.cpu())
    flat = {name: pick(value_NT) for name, value_NT in columns.items()}
    out = {name: _numbers(value) for name, value in flat.items() if name in TOKEN_COLUMNS}
    out |= {name: _numbers(value) for name, value in flat.items() if name.startswith(PART_PREFIX)}
    out |= _known(batch_number, batch, credit, pick) | _shared(facts, pick)
    index = flat["vocabulary_index"]
    out["text"] = _strings(index, vocabulary)
    out["category"] = _strings(pick(facts.category_NT.cpu()), facts.category_names)
    if "change" in flat:
        out |= _labels(flat)
    missing = {name: _nulls(len(index)) for name in TOKEN_COLUMNS if name not in out}
    out |= missing
    return {
        name: out[name]
        for name in [*TOKEN_COLUMNS, *(name for name in out if name not in TOKEN_COLUMNS)]
    }


def join_passes(tables: Sequence[Columns], num_updates: int) -> Columns:
    """The tables of several passes over a batch below each other, a row per token and pass; updates
    are counted on, ``num_updates`` per pass.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(tables) == 1:
        return tables[0]
    counted = [
        {**columns, "update": pc.add(columns["update"], k * num_updates)}  # pyright: ignore[reportAttributeAccessIssue]
        for k, columns in enumerate(tables)
    ]
    table = pa.concat_tables([pa.table(columns) for columns in counted]).unify_dictionaries()
    return {name: table.column(name).combine_chunks() for name in table.column_names}


def _known(batch_number: int, batch: TokenBatch, credit: Credit, pick: Pick) -> dict[str, Any]:
    """Columns of the batch and its credit."""
    rollout_N1 = torch.arange(batch.num_rollouts)[:, None]
    advantage_NT = token_advantage(credit, batch)
    columns = {
        "batch": torch.full_like(rollout_N1, batch_number),
        "group": batch.group_N[:, None],
        "rollout": rollout_N1,
        "position": torch.arange(batch.mask_NT.shape[1])[None],
        "token_id": batch.token_ids_NT,
        "reward": batch.reward_N[:, None],
        "advantage": credit.advantage_N[:, None],
        "sign": advantage_NT.sign().to(torch.int8),
        "weight": credit.weight_NT,
        "credit": credit.credit_NT,
        "sampler_logp": batch.sampler_logp_NT,
        "confidence": batch.sampler_logp_NT.exp(),
    }
    if batch.trainer_logp_NT is not None:
        columns["sampler_gap"] = batch.trainer_logp_NT - batch.sampler_logp_NT
    if batch.turn_NT is not None:
        columns |= {"turn": batch.turn_NT, "turn_advantage": advantage_NT}
    flat = {name: pick(value.cpu()) for name, value in columns.items()}
    read = {name: pick(value.cpu()) for name, value in _read(batch).items()}
    return {name: value.numpy() for name, value in flat.items()} | {
        name: _numbers(value) for name, value in read.items()
    }


def _read(batch: TokenBatch) -> dict[str, Tensor]:
    """What was measured for the method's rules, NaN where there is nothing."""
    columns = {}
    if batch.value_NT is not None:
        columns["value"] = batch.value_NT
    if batch.teacher_logp_NT is not None:
        gap_NT = batch.teacher_logp_NT - batch.sampler_logp_NT
        has_N = batch.has_teacher_N
        columns["teacher_gap"] = (
            gap_NT if has_N is None else gap_NT.where(has_N[:, None], torch.nan)
        )
    if batch.importance_NT is not None:
        score_NT = batch.importance_NT
        columns["importance"] = score_NT.where(score_NT >= 0, torch.nan)
    return columns


def _shared(facts: Facts, pick: Pick) -> dict[str, Any]:
    shared = facts.sharing
    columns = {
        "node": shared.node_NT,
        "node_positive": shared.positive_NT,
        "node_negative": shared.negative_NT,
    }
    columns |= {"is_fully_shared": shared.is_full_NT, "is_fork": shared.is_fork_NT}
    return {name: pick(value.cpu()).numpy() for name, value in columns.items()}


def _labels(flat: dict[str, Tensor]) -> dict[str, Any]:
    """Columns that are numbers inside and booleans, counts or words in the file; null where the
    rollout was not trained on.
    """
    import pyarrow as pa

    is_null = flat["change"].isnan()
    change = flat["change"].nan_to_num().long() + 1
    out = {
        "change": pa.DictionaryArray.from_arrays(
            pa.array(change.to(torch.int8).numpy(), mask=is_null.numpy()), list(CHANGES)
        ),
        "update": pa.array(flat["update"].nan_to_num().long().numpy(), mask=is_null.numpy()),
        "loss_mask": (~is_null).numpy(),
    }
    flags = {
        name: pa.array((flat[name] > 0).numpy(), mask=is_null.numpy())
        for name in ("is_clipped", "is_flip")
    }
    return out | flags


def _numbers(value: Tensor) -> Any:
    import pyarrow as pa

    array = value.numpy()
    return pa.array(array, mask=np.isnan(array)) if value.is_floating_point() else array


def _strings(index: Tensor, words: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(index.to(torch.int32).numpy()), list(words))


def _nulls(length: int) -> Any:
    import pyarrow as pa

    return pa.nulls(length, pa.float32())
