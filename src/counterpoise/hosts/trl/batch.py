"""What TRL generated as a TokenBatch, its credit, and the same over all processes.

TRL keeps groups by position: over the processes' rows in rank order, rows k G .. (k + 1) G - 1
answer one prompt. Columns of ours travel in TRL's own dict under ``cp_`` names, so that whatever
TRL does to rows happens to them too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from counterpoise.hosts.trl.live import Live, live_columns, loss_mask
from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.scoring import Scores, plain_model, score_again
from counterpoise.hosts.trl.turns import REWARD, TURNS, add_turns
from counterpoise.maths.head import Head, head_scores
from counterpoise.maths.reduce import LOCAL, over_ranks
from counterpoise.maths.turns import by_turn, token_advantage, turns
from counterpoise.stage import SUCCESS, Stage
from counterpoise.types import Credit, TokenBatch

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

TOPK = {"topk_ids_NTK", "topk_logp_NTK"}
LEFT_PADDED = ("prompt_ids", "prompt_mask")
NUM_CANDIDATES = 20  # of the topk proxy, unless the rule asks for another number


def total_reward(trainer: CreditMixin, reward_by_function: Tensor) -> Tensor:
    """The weighted sum of the reward functions, of this process's rows; NaN for a rollout that none
    of them graded.
    """
    weight_F = trainer.reward_weights.to(reward_by_function.device)
    ungraded_C = reward_by_function.isnan().all(1)
    reward_C = (reward_by_function * weight_F).nansum(1).masked_fill(ungraded_C, torch.nan)
    accelerator = trainer.accelerator
    return reward_C.reshape(accelerator.num_processes, -1)[accelerator.process_index].float()


def success_column(trainer: CreditMixin, reward_by_function: Tensor) -> Tensor | None:
    """Which rollouts of this process are successes, where one reward function decides it."""
    args, accelerator = trainer.args, trainer.accelerator
    if args.success_reward is None:
        return None
    number = trainer.reward_func_names.index(args.success_reward)
    is_success_C = reward_by_function[:, number] >= (
        SUCCESS if args.success is None else args.success
    )
    return is_success_C.reshape(accelerator.num_processes, -1)[accelerator.process_index]


def is_success(trainer: CreditMixin, setup: Setup, reward_by_function: Tensor) -> Tensor:
    """Which rollouts of this process are successes."""
    told_N = success_column(trainer, reward_by_function)
    if told_N is not None:
        return told_N
    least = SUCCESS if setup.method.success is None else setup.method.success
    return total_reward(trainer, reward_by_function) >= least


def token_batch(
    trainer: CreditMixin,
    setup: Setup,
    output: dict[str, Any],
    reward_by_function: Tensor,
    recorded: list[Scores],
    live: Live,
    more: bool,
    taught: Mapping[str, Tensor],
) -> TokenBatch | None:
    """This process's rollouts with the columns that the method needs; ``more`` asks for log-probs
    and entropies even if no rule reads them, ``taught`` are the columns of a teacher.

    Where a process has no rollout that counts, every process gets the batch of all: statistics
    that are pooled over processes would wait for it. None where no process has one.
    """
    needs, mask_NT = setup.method.needs, loss_mask(output)
    scores = _scores(trainer, setup, output, recorded, more)
    logp_NT = _logp(output, scores, mask_NT.shape[1])
    columns: dict[str, Tensor | None] = {
        "token_ids_NT": output["completion_ids"],
        "mask_NT": mask_NT,
        "group_N": live.group_N,
        "reward_N": total_reward(trainer, reward_by_function),
        "success_N": success_column(trainer, reward_by_function),
        "sampler_logp_NT": logp_NT,
        "cp_row": live.row_N,
        "trl_advantage": output["advantages"],
        **taught,
    }
    if scores is not None:
        columns["entropy_NT"] = scores.entropy_NT if more or "entropy_NT" in needs else None
        columns["hidden_NTD"] = scores.hidden_NTD if "hidden_NTD" in needs else None
    if "trainer_logp_NT" in needs:
        columns["trainer_logp_NT"] = logp_NT
    if "ref_logp_NT" in needs:
        columns["ref_logp_NT"] = output["ref_per_token_logps"].float()
    if needs & TOPK:
        columns |= candidates(trainer, setup, output["completion_ids"], mask_NT, scores)
    columns |= {name: output[name] for name in TURNS if name in output}
    if not sum(live.count_W):
        return None
    columns = live_columns(columns if all(live.count_W) else gather_columns(trainer, columns))
    told = {name: columns.pop(name) for name in TURNS if name in columns}
    batch = TokenBatch(
        **{name: columns.pop(name) for name in list(columns) if "_N" in name},  # pyright: ignore[reportArgumentType]
        head_VD=head_of(trainer).weight_VD.detach() if needs & (TOPK | {"head_VD"}) else None,
        max_length=trainer.max_completion_length,
        extra=columns,  # pyright: ignore[reportArgumentType]
    )
    return add_turns(batch, told) if told else batch  # pyright: ignore[reportArgumentType]


def assign(
    trainer: CreditMixin,
    setup: Setup,
    batch: TokenBatch,
    live: Live,
    state: dict[str, Any] | None,
    *,
    batch_number: int,
) -> Credit:
    """The method's credit, statistics over all processes; on TRL's advantages where those are
    kept.
    """
    method = setup.method
    if not setup.has_own_advantage:
        fixed = Stage(lambda reward_N, group_N: batch.extra["trl_advantage"])
        method = dataclasses.replace(method, advantage=fixed)
    is_whole = len(live.count_W) == 1 or not all(live.count_W)
    with torch.no_grad():
        return method.assign(
            batch,
            state,
            reduce=LOCAL if is_whole else over_ranks(),
            seed=trainer.args.seed,
            batch_number=batch_number,
        )


def spread_columns(batch: TokenBatch, credit: Credit, live: Live, width: int) -> dict[str, Tensor]:
    """Our columns for TRL's dict, one row per rollout of this process."""
    row_R = batch.extra["cp_row"]
    wide = {
        "cp_credit": credit.credit_NT,
        "cp_weight": credit.weight_NT,
        "cp_sampler_logp": batch.sampler_logp_NT,
    }
    if batch.entropy_NT is not None:
        wide["cp_entropy"] = batch.entropy_NT
    if credit.advantage_NU is not None:
        wide["cp_turn_advantage"] = token_advantage(credit, batch)
    success = batch.success_N
    return {
        **({} if success is None else {"cp_success": live.spread(success, row_R)}),
        "cp_row": live.row_N,
        "cp_group": live.group_N,
        "cp_reward": live.spread(batch.reward_N, row_R),
        "cp_advantage": live.spread(credit.advantage_N, row_R),
        **{name: live.spread(value_NT, row_R, width) for name, value_NT in wide.items()},
    }


def no_columns(live: Live, mask_NT: Tensor) -> dict[str, Tensor]:
    """The same for a batch in which no rollout counts."""
    zero_N, zero_NT = torch.zeros_like(live.row_N).float(), torch.zeros_like(mask_NT).float()
    by_row = {"cp_row": live.row_N, "cp_group": live.group_N}
    return by_row | {"cp_reward": zero_N, "cp_advantage": zero_N, "cp_credit": zero_NT}


def gather_columns(trainer: CreditMixin, output: dict[str, Any]) -> dict[str, Any]:
    """Every column of all processes, rows in rank order, padded to the widest."""
    accelerator = trainer.accelerator
    out: dict[str, Any] = {}
    for name, value in output.items():
        if not isinstance(value, Tensor) or value.ndim == 0 or accelerator.num_processes == 1:
            out[name] = value
            continue
        # accelerate gives a padded bool column another type than one that needs no padding
        value = (value.long() if value.dtype == torch.bool else value).contiguous()
        if value.ndim > 1:
            value = accelerator.pad_across_processes(value, dim=1, pad_first=name in LEFT_PADDED)
        out[name] = accelerator.gather(value)
    return out


def whole_batch(trainer: CreditMixin, columns: dict[str, Any]) -> tuple[TokenBatch, Credit]:
    """The batch of all processes, from gathered columns."""
    batch = TokenBatch(
        token_ids_NT=columns["completion_ids"],
        mask_NT=loss_mask(columns),
        group_N=columns["cp_group"],
        reward_N=columns["cp_reward"],
        success_N=columns.get("cp_success"),
        sampler_logp_NT=columns["cp_sampler_logp"],
        entropy_NT=columns.get("cp_entropy"),
        ref_logp_NT=columns.get("ref_per_token_logps"),
        max_length=trainer.max_completion_length,
    )
    if "tool_mask" in columns or REWARD in columns:
        batch = add_turns(batch, columns)
    credit = Credit(columns["cp_advantage"], columns["cp_weight"], columns["cp_credit"], None, {})
    if "cp_turn_advantage" not in columns:
        return batch, credit
    played = turns(batch)
    advantage_NU = by_turn(columns["cp_turn_advantage"], played.turn_NT, played.mask_NU.shape[1])
    return batch, credit._replace(advantage_NU=advantage_NU)


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


def candidates(
    trainer: CreditMixin, setup: Setup, ids_NT: Tensor, mask_NT: Tensor, scores: Scores | None
) -> dict[str, Tensor]:
    """The K best candidates of each token, from the hidden states and the LM head."""
    assert scores is not None
    assert scores.hidden_NTD is not None
    parts = [part for rule in setup.method.rules for part in (rule, *rule.nested)]
    head, asked = head_of(trainer), [part.params.get("topk") for part in parts]
    best = head_scores(
        scores.hidden_NTD[mask_NT].to(head.weight_VD.dtype),
        ids_NT[mask_NT],
        head,
        temperature=trainer.temperature,
        topk=max([NUM_CANDIDATES, *(k for k in asked if k)]),
    )
    return {
        "topk_ids_NTK": _lay_out(best.topk_ids_MK, mask_NT),
        "topk_logp_NTK": _lay_out(best.topk_logp_MK, mask_NT),
    }


def _lay_out(value_MK: Tensor | None, mask_NT: Tensor) -> Tensor:
    """Values of the masked tokens at their places, 0 elsewhere."""
    assert value_MK is not None
    out_NTK = value_MK.new_zeros(*mask_NT.shape, value_MK.shape[1])
    return out_NTK.index_put(mask_NT.nonzero(as_tuple=True), value_MK)


def with_sampler(batch: TokenBatch, columns: dict[str, Any]) -> TokenBatch:
    """The batch as the ledger reads it: where a separate sampler (vLLM) told its log-probs, they
    are the sampler's, beside the trainer's.
    """
    if not _is_complete(columns):
        return batch
    told_NT = columns["sampling_per_token_logps"][:, : batch.mask_NT.shape[1]].float()
    return batch.replace(sampler_logp_NT=told_NT, trainer_logp_NT=batch.sampler_logp_NT)


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
