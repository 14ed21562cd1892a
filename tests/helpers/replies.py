"""Environment replies inside rollouts: tokens that the model read and did not write."""

from __future__ import annotations

import dataclasses

import torch

import counterpoise as cp


def with_reply(batch: cp.TokenBatch, at: int, reply: list[list[int]]) -> cp.TokenBatch:
    """The same rollouts with a reply before model token ``at`` of each; one list per rollout, all
    of one length. The columns hold rubbish there.
    """
    reply_NR = torch.tensor(reply)

    def insert(name: str, value: torch.Tensor) -> torch.Tensor:
        rubbish = torch.full((len(value), reply_NR.shape[1], *value.shape[2:]), 7.0)
        middle = reply_NR if name == "token_ids_NT" else rubbish
        middle = torch.zeros_like(reply_NR) if name in ("mask_NT", "topk_ids_NTK") else middle
        middle = torch.full_like(reply_NR, -1) if name in ("turn_NT", "segment_NT") else middle
        if middle.dim() < value.dim():
            middle = middle[..., None].expand(*middle.shape, value.shape[2])
        return torch.cat([value[:, :at], middle.to(value.dtype), value[:, at:]], 1)

    columns = {
        field.name: insert(field.name, getattr(batch, field.name))
        for field in dataclasses.fields(batch)
        if "_NT" in field.name and getattr(batch, field.name) is not None
    }
    return batch.replace(**columns)


def without_reply(value_NT: torch.Tensor, at: int, length: int) -> torch.Tensor:
    """A column with the places of the reply cut out again."""
    return torch.cat([value_NT[:, :at], value_NT[:, at + length :]], 1)


def with_replies(batch: cp.TokenBatch, lengths: list[int]) -> cp.TokenBatch:
    """The same rollouts with a reply before every turn but the first, of so many tokens in each
    rollout and of ids that no other rollout has. The columns hold rubbish there.
    """
    assert batch.turn_NT is not None
    index = [_places(turns, num) for turns, num in zip(batch.turn_NT.tolist(), lengths)]
    width = max(map(len, index))
    index_NT = torch.tensor([row + [-1] * (width - len(row)) for row in index])
    reply_N1 = 1000 + torch.arange(batch.num_rollouts)[:, None]
    fills = {"token_ids_NT": reply_N1, "turn_NT": -1, "mask_NT": 0, "topk_ids_NTK": 0}
    fills["segment_NT"] = -1

    def spread(name: str, value: torch.Tensor) -> torch.Tensor:
        fill = torch.as_tensor(fills.get(name, 7)).to(value.dtype)
        at = index_NT.clamp(min=0), (index_NT >= 0)
        index_ = at[0].reshape(*at[0].shape, *[1] * (value.dim() - 2))
        taken = value.gather(1, index_.expand(*at[0].shape, *value.shape[2:]))
        is_own = at[1].reshape(index_.shape).expand_as(taken)
        fill = fill.reshape(*fill.shape, *[1] * (value.dim() - 2)) if fill.dim() else fill
        return torch.where(is_own, taken, fill)

    columns = {
        field.name: spread(field.name, getattr(batch, field.name))
        for field in dataclasses.fields(batch)
        if "_NT" in field.name and getattr(batch, field.name) is not None
    }
    return batch.replace(**columns)


def _places(turns: list[int], length: int) -> list[int]:
    """Where each token of a row comes from; -1 for a reply."""
    out: list[int] = []
    for place, turn in enumerate(turns):
        if turn >= 0:
            begins = place > 0 and turn != turns[place - 1]
            out += [-1] * (length if begins else 0) + [place]
    return out
