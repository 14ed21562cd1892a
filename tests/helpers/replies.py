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
        middle = torch.full_like(reply_NR, -1) if name == "turn_NT" else middle
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
