"""Advantages in plain Python loops, from the mathematics: no tensors, no vectorised code."""

from __future__ import annotations

import math


def members(groups: list[int], i: int) -> list[int]:
    return [j for j in range(len(groups)) if groups[j] == groups[i]]


def mean(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def unbiased_std(values: list[float]) -> float:
    centre = mean(values)
    total = 0.0
    for value in values:
        total += (value - centre) ** 2
    return math.sqrt(total / (len(values) - 1))


def group_mean(rewards, groups):
    return [
        rewards[i] - mean([rewards[j] for j in members(groups, i)]) for i in range(len(rewards))
    ]


def group_zscore(rewards, groups, eps=1e-4):
    out = []
    for i in range(len(rewards)):
        own = [rewards[j] for j in members(groups, i)]
        out.append(
            0.0 if max(own) == min(own) else (rewards[i] - mean(own)) / (unbiased_std(own) + eps)
        )
    return out


def leave_one_out(rewards, groups):
    return [
        rewards[i] - mean([rewards[j] for j in members(groups, i) if j != i])
        for i in range(len(rewards))
    ]


def batch_whitened(rewards, groups):
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    return [(reward - mean(rewards)) / unbiased_std(rewards) for reward in rewards]


def group_mean_batch_std(rewards, groups):
    centred = []
    for i in range(len(rewards)):
        own = [rewards[j] for j in members(groups, i)]
        centred.append(0.0 if max(own) == min(own) else rewards[i] - mean(own))
    spread = unbiased_std(centred)
    return [value / spread if spread > 0 else 0.0 for value in centred]


def signs(rewards, groups, threshold=0.5):
    return [1.0 if reward >= threshold else -1.0 for reward in rewards]


def positives_only(rewards, groups, threshold=0.5):
    return [1.0 if reward >= threshold else 0.0 for reward in rewards]


def negatives_only(rewards, groups, threshold=0.5):
    return [0.0 if reward >= threshold else -1.0 for reward in rewards]


def weighted_signs(rewards, groups, positive=0.1, threshold=0.5):
    return [positive if reward >= threshold else -1.0 for reward in rewards]


def max_rl(rewards, groups):
    out = []
    for i in range(len(rewards)):
        centre = mean([rewards[j] for j in members(groups, i)])
        out.append(0.0 if centre == 0 else (rewards[i] - centre) / centre)
    return out


def fade(rewards, groups, alpha=1.0, delta=1.0):
    out = []
    for i in range(len(rewards)):
        rate = mean([rewards[j] for j in members(groups, i)])
        value = 0.0 if rate in (0.0, 1.0) else (1 - rate) ** (alpha - 1) * (rewards[i] - rate)
        out.append(value / delta if value < 0 else value)
    return out


def constant(reward, group, value=-1.0):
    return [value for _ in reward]
