"""The chain of credit rules: each result is checked, and what each rule did is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.catalogue.returned import check_returned, kind, path
from counterpoise.credit import RULES
from counterpoise.maths.concentration import concentration
from counterpoise.maths.reduce import Reduce, check_finite, masked_mean
from counterpoise.maths.turns import by_turn, turns
from counterpoise.stage import Stage, call
from counterpoise.types import TokenBatch


class Chain(NamedTuple):
    """Credit after the last rule, its share of the advantage, the advantage of turns if a rule
    tells them apart, the state of every rule, and their numbers to log.
    """

    credit_NT: Tensor
    weight_NT: Tensor
    advantage_NU: Tensor | None
    states: list[Any]
    metrics: dict[str, float]


def apply_rules(
    rules: Sequence[Stage],
    advantage_N: Tensor,
    batch: TokenBatch,
    states: Sequence[Any],
    *,
    reduce: Reduce,
    generators: Sequence[torch.Generator],
    report: bool = True,
) -> Chain:
    """Every rule on the credit that the one before it gave, the first on the advantage of each
    rollout; numbers only with ``report``.
    """
    metrics, after, advantage_NU = {}, [], None
    credit_NT, advantage_NT = torch.where(batch.mask_NT, advantage_N[:, None], 0), None
    for rule, state, generator in zip(rules, states, generators, strict=True):
        before_NT, memory = credit_NT, () if rule.init is None else (state,)
        drawn_from = generator.get_state()
        out = call(rule, *memory, credit_NT, batch, reduce=reduce, generator=generator)
        credit_NT, new_state = _with_state(rule, out) if memory else (out, None)
        after.append(new_state)
        credit_NT = _check_credit(rule, credit_NT, batch.mask_NT)
        if rule.has("assigns_turns"):
            advantage_NT, advantage_NU = credit_NT, _turn_advantage(credit_NT, batch)
        if report:
            offers = {
                "state": new_state,
                "reduce": reduce,
                "generator": generator.set_state(drawn_from),  # a report may draw as its rule did
            }
            metrics |= _rule_metrics(rule, before_NT, credit_NT, batch, offers)
    if report:
        shape = concentration(credit_NT, batch.mask_NT, reduce)
        metrics |= {f"credit/{key}": float(value) for key, value in shape.items()}
    against_NT = advantage_N[:, None] if advantage_NT is None else advantage_NT
    weight_NT = weight(credit_NT, against_NT, batch.mask_NT)
    return Chain(credit_NT, weight_NT, advantage_NU, after, metrics)


def weight(credit_NT: Tensor, advantage_NT: Tensor, mask_NT: Tensor) -> Tensor:
    """credit / advantage; 1 on model tokens whose advantage is 0, 0 elsewhere.

    ``advantage_NT`` is [N, 1], one number per rollout, or [N, T], that of each token's turn."""
    is_zero_NT = advantage_NT == 0
    weight_NT = torch.where(is_zero_NT, 1, credit_NT / torch.where(is_zero_NT, 1, advantage_NT))
    return torch.where(mask_NT, weight_NT, 0)


def check_order(rules: Sequence[Stage]) -> None:
    """A rule that gives one number per turn comes before those that tell tokens of a turn apart,
    one that reads no credit before all others.
    """
    names: list[str] = []
    for k, rule in enumerate(rules):
        if rule.has("replaces_credit") and k:
            raise ValueError(
                f"credit: {rule.name} reads no credit, so that what {rules[k - 1].name} gives would"
                f" be lost. Put {rule.name} first, or both into mix."
            )
        if rule.has("assigns_turns") and names:
            raise ValueError(
                f"credit: {rule.name} gives one number per turn and comes first, got it after"
                f" {', '.join(names)}. Put {rule.name} before."
            )
        if not rule.has("assigns_turns") and not rule.has("reads_rewards_only"):
            names.append(rule.name)


def _turn_advantage(credit_NT: Tensor, batch: TokenBatch) -> Tensor:
    played = turns(batch)
    return by_turn(credit_NT, played.turn_NT, played.mask_NU.shape[1])


def _with_state(rule: Stage, out: Any) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise ValueError(
            f"credit rule {path(RULES, rule)} returned {kind(out)}, expected (credit_NT, state): it"
            " has memory (init=)."
        )
    return out


def _check_credit(rule: Stage, credit_NT: Any, mask_NT: Tensor) -> Tensor:
    where = f"credit rule {path(RULES, rule)}"
    check_returned(where, credit_NT, mask_NT.shape, "one number per token")
    check_finite(where, credit_NT, mask_NT)
    return torch.where(mask_NT, credit_NT, 0)


def _rule_metrics(
    rule: Stage, before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, offers: dict[str, Any]
) -> dict[str, float]:
    """What a rule did: share of credited tokens kept, mass sum|credit| after / before, log-prob of
    kept and dropped; then its own report.
    """
    reduce: Reduce = offers["reduce"]
    had_NT, has_NT = (before_NT != 0) & batch.mask_NT, (after_NT != 0) & batch.mask_NT
    mass_before, mass_after = reduce.sum(before_NT.abs().sum()), reduce.sum(after_NT.abs().sum())
    metrics = {
        "kept_frac": masked_mean(has_NT.to(before_NT.dtype), had_NT, reduce),
        "mass_ratio": mass_after / mass_before if mass_before > 0 else torch.ones(()),
        "kept_logp": masked_mean(batch.sampler_logp_NT, had_NT & has_NT, reduce),
        "dropped_logp": masked_mean(batch.sampler_logp_NT, had_NT & ~has_NT, reduce),
    }
    if rule.report:
        metrics |= call(rule.report, before_NT, after_NT, batch, **offers, **rule.settings)
    return {f"credit/{rule.name}/{key}": float(value) for key, value in metrics.items()}


def advantage_metrics(stage: Stage, batch: TokenBatch, reduce: Reduce) -> dict[str, float]:
    """The own numbers of an advantage, if it has any."""
    if stage.report is None:
        return {}
    numbers = call(stage.report, batch, reduce=reduce, **stage.settings)
    return {f"advantage/{stage.name}/{key}": float(value) for key, value in numbers.items()}
