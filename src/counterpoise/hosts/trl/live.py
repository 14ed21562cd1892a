"""Which rollouts count: those with a reward, with a token of the model, and with a peer where the
method compares rollouts of a prompt. TRL trains on with the others, and so do we: they are in no
statistic and no plan, and their credit is 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.hosts.trl.method import Setup
from counterpoise.maths.reduce import groups

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

FILLER = -1  # the number of a row that is not trained on


class Live(NamedTuple):
    """The rows of this process.

    Attributes:
        row_N: number among the rollouts of all processes that count, ``FILLER`` for another one.
        group_N: number of the prompt.
        count_W: rollouts that count, by process.
    """

    row_N: Tensor
    group_N: Tensor
    count_W: list[int]

    @property
    def left_out_frac(self) -> float:
        return 1 - sum(self.count_W) / (len(self.count_W) * len(self.row_N))

    def spread(self, value_R: Tensor, row_R: Tensor, width: int | None = None) -> Tensor:
        """Values of the rollouts ``row_R`` on this process's rows, 0 on those that do not count."""
        value_R = value_R if width is None else value_R[:, :width]
        out_N = value_R.new_zeros((len(self.row_N), *value_R.shape[1:]))
        is_live_N = self.row_N != FILLER
        out_N[is_live_N] = value_R[self.row_N[is_live_N] - row_R[0]]
        return out_N


def loss_mask(output: dict[str, Any]) -> Tensor:
    """True on the tokens that TRL trains on: no padding, no tokens of a tool."""
    mask_NT = output["completion_mask"]
    return (mask_NT * output["tool_mask"] if "tool_mask" in output else mask_NT).bool()


def places(trainer: CreditMixin, num_rows: int) -> tuple[Tensor, Tensor]:
    """The number of each row of this process among those of all, and of its prompt."""
    first = trainer.accelerator.process_index * num_rows
    place_N = torch.arange(first, first + num_rows, device=trainer.accelerator.device)
    return place_N, place_N // trainer.num_generations


def live_rows(trainer: CreditMixin, setup: Setup, mask_NT: Tensor, reward_N: Tensor) -> Live:
    """Number the rollouts that count, over all processes in rank order."""
    accelerator, num_rows = trainer.accelerator, len(mask_NT)
    place_N, group_N = places(trainer, num_rows)
    is_live_N = mask_NT.any(1) & reward_N.isfinite()
    if setup.method.needs_groups:
        by_prompt = groups(group_N)
        is_live_N &= (by_prompt.sum(is_live_N.long()) > 1)[by_prompt.index_N]
    count_C = accelerator.gather(is_live_N.long())
    row_N = torch.where(is_live_N, (count_C.cumsum(0) - 1)[place_N], FILLER)
    return Live(row_N, group_N, count_C.reshape(-1, num_rows).sum(1).tolist())


def live_columns(columns: dict[str, Any]) -> dict[str, Any]:
    """Of gathered columns, the rows that count."""
    is_live_C = columns["cp_row"] != FILLER
    if is_live_C.all():
        return columns
    return {
        name: value[is_live_C] if isinstance(value, Tensor) and value.ndim else value
        for name, value in columns.items()
    }
