"""What a TokenBatch must be: shapes, values, and where they are wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from counterpoise.errors import check_number, check_whole, nearest
from counterpoise.text import counted

if TYPE_CHECKING:
    from counterpoise.types import TokenBatch

# columns of ids, by the start of their names
WHOLE = ("token_ids", "group", "topk_ids", "turn_NT", "state_NU", "segment_NT")
# columns of any kind of number
FREE = ("mask_NT", "success_N", "has_teacher_N", "turn_mask_NU", "extra")
MAX_REWARD = 1e15  # squares and products of larger ones leave the range of float32
# how far above 0 rounding may lift a log-prob
LOGP_ROUNDING = 1e-3
LOGPS = ("sampler_logp_NT", "trainer_logp_NT", "ref_logp_NT", "teacher_logp_NT")
FLOAT_COLUMNS = ("entropy_NT", "ref_kl_NT", "importance_NT", *LOGPS)


def row_lengths(rows: Any, name: str) -> list[int]:
    """How many entries each rollout has in a column of ragged lists."""
    if _length(rows) is None:
        raise ValueError(
            f"from_lists: {name} must be a list of lists, one per rollout, got {_shown(rows)}."
        )
    lengths = [_length(row) for row in rows]
    for at, (row, length) in enumerate(zip(rows, lengths)):
        if length is None:
            raise ValueError(
                f"from_lists: {name} of rollout {at} must be a list with one number per token, got"
                f" {_shown(row)}. Give one list per rollout: {name}=[[...], [...]]."
            )
    return [length for length in lengths if length is not None]


def pad_rows(
    rows: Sequence[Sequence[float]], lengths: list[int], width: int, dtype: torch.dtype, name: str
) -> Tensor:
    """Ragged rows as one tensor, right-padded with 0; lengths other than those of the tokens are an
    error.
    """
    got = row_lengths(rows, name)
    _check_count(name, "list", len(got), len(lengths))
    for at, (own, expected) in enumerate(zip(got, lengths)):
        if own != expected:
            raise ValueError(
                f"from_lists: {name} of rollout {at} has {counted(own, 'number', 'numbers')},"
                f" expected {expected}, one per token of token_ids. Both are the response alone,"
                " without prompt and padding."
            )
    out = torch.zeros(len(rows), width, dtype=dtype)
    for at, row in enumerate(rows):
        value_T = _as_numbers(row, dtype)
        if value_T is None:
            token, value = _first_bad(row, dtype)
            raise ValueError(
                f"from_lists: {name} at token {token} of rollout {at} is {_shown(value)}, expected"
                f" {_noun(dtype)}."
            )
        out[at, : len(row)] = value_T
    return out


def number_column(values: Sequence[float], num: int, dtype: torch.dtype, name: str) -> Tensor:
    """One number per rollout as a tensor."""
    own = _length(values)
    if own is None:
        raise ValueError(
            f"from_lists: {name} must be a list with one number per rollout, got {_shown(values)}."
        )
    _check_count(name, "number", own, num)
    out = _as_numbers(values, dtype)
    if out is None:
        at, value = _first_bad(values, dtype)
        advice = " Number the prompts 0, 1, 2, ..." if name == "group" else ""
        raise ValueError(
            f"from_lists: {name} of rollout {at} is {_shown(value)}, expected {_noun(dtype)}"
            f" per rollout.{advice}"
        )
    return out


def check_columns(columns: Mapping[str, object], lists: Collection[str], others: set[str]) -> None:
    """Further columns of ``from_lists``: ragged lists, or ready tensors under their full name."""
    for name, value in columns.items():
        if name not in lists and name not in others:
            raise ValueError(
                f"from_lists: unknown column {name!r}. {nearest(name, {*lists, *others})} Columns"
                " of your own go into extra={...}."
            )
        short = name.removesuffix("_NT")
        if name != short and short in lists and not isinstance(value, Tensor | None):
            raise ValueError(
                f"from_lists: {name} must be a tensor, got {type(value).__name__}. Ragged lists are"
                f" given as {short}=[[...], [...]]."
            )


def check_float(dtype: object) -> None:
    """The numbers of a batch are floating point."""
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(
            f"from_lists: dtype must be a floating point type, for example torch.float32, got"
            f" {dtype!r}."
        )


def _check_count(name: str, what: str, got: int, num: int) -> None:
    if got != num:
        raise ValueError(
            f"from_lists: {name} has {counted(got, what, f'{what}s')}, expected {num}, one per"
            " rollout of token_ids."
        )


def _length(values: Any) -> int | None:
    """None of what is no list of entries: texts, mappings, numbers."""
    if isinstance(values, (str, bytes, Mapping, Set)):
        return None
    try:
        return len(values)
    except TypeError:
        return None


def _as_numbers(values: Sequence[float], dtype: torch.dtype) -> Tensor | None:
    """One number per entry; None where some entry is none, or no whole one where ids are asked."""
    try:
        whole = torch.as_tensor(values) if dtype == torch.long else None
        out = torch.as_tensor(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    is_fit = out.dim() == 1 and (whole is None or bool((whole == out).all()))
    return out if is_fit else None


def _first_bad(values: Sequence[float], dtype: torch.dtype) -> tuple[int, object]:
    """Where the first entry is that is no number."""
    bad = (at for at in range(len(values)) if _as_numbers([values[at]], dtype) is None)
    at = next(bad, 0)
    return at, values[at]


def _noun(dtype: torch.dtype) -> str:
    return "a number" if dtype.is_floating_point else "a whole number"


def _shown(value: object) -> str:
    text = repr(value)
    if value is None:
        return text
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"


def check_kinds(batch: TokenBatch) -> None:
    """Columns are tensors: whole numbers for ids and groups, real numbers for the rest."""
    check_whole("TokenBatch", least=1, or_none=True, max_length=batch.max_length)
    if not isinstance(batch.extra, Mapping):
        raise ValueError(
            f"TokenBatch: extra must be a mapping of names to tensors, got {_shown(batch.extra)}."
        )
    named = [(f.name, getattr(batch, f.name), f.default) for f in dataclasses.fields(batch)]
    columns = [one for one in named if one[0] not in ("max_length", "success", "extra")]
    columns += [(f"extra[{name!r}]", value, ...) for name, value in batch.extra.items()]
    for name, value, default in columns:
        if value is None and default is None:
            continue
        if not isinstance(value, Tensor):
            raise ValueError(
                f"TokenBatch: {name} must be a tensor, got {type(value).__name__}. Give"
                " torch.tensor(...); TokenBatch.from_lists takes ragged lists."
            )
        is_float, is_id = value.dtype.is_floating_point, name.startswith(WHOLE)
        is_fit = not is_float and value.dtype != torch.bool if is_id else is_float
        if value.is_complex() or (name.split("[")[0] not in FREE and not is_fit):
            expected = "whole numbers" if is_id else "floating point"
            kind = "long" if is_id else "float"
            raise ValueError(
                f"TokenBatch: {name} must hold {expected}, got {value.dtype}. Give"
                f" {name.split('[')[0]}.{kind}()."
            )


def check_shapes(batch: TokenBatch) -> None:
    """Every column has the axes that its name says."""
    if batch.token_ids_NT.dim() != 2:
        raise ValueError(
            f"TokenBatch: token_ids_NT must be [N, T], got {list(batch.token_ids_NT.shape)}."
        )
    n, t = batch.token_ids_NT.shape
    if n == 0 or t == 0:
        raise ValueError(f"TokenBatch: no rollouts to work on, token_ids_NT is [{n}, {t}].")
    named = [
        (f.name, getattr(batch, f.name))
        for f in dataclasses.fields(batch)
        if f.name not in ("max_length", "success", "extra")
    ]
    num_turns = next((v.shape[1] for k, v in named if k.endswith("_NU") and v is not None), None)
    for name, value in named:
        if value is None or name == "head_VD":
            continue
        axes = name.rsplit("_", 1)[1]
        expected = {"N": n, "T": t} | ({} if num_turns is None else {"U": num_turns})
        if value.dim() != len(axes) or any(
            value.shape[k] != expected.get(a, value.shape[k]) for k, a in enumerate(axes)
        ):
            raise ValueError(
                f"TokenBatch: {name} has shape {list(value.shape)}, expected"
                f" {[expected.get(a, a) for a in axes]} (N={n} rollouts, T={t} padded response"
                " tokens from token_ids_NT)."
            )
    for name, value in batch.extra.items():
        if value.shape[:1] != (n,):
            raise ValueError(
                f"TokenBatch: extra column {name!r} has shape {list(value.shape)}, expected first"
                f" axis N={n}."
            )


def check_values(batch: TokenBatch) -> None:
    """Every rollout has a token; rewards are finite; log-probs are finite and not positive."""
    check_number("TokenBatch", or_none=True, success=batch.success)
    empty_N = ~batch.mask_NT.any(1)
    if empty_N.any():
        raise ValueError(
            f"TokenBatch: rollouts {_which(empty_N)} have no response token (mask_NT is all False)."
            " Drop them, or count the stop token as part of the response."
        )
    bad_N = ~(batch.reward_N.abs() <= MAX_REWARD)
    if bad_N.any():
        raise ValueError(
            f"TokenBatch: reward_N is not finite, or beyond {MAX_REWARD:g}, at rollouts"
            f" {_which(bad_N)} (the first is {_first(batch.reward_N, bad_N)}). Drop rollouts that"
            " could not be graded, or give them a number."
        )
    for name in FLOAT_COLUMNS:
        value = getattr(batch, name)
        if value is None:
            continue
        bad_NT = ~torch.isfinite(value) & batch.mask_NT
        if bad_NT.any():
            row, token = bad_NT.nonzero()[0].tolist()
            raise ValueError(
                f"TokenBatch: {name} is not finite on response tokens of rollouts"
                f" {_which(bad_NT.any(1))} ({_first(value, bad_NT)} at token {token} of rollout"
                f" {row}). Where the model wrote nothing, set mask_NT to False."
            )
        if name.endswith("logp_NT"):
            _check_logp(name, torch.where(batch.mask_NT, value, 0))
    check_turns(batch)
    check_segments(batch)


def check_segments(batch: TokenBatch) -> None:
    """Segments lie on tokens that the model wrote and rise one by one; each has one value."""
    segment_NT, value_NT = batch.segment_NT, batch.value_NT
    if segment_NT is None:
        return
    segment_NT = torch.where(batch.mask_NT, segment_NT, -1)
    before_NT = torch.nn.functional.pad(segment_NT.cummax(1).values[:, :-1], (1, 0), value=-1)
    step_NT = segment_NT - before_NT
    bad_N = ((segment_NT >= 0) & (step_NT != 0) & (step_NT != 1)).any(1)
    if bad_N.any():
        raise ValueError(
            f"TokenBatch: segment_NT of rollouts {_which(bad_N)} does not count its segments from"
            " 0, one by one; tokens without a segment have -1."
        )
    if value_NT is None:
        return
    last_NT = torch.where(segment_NT >= 0, torch.arange(segment_NT.shape[1]).to(segment_NT), -1)
    last_NT = torch.nn.functional.pad(last_NT.cummax(1).values[:, :-1], (1, 0), value=-1)
    differs_NT = value_NT != value_NT.gather(1, last_NT.clamp(min=0))
    bad_N = ((segment_NT >= 0) & (step_NT == 0) & differs_NT).any(1)
    bad_N |= (~torch.isfinite(value_NT) & (segment_NT >= 0)).any(1)
    if bad_N.any():
        raise ValueError(
            f"TokenBatch: value_NT of rollouts {_which(bad_N)} is not one finite number per"
            " segment of segment_NT."
        )


def check_turns(batch: TokenBatch) -> None:
    """Turns lie on the tokens that the model wrote, in order, and their rewards add up."""
    if batch.turn_NT is not None:
        bad_N = ((batch.turn_NT >= 0) != batch.mask_NT).any(1)
        after_NT = torch.where(batch.mask_NT, batch.turn_NT, -1).cummax(1).values
        bad_N |= (batch.mask_NT & (batch.turn_NT < after_NT)).any(1)
        if bad_N.any():
            raise ValueError(
                f"TokenBatch: turn_NT of rollouts {_which(bad_N)} is not the number of a turn on"
                " every token of mask_NT, rising, and -1 elsewhere."
            )
    if batch.turn_mask_NU is not None and batch.turn_NT is not None:
        num_N = batch.turn_mask_NU.sum(1)
        bad_N = batch.turn_NT.amax(1) + 1 > num_N
        bad_N |= (batch.turn_mask_NU[:, 1:] & ~batch.turn_mask_NU[:, :-1]).any(1)
        if bad_N.any():
            raise ValueError(
                f"TokenBatch: turn_mask_NU of rollouts {_which(bad_N)} has a gap, or fewer turns"
                " than turn_NT."
            )
    if batch.turn_reward_NU is not None:
        total_N = batch.turn_reward_NU.double().sum(1)
        room_N = 1e-4 * (1 + batch.turn_reward_NU.abs().double().sum(1))
        bad_N = ~((total_N - batch.reward_N.double()).abs() <= room_N)
        if bad_N.any():
            row = int(bad_N.nonzero()[0])
            raise ValueError(
                f"TokenBatch: turn_reward_NU of rollouts {_which(bad_N)} does not add up to"
                f" reward_N ({float(total_N[row]):g} and {float(batch.reward_N[row]):g} at rollout"
                f" {row})."
            )


def _check_logp(name: str, logp_NT: Tensor) -> None:
    bad_NT = logp_NT > LOGP_ROUNDING
    if bad_NT.any():
        row, token = bad_NT.nonzero()[0].tolist()
        raise ValueError(
            f"TokenBatch: {name} is {float(logp_NT[row, token]):g} at token {token} of rollout"
            f" {row}, and log-probs are <= 0. Pass log-probs, neither probabilities nor logits."
        )


def _first(value: Tensor, bad: Tensor) -> str:
    return f"{float(value[bad][0]):g}"


def _which(bad_N: Tensor) -> str:
    rows = bad_N.nonzero().flatten().tolist()
    return str(rows[:8])[:-1] + (", ...]" if len(rows) > 8 else "]")
