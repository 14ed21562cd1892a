"""One signed number per rollout, from rewards alone.

Each is ``fn(reward_N, group_N, *, params) -> advantage_N``.

Group estimators compare a rollout with the others of its prompt: a constant group (all rewards
equal) gets exactly 0, a group of one is an error. With several ranks a prompt's rollouts lie on one
rank. Batch estimators and signs work with one rollout a prompt."""

from __future__ import annotations

from counterpoise.advantages.batch import batch_whitened, group_mean_batch_std
from counterpoise.advantages.fade import fade
from counterpoise.advantages.group import group_mean, group_zscore, leave_one_out, max_rl
from counterpoise.advantages.overlong import overlong, overlong_penalty
from counterpoise.advantages.signs import (
    constant,
    negatives_only,
    positives_only,
    signs,
    weighted_signs,
)
from counterpoise.stage import Stage

ADVANTAGES: dict[str, Stage] = {
    "group_mean": group_mean,
    "group_zscore": group_zscore,
    "leave_one_out": leave_one_out,
    "batch_whitened": batch_whitened,
    "group_mean_batch_std": group_mean_batch_std,
    "signs": signs,
    "positives_only": positives_only,
    "negatives_only": negatives_only,
    "weighted_signs": weighted_signs,
    "constant": constant,
    "max_rl": max_rl,
    "fade": fade,
    "overlong": overlong,
}

__all__ = [
    "ADVANTAGES",
    "batch_whitened",
    "constant",
    "fade",
    "group_mean",
    "group_mean_batch_std",
    "group_zscore",
    "leave_one_out",
    "max_rl",
    "negatives_only",
    "overlong",
    "overlong_penalty",
    "positives_only",
    "signs",
    "weighted_signs",
]
