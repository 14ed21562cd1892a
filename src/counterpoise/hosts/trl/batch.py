"""What TRL generated as a TokenBatch, its credit, and the same over all processes.

TRL keeps groups by position: over the processes' rows in rank order, rows k G .. (k + 1) G - 1
answer one prompt. Columns of ours travel in TRL's own dict under ``cp_`` names, so that whatever
TRL does to rows happens to them too.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.scoring import Scores, plain_model, score_again
from counterpoise.maths.head import Head, head_scores
from counterpoise.maths.reduce import LOCAL, over_ranks
from counterpoise.stage import Stage
from counterpoise.types import Credit, TokenBatch

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

TOPK = {"topk_ids_NTK", "topk_logp_NTK"}
LEFT_PADDED = ("prompt_ids", "prompt_mask")
NUM_CANDIDATES = 20  # of the topk proxy, unless the rule asks for another number


def total_reward(trainer: CreditMixin, reward_by_function: Tensor) -> Tensor:
    """The weighted sum of the reward functions, of all processes' rows; a rollout that none of them
    graded is an error.
    """
    ungraded = reward_by_function.isnan().all(1)
    if ungraded.any():
        rows = ungraded.nonzero().flatten().tolist()
        raise ValueError(
            f"every reward function returned None for rollouts {rows[:8]}: there is no reward to"
            " make credit of. Return a number (0.0 for a failure), or use method='uniform', where"
            " TRL gives such rollouts the advantage 0."
        )
    return (reward_by_function * trainer.reward_weights.to(reward_by_function.device)).nansum(1)


def loss_mask(output: dict[str, Any]) -> Tensor:
    """True on the tokens that TRL trains on: no padding, no tokens of a tool."""
    mask_NT = output["completion_mask"]
    return (mask_NT * output["tool_mask"] if "tool_mask" in output else mask_NT).bool()


def token_batch(
    trainer: CreditMixin,
    setup: Setup,
    output: dict[str, Any],
    reward_by_function: Tensor,
    recorded: list[Scores],
    more: bool,
) -> TokenBatch:
    """This process's rollouts with the columns that the method needs; ``more`` asks for log-probs
    and entropies even if no rule reads them.
    """
    needs, mask_NT = setup.method.needs, loss_mask(output)
    scores = _scores(trainer, setup, output, recorded, more)
    num_rows, rank = len(mask_NT), trainer.accelerator.process_index
    row_N = torch.arange(rank * num_rows, (rank + 1) * num_rows, device=mask_NT.device)
    logp_NT = _logp(output, scores, mask_NT.shape[1])
    columns: dict[str, Tensor | None] = {}
    if scores is not None:
        columns["entropy_NT"] = scores.entropy_NT if more or "entropy_NT" in needs else None
        columns["hidden_NTD"] = scores.hidden_NTD if "hidden_NTD" in needs else None
    if "trainer_logp_NT" in needs:
        columns["trainer_logp_NT"] = logp_NT
    if "ref_logp_NT" in needs:
        columns["ref_logp_NT"] = output["ref_per_token_logps"].float()
    if needs & (TOPK | {"head_VD"}):
        columns |= head_columns(trainer, setup, output["completion_ids"], mask_NT, scores)
    return TokenBatch(
        token_ids_NT=output["completion_ids"],
        mask_NT=mask_NT,
        group_N=row_N // trainer.num_generations,
        reward_N=total_reward(trainer, reward_by_function)[row_N].float(),
        sampler_logp_NT=logp_NT,
        max_length=trainer.max_completion_length,
        extra={"cp_row": row_N},
        **columns,  # pyright: ignore[reportArgumentType]
    )


def assign(
    trainer: CreditMixin,
    setup: Setup,
    batch: TokenBatch,
    trl_advantage_N: Tensor,
    state: dict[str, Any] | None,
    *,
    batch_number: int,
) -> Credit:
    """The method's credit, statistics over all processes; on TRL's advantages where those are
    kept.
    """
    method = setup.method
    if not setup.has_own_advantage:
        fixed = Stage(lambda reward_N, group_N: trl_advantage_N)
        method = dataclasses.replace(method, advantage=fixed)
    reduce = over_ranks() if trainer.accelerator.num_processes > 1 else LOCAL
    with torch.no_grad():
        return method.assign(
            batch, state, reduce=reduce, seed=trainer.args.seed, batch_number=batch_number
        )


def add_columns(output: dict[str, Any], batch: TokenBatch, credit: Credit) -> None:
    """Our columns, beside TRL's."""
    output["cp_row"], output["cp_reward"], output["cp_advantage"] = (
        batch.extra["cp_row"],
        batch.reward_N,
        credit.advantage_N,
    )
    output["cp_credit"], output["cp_weight"], output["cp_sampler_logp"] = (
        credit.credit_NT,
        credit.weight_NT,
        batch.sampler_logp_NT,
    )
    if batch.entropy_NT is not None:
        output["cp_entropy"] = batch.entropy_NT


def gather_columns(trainer: CreditMixin, output: dict[str, Any]) -> dict[str, Any]:
    """Every column of all processes, rows in rank order, padded to the widest."""
    accelerator = trainer.accelerator
    out: dict[str, Any] = {}
    for name, value in output.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or accelerator.num_processes == 1:
            out[name] = value
            continue
        value = value.contiguous()
        if value.ndim > 1:
            value = accelerator.pad_across_processes(value, dim=1, pad_first=name in LEFT_PADDED)
        out[name] = accelerator.gather(value)
    return out


def whole_batch(trainer: CreditMixin, columns: dict[str, Any]) -> tuple[TokenBatch, Credit]:
    """The batch of all processes, from gathered columns."""
    batch = TokenBatch(
        token_ids_NT=columns["completion_ids"],
        mask_NT=loss_mask(columns),
        group_N=columns["cp_row"] // trainer.num_generations,
        reward_N=columns["cp_reward"],
        sampler_logp_NT=columns["cp_sampler_logp"],
        entropy_NT=columns.get("cp_entropy"),
        ref_logp_NT=columns.get("ref_per_token_logps"),
        max_length=trainer.max_completion_length,
    )
    return batch, Credit(
        columns["cp_advantage"], columns["cp_weight"], columns["cp_credit"], None, {}
    )


def head_of(trainer: CreditMixin) -> Head:
    """The LM head; an error where the logits are not its weight x the last hidden state.

    Whether they are is measured once per model, at the trainer's construction: later accelerate
    runs the model in mixed precision.
    """
    from counterpoise.policy.backbone import backbone

    model = plain_model(trainer)
    head = backbone(model).head
    if head is None:
        raise ValueError(
            f"{type(model).__name__}: its logits are not head weight x last hidden state, which the"
            " method reads. Use DelTA's proxy 'row', which needs the hidden states alone."
        )
    return head


def head_columns(
    trainer: CreditMixin, setup: Setup, ids_NT: Tensor, mask_NT: Tensor, scores: Scores | None
) -> dict[str, Tensor]:
    """The LM head's weight, and the K best candidates of each token from the hidden states."""
    head = head_of(trainer)
    columns = {"head_VD": head.weight_VD.detach()}
    if setup.method.needs & TOPK:
        assert scores is not None
        assert scores.hidden_NTD is not None
        asked = [rule.params.get("topk") for rule in setup.method.rules]
        best = head_scores(
            scores.hidden_NTD[mask_NT].to(head.weight_VD.dtype),
            ids_NT[mask_NT],
            head,
            temperature=trainer.temperature,
            topk=max([NUM_CANDIDATES, *(k for k in asked if k)]),
        )
        columns["topk_ids_NTK"] = _lay_out(best.topk_ids_MK, mask_NT)
        columns["topk_logp_NTK"] = _lay_out(best.topk_logp_MK, mask_NT)
    return columns


def _lay_out(value_MK: Tensor | None, mask_NT: Tensor) -> Tensor:
    """Values of the masked tokens at their places, 0 elsewhere."""
    assert value_MK is not None
    out_NTK = value_MK.new_zeros(*mask_NT.shape, value_MK.shape[1])
    return out_NTK.index_put(mask_NT.nonzero(as_tuple=True), value_MK)


def columns_to_score(setup: Setup, more: bool) -> tuple[bool, bool]:
    """Whether entropies, and whether hidden states are to be measured."""
    needs = setup.method.needs
    return "entropy_NT" in needs or more, bool(needs & (TOPK | {"hidden_NTD"}))


def _scores(
    trainer: CreditMixin, setup: Setup, output: dict[str, Any], recorded: list[Scores], more: bool
) -> Scores | None:
    """TRL's own scoring of the policy if it did one, one of ours if something is missing, None if
    nothing is needed.
    """
    method, (entropy, hidden) = setup.method, columns_to_score(setup, more)
    for scores in recorded:
        if scores.logp_NT is output.get("old_per_token_logps"):
            return scores
    has_logp = "old_per_token_logps" in output or _is_complete(output)
    wants_logp = "trainer_logp_NT" in method.needs or ((method.rules or more) and not has_logp)
    if not (entropy or hidden or wants_logp):
        return None
    return score_again(trainer, output, entropy=entropy, hidden=hidden)


def _logp(output: dict[str, Any], scores: Scores | None, width: int) -> Tensor:
    """Log-probs of the sampling policy: as the trainer scores it, else as the sampler told, else
    (nothing reads them) 0.
    """
    told = output["sampling_per_token_logps"] if _is_complete(output) else None
    for value in (output.get("old_per_token_logps"), scores and scores.logp_NT, told):
        if value is not None:
            return value.detach()[:, :width].float()
    return torch.zeros_like(output["completion_mask"], dtype=torch.float32)


def _is_complete(output: dict[str, Any]) -> bool:
    """Whether the sampler told the log-prob of every token (vLLM leaves some out)."""
    logp_NT = output.get("sampling_per_token_logps")
    return logp_NT is not None and not logp_NT.isnan().any()
