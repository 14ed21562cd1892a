"""Batches of all shapes and values through every method: finite numbers, or one line."""

from __future__ import annotations

import random
from typing import Any

import torch

import counterpoise as cp
from counterpoise.types import TokenBatch
from fuzz.mutate import fault

LOGP = (0.0, -1e-9, -0.1, -5.0, -80.0, -1e4)
REWARD = (0.0, 1.0, 0.5, -1.0, 2.0, 3.0, 1e-9, 1e6, -1e30)
OPTIONAL = (
    "entropy_NT",
    "hidden_NTD",
    "topk_ids_NTK",
    "ref_logp_NT",
    "teacher_logp_NT",
    "has_teacher_N",
    "segment_NT",
    "value_NT",
)
BAD = (float("nan"), float("inf"), -float("inf"), 3.0)


def fuzz(seed: int | str, num: int) -> dict[str, str]:
    """Faults of ``num`` batches under all methods, each with an example; empty is the goal."""
    faults: dict[str, str] = {}
    for case in range(num):
        for name in cp.methods():
            rng = random.Random(f"batches/{seed}/{case}")
            problem = fault(lambda name=name, rng=rng: through(name, rng))
            if problem:
                faults.setdefault(problem, f"case {seed}/{case}, method {name}")
    return faults


def through(name: str, rng: random.Random) -> None:
    """Credit, plan and losses of one batch; what comes out must be finite."""
    method, batch = cp.method(name), make_batch(rng)
    credit = method.assign(batch, method.init())
    plan = method.plan(batch, num_updates=rng.choice((1, 1, 2, 3)))
    for row_R in plan:
        logp_NT = trainer_logp(batch, rng)[row_R]
        rows = method.prepare(logp_NT, method.rows(batch, credit, row_R))
        loss = method.loss(logp_NT, rows)
        total = (loss.loss_NT * rows.scale_NT).sum()
        if not all(torch.isfinite(x).all() for x in (credit.credit_NT, loss.coef_NT, total)):
            raise AssertionError("not finite")


def trainer_logp(batch: TokenBatch, rng: random.Random) -> torch.Tensor:
    """Log-probs of a policy that is near, far away or very far away."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    noise_NT = torch.randn(batch.mask_NT.shape, generator=generator)
    return (batch.sampler_logp_NT + rng.choice((0, 0.1, 5, 150)) * noise_NT).clamp(max=0)


def make_batch(rng: random.Random) -> TokenBatch:
    """Ragged or full, few values or many, sometimes wrong in one place."""
    num, width = rng.choice((1, 2, 4, 4, 8, 8)), rng.choice((1, 2, 3, 7))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    token_ids_NT = torch.randint(0, rng.choice((1, 2, 9)), (num, width), generator=generator)
    length_N = torch.randint(0 if rng.random() < 0.1 else 1, width + 1, (num,), generator=generator)
    mask_NT = torch.arange(width) < length_N[:, None]
    if rng.random() < 0.3:  # tokens of an environment
        mask_NT = mask_NT & (torch.rand(num, width, generator=generator) > 0.3)
    groups = [rng.choice((0, 1, 5, -3)) for _ in range(num)]
    if rng.random() < 0.7:  # no rollout is alone
        groups = [groups[k // 4] for k in range(num)]
    rewards = REWARD[: rng.choice((2, 2, 8, 8, 9))]
    columns: dict[str, Any] = {
        "sampler_logp_NT": _column(rng, num, width),
        "entropy_NT": -_column(rng, num, width),
        "trainer_logp_NT": _column(rng, num, width),
        "ref_logp_NT": _column(rng, num, width),
        "ref_kl_NT": -_column(rng, num, width),
        "importance_NT": -_column(rng, num, width) - rng.choice((0, 1)),
        "hidden_NTD": torch.randn(num, width, 4, generator=generator) * rng.choice((0, 1, 1e4)),
        "topk_ids_NTK": torch.randint(0, 9, (num, width, 3), generator=generator),
        "topk_logp_NTK": -torch.rand(num, width, 3, generator=generator).sort().values,
        "head_VD": torch.randn(9, 4, generator=generator),
        "teacher_logp_NT": _column(rng, num, width),
        "has_teacher_N": torch.rand(num, generator=generator) > rng.choice((-1, 0.5, 2)),
    }
    columns |= _segments(mask_NT, rng)
    columns |= {
        "token_ids_NT": token_ids_NT,
        "mask_NT": mask_NT,
        "group_N": torch.tensor(groups),
        "reward_N": torch.tensor([rng.choice(rewards) for _ in groups]),
    }
    if rng.random() < 0.5:
        columns |= _turns(mask_NT, columns["reward_N"], rng)
    if rng.random() < 0.3:
        name = rng.choice(sorted(columns))
        columns[name] = spoil(columns[name], rng)
    if rng.random() < 0.2:
        del columns[rng.choice(OPTIONAL)]
    return TokenBatch(**columns, max_length=rng.choice((None, None, None, None, 7, 7, 7, 0)))


def _segments(mask_NT: torch.Tensor, rng: random.Random) -> dict[str, torch.Tensor]:
    """Stretches of every row, each with a value."""
    size = rng.choice((1, 2, 9))
    segment_NT = torch.where(mask_NT, (mask_NT.cumsum(1) - 1) // size, -1)
    value_NS = torch.tensor([[rng.choice(REWARD) for _ in range(9)] for _ in mask_NT])
    value_NT = torch.where(mask_NT, value_NS.gather(1, segment_NT.clamp(min=0)), 0)
    return {"segment_NT": segment_NT, "value_NT": value_NT}


def _turns(
    mask_NT: torch.Tensor, reward_N: torch.Tensor, rng: random.Random
) -> dict[str, torch.Tensor]:
    """Every run of a row's own tokens is a turn; the last one that was played has the reward, or
    each its share.
    """
    before_NT = torch.nn.functional.pad(mask_NT[:, :-1], (1, 0))
    turn_NT = torch.where(mask_NT, (mask_NT & ~before_NT).cumsum(1) - 1, -1)
    num_N = turn_NT.max(1).values + 1
    turn_mask_NU = torch.arange(max(int(num_N.max()), 1)) < num_N[:, None]
    is_last_NU = torch.arange(turn_mask_NU.shape[1]) == num_N[:, None] - 1
    share_NU = turn_mask_NU / num_N.clamp(min=1)[:, None]
    reward_NU = reward_N[:, None] * (is_last_NU if rng.random() < 0.5 else share_NU)
    states = [[rng.randrange(3) for _ in row] for row in turn_mask_NU.tolist()]
    scores = [[rng.choice((0.0, 0.5, float("nan"))) for _ in row] for row in states]
    return {
        "turn_NT": turn_NT,
        "turn_mask_NU": turn_mask_NU,
        "turn_reward_NU": reward_NU,
        "state_NU": torch.where(turn_mask_NU, torch.tensor(states), -1),
        "turn_score_NU": torch.tensor(scores),
    }


def _column(rng: random.Random, num: int, width: int) -> torch.Tensor:
    return torch.tensor([[rng.choice(LOGP) for _ in range(width)] for _ in range(num)])


def spoil(column: torch.Tensor, rng: random.Random) -> object:
    """A column that is wrong: its shape, its type, one value, or no tensor at all."""
    action = rng.choice(("shape", "type", "value", "value", "list", "none", "grad"))
    if action == "shape":
        return rng.choice((column[:-1], column[None], column.flatten(), column[..., :0]))
    if action == "type":
        return column.to(rng.choice((torch.float64, torch.bfloat16, torch.int32, torch.complex64)))
    if action == "value":
        out = column.clone().float()
        out.flatten()[rng.randrange(out.numel())] = rng.choice(BAD)
        return out
    if action == "grad":
        return column.float().requires_grad_()
    return column.tolist() if action == "list" else None
