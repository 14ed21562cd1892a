"""A batch as a table, one row per rollout, and back. Loads torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from counterpoise.maths.trie import row_mask
from counterpoise.rollouts import Conversation, RolloutBatch
from counterpoise.run import parquet
from counterpoise.run.files import Columns
from counterpoise.run.schema import SAME_FILES, SCHEMA_VERSION
from counterpoise.run.solved import SUCCESS_COLUMN
from counterpoise.types import Credit, Prompt, TokenBatch, stack_batches

READ = (  # columns that a RolloutBatch can be made again from
    *("group", "prompt_id", "prompt", "answer", "prompt_ids", "text", "stop_reason"),
    *("token_ids", "loss_mask", "reward", "sampler_logp", "entropy"),
)
READ_TURNS = (  # and those that conversations have beside
    *("turn", "turn_reward", "turn_state", "turn_key", "turn_action", "turn_reply"),
    *("end_reason", "failure"),
)
SCORE = "turn_score"
FEEDBACK = "feedback"
SEGMENT, VALUE = "segment", "value"
TEXTS = pa.list_(pa.string())  # also where all lists are empty
ADVICE = "Take the file as counterpoise train wrote it (save_rollouts_every)."


def rollout_columns(batch_number: int, rollouts: RolloutBatch, credit: Credit) -> Columns:
    """One row per rollout; token columns are lists without padding. The tokens of an environment
    are among them: ``loss_mask`` is False and every number 0 there. Rollouts whose environment
    failed come last, without credit.
    """
    if rollouts.lost is not None:
        rollouts, credit = _with_lost(rollouts, rollouts.lost, credit)
    batch, row_NT = rollouts.batch, row_mask(rollouts.batch.mask_NT)
    group = batch.group_N.tolist()
    prompts = [rollouts.prompts[g] for g in group]
    numbers = {
        "credit": credit.credit_NT,
        "weight": credit.weight_NT,
        "sampler_logp": batch.sampler_logp_NT,
        "entropy": batch.entropy_NT,
        "trainer_logp": batch.trainer_logp_NT,
        VALUE: batch.value_NT,
    }
    return {
        "batch": [batch_number] * batch.num_rollouts,
        "rollout": list(range(batch.num_rollouts)),
        "group": group,
        "prompt_id": [prompt.id for prompt in prompts],
        "prompt": [prompt.text for prompt in prompts],
        "answer": [prompt.answer for prompt in prompts],
        "text": rollouts.texts,
        "reward": batch.reward_N.tolist(),
        "advantage": credit.advantage_N.tolist(),
        "stop_reason": rollouts.stop_reason,
        "prompt_ids": rollouts.prompt_ids,
        "token_ids": ragged(batch.token_ids_NT, row_NT),
        "loss_mask": ragged(batch.mask_NT, row_NT),
        **{
            name: ragged(torch.where(batch.mask_NT, value_NT, 0), row_NT)
            for name, value_NT in numbers.items()
            if value_NT is not None
        },
        **({} if batch.segment_NT is None else {SEGMENT: ragged(batch.segment_NT, row_NT)}),
        **({FEEDBACK: rollouts.feedback} if rollouts.feedback else {}),
        **({} if batch.success_N is None else {SUCCESS_COLUMN: batch.success_N.tolist()}),
        **turn_columns(rollouts, credit),
    }


def turn_columns(rollouts: RolloutBatch, credit: Credit | None = None) -> Columns:
    """The columns of conversations; none where every rollout is one turn."""
    talks, batch = rollouts.conversations, rollouts.batch
    if talks is None or batch.turn_NT is None or batch.turn_mask_NU is None:
        return {}
    assert batch.turn_reward_NU is not None
    assert batch.state_NU is not None
    played_NU = batch.turn_mask_NU
    score_NU = batch.turn_score_NU
    if score_NU is None:
        score_NU = torch.full_like(batch.turn_reward_NU, math.nan)
    columns: Columns = {
        "turn": ragged(batch.turn_NT, row_mask(batch.mask_NT)),
        "turn_reward": ragged(batch.turn_reward_NU, played_NU),
        SCORE: ragged(score_NU, played_NU),
        "turn_key": ragged(batch.state_NU, played_NU),
        "turn_state": pa.array([list(talk.states) for talk in talks], TEXTS),
        "turn_action": pa.array([list(talk.actions) for talk in talks], TEXTS),
        "turn_reply": pa.array([list(talk.replies) for talk in talks], TEXTS),
        "end_reason": [talk.end_reason for talk in talks],
        "failure": [talk.message for talk in talks],
    }
    if credit is not None:
        advantage_NU = credit.advantage_NU
        if advantage_NU is None:
            advantage_NU = credit.advantage_N[:, None].expand_as(played_NU)
        columns["turn_advantage"] = ragged(advantage_NU, played_NU)
    return columns


def _with_lost(
    rollouts: RolloutBatch, lost: RolloutBatch, credit: Credit
) -> tuple[RolloutBatch, Credit]:
    """All rollouts of a batch, those whose environment failed with credit 0."""
    other = lost.batch
    if rollouts.batch.trainer_logp_NT is not None:  # nobody scored what is not trained on: no gap
        other = other.replace(trainer_logp_NT=other.sampler_logp_NT)
    num, batch = other.num_rollouts, stack_batches([rollouts.batch, other])
    whole = rollouts._replace(
        prompt_ids=rollouts.prompt_ids + lost.prompt_ids,
        texts=rollouts.texts + lost.texts,
        stop_reason=rollouts.stop_reason + lost.stop_reason,
        conversations=(rollouts.conversations or []) + (lost.conversations or []),
        batch=batch,
        lost=None,
    )

    def padded(value: Tensor, width: int) -> Tensor:
        return torch.nn.functional.pad(value, (0, width - value.shape[1], 0, num))

    width, turns_NU = batch.mask_NT.shape[1], credit.advantage_NU
    return whole, credit._replace(
        advantage_N=torch.nn.functional.pad(credit.advantage_N, (0, num)),
        weight_NT=padded(credit.weight_NT, width),
        credit_NT=padded(credit.credit_NT, width),
        advantage_NU=None
        if turns_NU is None or batch.turn_mask_NU is None
        else padded(turns_NU, batch.turn_mask_NU.shape[1]),
    )


def ragged(value_NT: Tensor, mask_NT: Tensor) -> pa.Array:
    """Rows as an Arrow list column, padding left out; Arrow has no bfloat16: float32."""
    value_NT, mask_NT = value_NT.cpu(), mask_NT.cpu().bool()
    if value_NT.is_floating_point() and value_NT.itemsize < 4:
        value_NT = value_NT.float()
    ends_N = mask_NT.sum(1).cumsum(0).to(torch.int32)
    offsets = torch.cat([ends_N.new_zeros(1), ends_N]).numpy()
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(value_NT[mask_NT].numpy()))


def read_rollouts(path: Path, max_length: int | None = None) -> RolloutBatch:
    """A batch again, as it was when it was sampled and graded (columns that were measured are left
    out), without the rollouts whose environment failed.
    """
    table = parquet.require_columns(path, READ, ADVICE)
    schema = parquet.pq.read_schema(path)
    version, has_turns = parquet.table_version(schema), set(READ_TURNS) <= set(schema.names)
    if version not in [str(known) for known in SAME_FILES]:
        raise ValueError(
            f"{path}: schema version {version or 'missing'}, expected {SCHEMA_VERSION}. Use the"
            " counterpoise that wrote it."
        )
    beside = (*READ_TURNS, SCORE) if has_turns else (FEEDBACK, SEGMENT, VALUE)
    beside = [name for name in (*beside, SUCCESS_COLUMN) if name in schema.names]
    table = parquet.require_columns(path, (*READ, *beside), ADVICE)
    column: dict[str, list[Any]] = table.to_pydict()
    by_group = {
        g: Prompt(i, t, a)
        for g, i, t, a in zip(
            column["group"], column["prompt_id"], column["prompt"], column["answer"]
        )
    }
    if has_turns:
        kept = [row for row, failure in enumerate(column["failure"]) if not failure]
        column = {name: [values[row] for row in kept] for name, values in column.items()}
    batch = TokenBatch.from_lists(
        column["token_ids"],
        group=column["group"],
        reward=column["reward"],
        sampler_logp=column["sampler_logp"],
        entropy=column["entropy"],
        max_length=max_length,
        success_N=torch.tensor(column[SUCCESS_COLUMN]) if SUCCESS_COLUMN in column else None,
    )
    batch = _with_mask(path, batch, column["loss_mask"])
    return RolloutBatch(
        [by_group[g] for g in sorted(by_group)],
        column["prompt_ids"],
        column["text"],
        column["stop_reason"],
        _with_turns(batch, column) if has_turns else _with_values(batch, column),
        0,
        [],
        conversations=_conversations(column) if has_turns else None,
        feedback=column.get(FEEDBACK),
    )


def _with_mask(path: Path, batch: TokenBatch, loss_mask: list[list[bool]]) -> TokenBatch:
    """The batch with the tokens of an environment masked."""
    if [len(row) for row in loss_mask] != batch.length_N.tolist():
        raise ValueError(f"{path}: loss_mask and token_ids have rows of different length.")
    drawn_M = batch.mask_NT.new_tensor([drawn for row in loss_mask for drawn in row])
    return batch.replace(mask_NT=batch.mask_NT.masked_scatter(batch.mask_NT, drawn_M))


def _with_turns(batch: TokenBatch, column: dict[str, list[Any]]) -> TokenBatch:
    num_turns = [len(rewards) for rewards in column["turn_reward"]]
    number_U = torch.arange(max(num_turns))
    mask_NU = number_U < torch.tensor(num_turns)[:, None]

    score_NU = None
    if any(score == score for row in column.get(SCORE, []) for score in row):  # not NaN
        score_NU = _padded(column[SCORE], mask_NU, math.nan).to(batch.reward_N.dtype)
    return batch.replace(
        turn_NT=_padded(column["turn"], batch.mask_NT, -1),
        turn_reward_NU=_padded(column["turn_reward"], mask_NU, 0).to(batch.reward_N.dtype),
        turn_mask_NU=mask_NU,
        state_NU=_padded(column["turn_key"], mask_NU, -1),
        turn_score_NU=score_NU,
    )


def _with_values(batch: TokenBatch, column: dict[str, list[Any]]) -> TokenBatch:
    """The batch with its segments and their values, where the method measured them."""
    if SEGMENT not in column or VALUE not in column:
        return batch
    return batch.replace(
        segment_NT=_padded(column[SEGMENT], batch.mask_NT, -1),
        value_NT=_padded(column[VALUE], batch.mask_NT, 0).to(batch.reward_N.dtype),
    )


def _padded(rows: list[list[Any]], like: Tensor, fill: float) -> Tensor:
    out = torch.full(like.shape, fill, dtype=torch.long if fill == -1 else torch.float64)
    for k, row in enumerate(rows):
        out[k, : len(row)] = torch.tensor(row, dtype=out.dtype)
    return out


def _conversations(column: dict[str, list[Any]]) -> list[Conversation]:
    names = ("turn_action", "turn_reply", "turn_state", "end_reason")
    return [
        Conversation(tuple(action), tuple(reply), tuple(state), reason)
        for action, reply, state, reason in zip(*(column[name] for name in names))
    ]
