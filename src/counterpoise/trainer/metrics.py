"""The numbers of a batch, from the tensors of the batch.

Every key is explained in docs/reference/metrics.md.
"""

from __future__ import annotations

from typing import Any

import torch

from counterpoise.catalogue.method import Method
from counterpoise.maths.reduce import groups, masked_mean
from counterpoise.maths.turns import turns
from counterpoise.plans import plan_metrics
from counterpoise.rollouts import Conversation, RolloutBatch
from counterpoise.run.schema import END_REASONS
from counterpoise.trainer.collect import RolloutSampler
from counterpoise.trainer.update import Update
from counterpoise.types import Credit, Plan, TokenBatch

NUM_TURNS = 8  # the first turns have numbers of their own


def batch_metrics(
    collected: RolloutBatch, credit: Credit, plan: Plan, updates: list[Update], success: float
) -> dict[str, float]:
    """Rollouts, credit, plan and updates of one batch, flat."""
    return {
        **rollout_metrics(collected, success),
        **turn_metrics(collected),
        **credit.metrics,
        **plan_metrics(plan, collected.batch, credit.advantage_N),
        **update_metrics(updates),
    }


def rollout_metrics(collected: RolloutBatch, success: float) -> dict[str, float]:
    batch = collected.batch
    assert batch.entropy_NT is not None
    is_constant_N = groups(batch.group_N).is_constant(batch.reward_N)
    return {
        "reward/mean": float(batch.reward_N.mean()),
        "reward/min": float(batch.reward_N.min()),
        "reward/max": float(batch.reward_N.max()),
        "reward/solved_frac": float((batch.reward_N >= success).float().mean()),
        "reward/constant_group_frac": float(is_constant_N.float().mean()),
        "rollouts/num": batch.num_rollouts,
        "rollouts/length": float(batch.length_N.float().mean()),
        "rollouts/cut_frac": sum(reason == "length" for reason in collected.stop_reason)
        / batch.num_rollouts,
        "rollouts/num_tokens": int(batch.mask_NT.sum()),
        "entropy/mean": float(masked_mean(batch.entropy_NT, batch.mask_NT)),
        "grader/num_failures": collected.num_grader_failures,
    }


def sampling_metrics(
    method: Method, sampler: RolloutSampler, batch: TokenBatch, plan: Plan
) -> dict[str, float]:
    """What a method that samples more sampled, and how much of it is in an update; empty for
    others.
    """
    if not method.collectors:
        return {}
    row_R = torch.cat(plan.updates).to(batch.group_N.device)
    return {
        "sampling/rounds": sampler.num_rounds,
        "sampling/prompts": sampler.num_prompts,
        "sampling/more_rollouts": sampler.num_more,
        "sampling/more_tokens": sampler.num_more_tokens,
        "sampling/kept_frac": len(batch.group_N[row_R].unique()) / sampler.num_prompts,
    }


def turn_metrics(collected: RolloutBatch) -> dict[str, float]:
    """Turns, their rewards, why conversations ended and the environment's own numbers; empty
    without an environment.
    """
    if collected.conversations is None:
        return {}
    played = turns(collected.batch)
    num_U = played.mask_NU.sum(0)[:NUM_TURNS].tolist()
    total_U = played.reward_NU.sum(0).tolist()
    return {
        "turns/mean": float(played.mask_NU.sum(1).float().mean()),
        **{f"turns/reward_{u}": total_U[u] / num for u, num in enumerate(num_U) if num},
        **{f"turns/played_{u}": num / len(played.mask_NU) for u, num in enumerate(num_U) if num},
        **talk_metrics(collected.conversations + _lost_talks(collected)),
    }


def _lost_talks(collected: RolloutBatch) -> list[Conversation]:
    return (collected.lost.conversations or []) if collected.lost else []


def talk_metrics(talks: list[Conversation]) -> dict[str, float]:
    """Shares of end reasons, and the mean of each number over the conversations that have it."""
    names = sorted({name for talk in talks for name in talk.metrics})
    known = {n: [talk.metrics[n] for talk in talks if n in talk.metrics] for n in names}
    ended = [talk.end_reason for talk in talks]
    shares = {reason: ended.count(reason) / len(talks) for reason in END_REASONS}
    return {
        **{f"turns/end_{reason.replace(' ', '_')}": share for reason, share in shares.items()},
        **{f"environment/{name}": sum(values) / len(values) for name, values in known.items()},
    }


def update_metrics(updates: list[Update]) -> dict[str, Any]:
    mean = {key: sum(values) / len(values) for key, values in _by_update(updates).items()}
    return {
        **mean,
        "loss/grad_norm_max": max(update.grad_norm for update in updates),
        "optimizer/lr": updates[-1].lr,
        "optimizer/num_updates": len(updates),
    }


def _by_update(updates: list[Update]) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {}
    for update in updates:
        mask_NT, loss = update.rows.mask_NT, update.loss
        gap_NT = torch.where(mask_NT, update.trainer_logp_NT - update.rows.sampler_logp_NT, 0)
        numbers = {
            "loss/total": (loss.loss_NT * update.rows.scale_NT).sum(),
            "loss/clipped_frac": masked_mean(loss.clipped_NT.float(), mask_NT),
            "loss/ratio_mean": masked_mean(loss.ratio_NT, mask_NT),
            "loss/ratio_max": torch.where(mask_NT, loss.ratio_NT, 0).max(),
            "loss/coef_mass": (loss.coef_NT * update.rows.scale_NT).abs().sum(),
            "loss/sampler_gap": masked_mean(gap_NT.abs(), mask_NT),
            "loss/grad_norm": update.grad_norm,
            "loss/grad_clip_factor": update.clip_factor,
        }
        for key, value in numbers.items():
            out.setdefault(key, []).append(float(value))
    return out
