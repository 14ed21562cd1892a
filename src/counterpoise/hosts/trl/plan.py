"""The plan instead of TRL's shuffle: which rows each micro-batch of each process holds.

A batch (TRL: a generation) is ``steps_per_generation`` micro-batches per process;
``gradient_accumulation_steps`` of them make an update. The plan decides which rows share an update,
over all processes. Within an update rows are dealt evenly over processes and micro-batches, and
micro-batches are filled up to one size with rows that are masked out (no credit, no loss, no
count).
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.hosts.trl.live import FILLER
from counterpoise.hosts.trl.method import Setup
from counterpoise.plans import manifest, random_rows
from counterpoise.types import Credit, Plan, Rows, TokenBatch

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

# TRL's loss types that give each row of a micro-batch the same weight; the others weigh tokens
ROW_MEANS = ("grpo", "sapo", "dr_grpo", "luspo")


class UpdateRows(NamedTuple):
    """An update over all processes: its rows, and which of them lies in which slot.

    Attributes:
        rows: columns of the update's rows, in the plan's order.
        slot_WGB: [processes, micro-batches, rows] position in ``rows``, ``FILLER`` for a row that
            only fills up.
    """

    rows: Rows
    slot_WGB: Tensor

    @property
    def num_rows(self) -> int:
        """Rows that are trained on."""
        return int((self.slot_WGB != FILLER).sum())


def num_updates(trainer: CreditMixin) -> int:
    """Updates of one batch (of one pass over it)."""
    return max(1, trainer.args.steps_per_generation // trainer.args.gradient_accumulation_steps)


def check_room(trainer: CreditMixin, plan: Plan) -> None:
    """Updates that are far larger than TRL's would be a surprise for the memory."""
    room = trainer.args.generation_batch_size // num_updates(trainer)
    largest = max(len(row_R) for row_R in plan)
    if largest > room:
        warnings.warn(
            f"the plan's largest update has {largest} rows where TRL's has {room}: its"
            " micro-batches are larger.",
            stacklevel=2,
        )


def live_plan(trainer: CreditMixin, setup: Setup, batch: TokenBatch, batch_number: int) -> Plan:
    """The method's plan; where fewer prompts (or rollouts) count than there are updates, it has
    fewer updates.
    """
    whole = setup.method.planner.has("keeps_prompts_whole")
    room = len(batch.group_N.unique()) if whole else batch.num_rollouts
    return setup.method.plan(
        batch, min(num_updates(trainer), room), seed=trainer.args.seed, batch_number=batch_number
    )


def deal_updates(
    trainer: CreditMixin, setup: Setup, batch: TokenBatch, credit: Credit, plan: Plan
) -> list[UpdateRows]:
    """Every update of a batch, dealt over processes and micro-batches.

    Updates for which the plan has no rows hold a row that only fills up.
    """
    shape = (trainer.accelerator.num_processes, trainer.args.gradient_accumulation_steps)
    row_0 = torch.zeros(1, dtype=torch.long)
    empty = [UpdateRows(setup.method.rows(batch, credit, row_0), deal(0, *shape))]
    return [
        UpdateRows(setup.method.rows(batch, credit, row_R), deal(len(row_R), *shape))
        for row_R in plan
    ] + empty * (num_updates(trainer) - len(plan))


def deal(num_rows: int, num_processes: int, num_micro: int) -> Tensor:
    """Positions 0 .. num_rows - 1, evenly over processes and micro-batches, all of one size.

    >>> deal(5, num_processes=2, num_micro=1).tolist()
    [[[0, 1, 2]], [[3, 4, -1]]]
    """
    parts = torch.arange(num_rows).tensor_split(num_processes * num_micro)
    slot_CB = torch.full((len(parts), max(1, len(parts[0]))), FILLER)
    for cut, part in zip(slot_CB, parts):
        cut[: len(part)] = part
    return slot_CB.reshape(num_processes, num_micro, -1)


def trl_plan(trainer: CreditMixin, batch: TokenBatch, batch_number: int) -> Plan:
    """What TRL's own shuffle did, as a plan to audit."""
    row_C = torch.cat([micro["cp_row"] for micro in trainer._buffered_inputs])
    row_WSR = (
        trainer.accelerator.gather(row_C.contiguous())
        .reshape(trainer.accelerator.num_processes, num_updates(trainer), -1)
        .cpu()
    )
    every = [row_WSR[:, update].flatten().sort().values for update in range(row_WSR.shape[1])]
    updates = [row_R[row_R != FILLER] for row_R in every]
    facts = {"plan": {"name": random_rows.name}, "seed": trainer.args.seed, "batch": batch_number}
    return Plan(tuple(updates), manifest(updates, batch.group_N.cpu()) | facts)


def micro_batches(
    trainer: CreditMixin, columns: dict[str, Any], updates: list[UpdateRows]
) -> list[dict[str, Any]]:
    """This process's share of the batch, in the form of TRL's buffer."""
    held = [update.rows.mask_NT.sum() for update in updates if update.num_rows]
    num_items = torch.stack(held).sum()
    rank, out = trainer.accelerator.process_index, []
    for update in updates:
        factor = (
            update.slot_WGB.numel() / update.num_rows
            if trainer.loss_type in ROW_MEANS and update.num_rows
            else 1.0
        )
        for slot_B in update.slot_WGB[rank]:
            micro = _micro_batch(columns, update, slot_B, factor)
            if "num_items_in_batch" in micro:
                micro["num_items_in_batch"] = num_items.to(micro["num_items_in_batch"])
            out.append(micro)
    return out


def _micro_batch(
    columns: dict[str, Any], update: UpdateRows, slot_B: Tensor, factor: float
) -> dict[str, Any]:
    slot_B = slot_B.to(update.rows.row_R.device)
    is_real_B, pick_B = slot_B != FILLER, slot_B.clamp(min=0)
    row_B = update.rows.row_R[pick_B]
    micro = {
        name: value[row_B] if isinstance(value, Tensor) and value.ndim else value
        for name, value in columns.items()
    }
    for name in ("completion_mask", "tool_mask", "advantages"):
        if name in micro:
            micro[name] = torch.where(
                is_real_B if micro[name].ndim == 1 else is_real_B[:, None], micro[name], 0
            )
    if factor != 1.0:
        micro["advantages"] = micro["advantages"] * factor
        micro["cp_factor"] = factor
    micro["cp_row"] = torch.where(is_real_B, row_B, FILLER)
    micro["cp_rows"] = mask_rows(update.rows.select(pick_B), is_real_B)
    return micro


def mask_rows(rows: Rows, is_real_B: Tensor) -> Rows:
    """Rows of which the fillers have no token."""
    real_B1 = is_real_B[:, None]
    columns = {
        name: torch.where(real_B1, getattr(rows, name), 0) for name in ("credit_NT", "scale_NT")
    }
    return rows._replace(mask_NT=rows.mask_NT & real_B1, **columns)


def in_plan_order(value_C: Tensor, slot_WGB: Tensor) -> Tensor:
    """Rows in slot order (processes, micro-batches, rows) brought into the plan's order, fillers
    left out.

    >>> in_plan_order(torch.tensor([10, 11, 12, 13, 14, 99]), deal(5, 2, 1)).tolist()
    [10, 11, 12, 13, 14]
    """
    flat_C = slot_WGB.flatten().to(value_C.device)
    is_real_C = flat_C != FILLER
    out_R = value_C.new_zeros((int(is_real_C.sum()), *value_C.shape[1:]))
    out_R[flat_C[is_real_C]] = value_C[is_real_C]
    return out_R
