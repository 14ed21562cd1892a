"""Losses that TRL lacks, on the log-probs of TRL's own forward.

TRL's ``_compute_loss`` runs with advantages of 0: it gives the forward, its metrics, and the terms
beside the policy loss (KL, entropy bonus, router loss). The policy loss is ours: ``sum loss_NT *
scale_NT``, scale known for the whole update over all processes. Gradients are averaged over
processes, hence the factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.plan import UpdateRows, in_plan_order, mask_rows
from counterpoise.hosts.trl.scoring import SCORE, record_calls, score_policy
from counterpoise.maths.reduce import masked_mean
from counterpoise.types import Rows, TokenLoss

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin


def own_loss(
    trainer: CreditMixin,
    setup: Setup,
    trl_loss: Callable[[nn.Module, dict[str, Any]], Tensor],
    model: nn.Module,
    inputs: dict[str, Any],
) -> tuple[Tensor, Tensor, TokenLoss]:
    """The loss of a micro-batch, the log-probs behind it, and the loss of each token."""
    without = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
    with record_calls(trainer, SCORE) as results:
        rest = trl_loss(model, without)
    logp_NT = results[-1][0]
    rows = micro_rows(inputs, logp_NT)
    loss = correct_loss(setup.method.loss(logp_NT, rows), inputs.get("importance_sampling_ratio"))
    total = (loss.loss_NT * rows.scale_NT).sum() * trainer.accelerator.num_processes
    _log(trainer, rows, loss)
    return rest + total.to(rest.dtype), logp_NT, loss


def micro_rows(inputs: dict[str, Any], logp_NT: Tensor) -> Rows:
    """The micro-batch's rows with the log-probs that ratios are taken against."""
    rows, before_NT = inputs["cp_rows"], inputs.get("old_per_token_logps")
    return rows._replace(
        sampler_logp_NT=(logp_NT.detach() if before_NT is None else before_NT).float()
    )


def correct_loss(loss: TokenLoss, ratio_N1: Tensor | None) -> TokenLoss:
    """The loss times TRL's correction for a sampler apart (vLLM), a factor per token or per
    rollout, as in TRL.
    """
    if ratio_N1 is None:
        return loss
    return loss._replace(loss_NT=loss.loss_NT * ratio_N1, coef_NT=loss.coef_NT * ratio_N1)


def prepare_update(trainer: CreditMixin, setup: Setup, updates: list[UpdateRows]) -> None:
    """Before the first micro-batch of an update: what the loss must know of all its rows, from one
    forward without gradient.
    """
    args, accelerator = trainer.args, trainer.accelerator
    if not setup.method.needs_update_logp or trainer._step % args.gradient_accumulation_steps:
        return
    number = trainer._step % args.steps_per_generation // args.gradient_accumulation_steps
    first = number * args.gradient_accumulation_steps
    micros = trainer._buffered_inputs[first : first + args.gradient_accumulation_steps]
    update, is_unchanged = (
        updates[number],
        trainer._step % (args.steps_per_generation * trainer.num_iterations) == 0,
    )
    if not update.num_rows:
        return
    logp_CT = accelerator.gather(
        torch.cat([_logp(trainer, micro, is_unchanged) for micro in micros]).contiguous()
    )
    before_NT = torch.cat(
        [
            micro.get("old_per_token_logps", update.rows.sampler_logp_NT.new_zeros(0))
            for micro in micros
        ]
    )
    sampler_CT = accelerator.gather(before_NT.contiguous()) if len(before_NT) else logp_CT
    rows = update.rows._replace(sampler_logp_NT=in_plan_order(sampler_CT, update.slot_WGB).float())
    rows = setup.method.prepare(in_plan_order(logp_CT, update.slot_WGB).float(), rows)
    for micro, slot_B in zip(micros, update.slot_WGB[accelerator.process_index]):
        slot_B = slot_B.to(rows.row_R.device)
        micro["cp_rows"] = mask_rows(rows.select(slot_B.clamp(min=0)), slot_B >= 0)


def _logp(trainer: CreditMixin, micro: dict[str, Any], is_unchanged: bool) -> Tensor:
    """Log-probs of the policy as it is now; before the first update of a batch they are those that
    TRL scored when it generated.
    """
    if is_unchanged and "old_per_token_logps" in micro:
        return micro["old_per_token_logps"]
    return score_policy(trainer, micro)[0]


@contextmanager
def off_policy_by_rollout(trainer: CreditMixin, inputs: dict[str, Any]) -> Iterator[None]:
    """TRL's off-policy mask drops rollouts whose advantage is negative: inside the block it reads
    the advantage of the rollout, not the credit of each token.
    """
    if getattr(trainer, "off_policy_mask_threshold", None) is None:
        yield
        return

    def wrap(mask: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def by_rollout(advantages: Tensor, **columns: object) -> Tensor:
            return mask(advantages=inputs["cp_advantage"][:, None], **columns)

        return by_rollout

    with record_calls(trainer, "get_off_policy_mask", wrap):
        yield


@contextmanager
def kl_of_real_rows(trainer: CreditMixin, inputs: dict[str, Any]) -> Iterator[None]:
    """TRL's means over the rows of a micro-batch count rows that only fill it up: inside the block
    ``beta`` makes up for them, as the micro-batch's advantages do.
    """
    beta = trainer.beta
    trainer.beta = beta * inputs.get("cp_factor", 1.0)
    try:
        yield
    finally:
        trainer.beta = beta


def clip_metrics(trainer: CreditMixin, mask_NT: Tensor, loss: TokenLoss) -> dict[str, float]:
    """TRL's ``clip_ratio/*`` of a loss of ours: tokens that it clipped, by the side of their
    ratio, over all processes.
    """
    low_NT = loss.clipped_NT & (loss.ratio_NT < 1)
    sides = {"low": low_NT, "high": loss.clipped_NT & ~low_NT, "region": loss.clipped_NT}
    gather, length_N = trainer.accelerator.gather, mask_NT.sum(1)
    count_3N = torch.stack([side_NT.sum(1) for side_NT in sides.values()])
    count_N4 = gather(torch.cat([count_3N, length_N[None]]).T.contiguous()).float()
    count_N4 = count_N4[count_N4[:, 3] > 0]
    if not len(count_N4):
        return {}
    share_3 = (count_N4.sum(0) / count_N4[:, 3].sum())[:3].tolist()
    share_N3 = count_N4[:, :3] / count_N4[:, 3:]
    means = {f"clip_ratio/{side}_mean": share for side, share in zip(sides, share_3)}
    ends = (float(share_N3[:, 0].min()), float(share_N3[:, 1].max()))
    return means | {"clip_ratio/low_min": ends[0], "clip_ratio/high_max": ends[1]}


def _log(trainer: CreditMixin, rows: Rows, loss: TokenLoss) -> None:
    """Numbers of this process's micro-batch, in TRL's own metrics."""
    metrics = trainer._metrics["train"]
    metrics["credit/clipped_frac"].append(float(masked_mean(loss.clipped_NT.float(), rows.mask_NT)))
    metrics["credit/ratio_mean"].append(float(masked_mean(loss.ratio_NT, rows.mask_NT)))
    metrics["credit/coef_mass"].append(float((loss.coef_NT * rows.scale_NT).abs().sum()))
    for name, value in clip_metrics(trainer, rows.mask_NT, loss).items():
        if metrics.get(name):  # TRL's own, of a loss without credit
            metrics[name][-1] = value
