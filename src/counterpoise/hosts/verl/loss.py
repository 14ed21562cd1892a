"""Policy losses for verl: counterpoise's token losses, reduced by verl's own ``agg_loss``.

verl's ``old_log_prob`` is what counterpoise calls the sampler's log-prob, its ``advantages`` are
the credit. Widths of clips are those of the method, not ``actor.clip_ratio_*``; the reduction is
``actor.loss_agg_mode``.
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from counterpoise.catalogue.method import Method
from counterpoise.hosts.verl.checks import sequence_trouble
from counterpoise.hosts.verl.method import PREFIX, agg_mode, loss_method, refuse
from counterpoise.maths.reduce import masked_mean
from counterpoise.types import Rows

if TYPE_CHECKING:
    from verl.workers.config import ActorConfig

# settings of verl's actor that its own losses read and ours take from the method
UNREAD = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "tau_pos", "tau_neg")


@functools.cache
def policy_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """verl's policy loss ``counterpoise/<name>``."""

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: ActorConfig | None = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        from verl.trainer.ppo.core_algos import agg_loss

        method, shared = loss_method(name), dict(getattr(config, "global_batch_info", None) or {})
        refuse(sequence_trouble(config) if config is not None else None)
        _warn_of_settings(method, loss_agg_mode, config, shared)
        rows = _rows(old_log_prob, advantages, response_mask)
        out = method.loss(log_prob, rows)
        loss_NT = out.loss_NT if rollout_is_weights is None else out.loss_NT * rollout_is_weights
        total = agg_loss(
            loss_mat=loss_NT, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **shared
        )
        return total, _metrics(log_prob.detach(), rows, out.clipped_NT)

    loss.__name__ = loss.__qualname__ = f"{PREFIX}{name}"
    return loss


def _rows(sampler_logp_NT: Tensor, credit_NT: Tensor, response_mask: Tensor) -> Rows:
    """The columns that verl has.

    The others are None: a loss that reads them fails instead of training on invented numbers.
    """
    missing: Any = None
    return Rows(
        row_R=torch.arange(len(response_mask), device=response_mask.device),
        mask_NT=response_mask.bool(),
        group_N=missing,
        reward_N=missing,
        advantage_N=missing,
        credit_NT=credit_NT,
        sampler_logp_NT=sampler_logp_NT,
        scale_NT=missing,
    )


def _metrics(trainer_logp_NT: Tensor, rows: Rows, clipped_NT: Tensor) -> dict[str, float]:
    """verl's two numbers, under its names: share of clipped tokens and mean of sampler - trainer
    log-prob.
    """
    return {
        "actor/pg_clipfrac": masked_mean(clipped_NT.float(), rows.mask_NT).item(),
        "actor/ppo_kl": masked_mean(rows.sampler_logp_NT - trainer_logp_NT, rows.mask_NT).item(),
    }


def _warn_of_settings(
    method: Method, loss_agg_mode: str, config: ActorConfig | None, shared: dict[str, Any]
) -> None:
    """Say which of verl's settings are not read, or are not what the method's source uses.

    Python shows each line once.
    """
    mode = agg_mode(method)
    if loss_agg_mode != mode:
        _warn(
            f"{PREFIX}{method.name}: its reduction is loss_agg_mode={mode}, the actor has"
            f" {loss_agg_mode}, which is used."
        )
    if loss_agg_mode == "seq-mean-token-sum-norm" and shared.get("loss_scale_factor") is None:
        _warn(
            f"{PREFIX}{method.name}: without actor.loss_scale_factor verl divides by the longest"
            " response of each micro-batch. Set it to data.max_response_length."
        )
    given = {
        field.name: getattr(config, field.name)
        for field in (dataclasses.fields(config) if dataclasses.is_dataclass(config) else ())
        if field.name in UNREAD and getattr(config, field.name) != field.default
    }
    if given:
        _warn(
            f"{PREFIX}{method.name}: takes its numbers from the method {method.describe()['loss']};"
            f" ignored: actor {given}. Register a method of your own to change them"
            " (counterpoise.register_method)."
        )


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=4)
