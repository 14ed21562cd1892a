"""Stages of a user's own, for ``test_config``: named by import path in TRL's fields."""

from __future__ import annotations

import torch

import counterpoise as cp


def last_token(credit_NT, batch):
    """Credit on the last token of each rollout alone."""
    last_N = batch.mask_NT.float().cumsum(1).argmax(1)
    keep_NT = torch.arange(credit_NT.shape[1], device=last_N.device) == last_N[:, None]
    return torch.where(keep_NT, credit_NT, 0)


def half_of_the_reward(reward_N, group_N):
    return reward_N / 2


def backwards(group_N, reward_N, length_N, *, num_updates):
    """Rows in order, the last update first."""
    return list(torch.arange(len(group_N)).tensor_split(num_updates))[::-1]


@cp.token_loss
def plain(trainer_logp_NT, rows):
    """-credit * logp."""
    ratio_NT = (trainer_logp_NT - rows.sampler_logp_NT).detach().exp()
    return -rows.credit_NT * trainer_logp_NT, ratio_NT, torch.zeros_like(rows.mask_NT)
