"""Rules made of rules: keep_mass, even_mass, only_positive, only_negative, mix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import LOCAL, Reduce
from counterpoise.stage import Stage, call, declare
from counterpoise.types import TokenBatch


def nested_numbers(
    before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, *, rule: Stage, reduce: Reduce = LOCAL
) -> dict[str, Tensor]:
    """The numbers of the rule inside, taken on the outer result."""
    if rule.report is None:
        return {}
    return call(rule.report, before_NT, after_NT, batch, reduce=reduce, **rule.settings)


def _gives_turns(*, rule: Stage | None = None) -> bool:
    return isinstance(rule, Stage) and rule.has("assigns_turns")


@declare(report=nested_numbers, assigns_turns=_gives_turns)
def keep_mass(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    rule: Stage,
    per_side: bool = False,
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Any rule, rescaled so that the batch keeps its mass sum|credit|.

    credit' = z * rule(credit), z = sum|credit| / sum|rule(credit)| over all tokens of all ranks

    So a rule that drops tokens moves credit instead of shrinking the update. Keeps the mass by
    construction, and the sign if the rule does. Where the rule leaves nothing, nothing is rescaled.

    Args:
        credit_NT: [N, T].
        rule: a bound credit rule.
        per_side: one z for positive and one for negative credit; each side keeps its own mass.

    >>> from counterpoise.credit import negative_token_filter
    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3]], group=[0], reward=[0.0], sampler_logp=[[-0.1, -4.0, -0.2]]
    ... )
    >>> keep_mass(rule=negative_token_filter(fraction=0.1))(
    ...     torch.full((1, 3), -0.5), batch
    ... ).tolist()
    [[0.0, -1.5, 0.0]]
    """
    check_rule("keep_mass", rule)
    after_NT = call(rule, credit_NT, batch, reduce=reduce, generator=generator)
    if not per_side:
        return after_NT * _factor(credit_NT.abs(), after_NT.abs(), reduce)
    positive = _factor(credit_NT.clamp(min=0), after_NT.clamp(min=0), reduce)
    negative = _factor(credit_NT.clamp(max=0), after_NT.clamp(max=0), reduce)
    return after_NT * torch.where(after_NT > 0, positive, negative)


def _factor(wanted_NT: Tensor, there_NT: Tensor, reduce: Reduce) -> Tensor:
    """Mass that is wanted / mass that is there; 1 where there is none."""
    wanted, there = reduce.sum(wanted_NT.sum()), reduce.sum(there_NT.sum())
    return torch.where(there == 0, 1, wanted / torch.where(there == 0, 1, there))


@Stage
def even_mass(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    rule: Stage,
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The control of a rule: the mass that it leaves on each side, without its choice of tokens.

    credit' = credit * sum|rule(credit)| / sum|credit|, once over the positive credit of all ranks
    and once over the negative

    What a rule does beyond its control comes from where it puts credit, not from how much of it
    there is. Keeps the sign, and the mass of each side if the rule does.

    Args:
        credit_NT: [N, T].
        rule: a bound credit rule, for example ``soften_negatives()``.

    >>> from counterpoise.credit import negative_token_filter
    >>> batch = TokenBatch.from_lists(
    ...     [[1, 2, 3, 4]], group=[0], reward=[0.0], sampler_logp=[[-0.1, -4.0, -0.2, -0.1]]
    ... )
    >>> even_mass(rule=negative_token_filter(fraction=0.1))(
    ...     torch.full((1, 4), -1.0), batch
    ... ).tolist()
    [[-0.25, -0.25, -0.25, -0.25]]
    """
    check_rule("even_mass", rule)
    after_NT = call(rule, credit_NT, batch, reduce=reduce, generator=generator)
    positive, negative = (
        _factor(after, before, reduce)
        for after, before in (
            (after_NT.clamp(min=0), credit_NT.clamp(min=0)),
            (after_NT.clamp(max=0), credit_NT.clamp(max=0)),
        )
    )
    return credit_NT * torch.where(credit_NT > 0, positive, negative)


@declare(report=nested_numbers)
def only_positive(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    rule: Stage,
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A rule's result on tokens of positive credit; the others are unchanged, bit for bit.

    The rule sees the credit of both signs.

    >>> from counterpoise.credit import probability_scaled
    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-30.0], [-30.0]]
    ... )
    >>> only_positive(rule=probability_scaled(alpha=0.5))(
    ...     torch.tensor([[1.0], [-1.0]]), batch
    ... ).tolist()
    [[0.5], [-1.0]]
    """
    check_rule("only_positive", rule)
    return torch.where(
        credit_NT > 0, call(rule, credit_NT, batch, reduce=reduce, generator=generator), credit_NT
    )


@declare(report=nested_numbers)
def only_negative(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    rule: Stage,
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A rule's result on tokens of negative credit; the others are unchanged, bit for bit.

    The rule sees the credit of both signs.

    >>> from counterpoise.credit import probability_scaled
    >>> batch = TokenBatch.from_lists(
    ...     [[1], [2]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-30.0], [-30.0]]
    ... )
    >>> only_negative(rule=probability_scaled(alpha=0.5))(
    ...     torch.tensor([[1.0], [-1.0]]), batch
    ... ).tolist()
    [[1.0], [-0.5]]
    """
    check_rule("only_negative", rule)
    return torch.where(
        credit_NT < 0, call(rule, credit_NT, batch, reduce=reduce, generator=generator), credit_NT
    )


def _parts(
    credit_NT: Tensor,
    batch: TokenBatch,
    rules: Sequence[Stage],
    reduce: Reduce,
    generator: torch.Generator | None,
) -> list[Tensor]:
    """What each rule makes of the same credit."""
    return [call(rule, credit_NT, batch, reduce=reduce, generator=generator) for rule in rules]


def _part_numbers(
    before_NT: Tensor,
    after_NT: Tensor,
    batch: TokenBatch,
    *,
    rules: Sequence[Stage],
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Mass and own numbers of every part, before its weight."""
    numbers: dict[str, Tensor] = {}
    parts = _parts(before_NT, batch, rules, reduce, generator)
    for k, (rule, part_NT) in enumerate(zip(rules, parts, strict=True)):
        own = {"mass": reduce.sum(torch.where(batch.mask_NT, part_NT, 0).abs().sum())}
        own |= nested_numbers(before_NT, part_NT, batch, rule=rule, reduce=reduce)
        numbers |= {f"{k}_{rule.name}/{key}": value for key, value in own.items()}
    return numbers


def _all_by_turn(*, rules: Sequence[Stage] = ()) -> bool:
    """One number per turn: some rule gives it, and no other tells tokens of a turn apart."""
    gives = [_gives_turns(rule=rule) for rule in rules]
    return any(gives) and all(
        turn or rule.has("reads_rewards_only") for turn, rule in zip(gives, rules)
    )


def _all_by_rollout(*, rules: Sequence[Stage] = ()) -> bool:
    return all(isinstance(rule, Stage) and rule.has("reads_rewards_only") for rule in rules)


@declare(report=_part_numbers, assigns_turns=_all_by_turn, reads_rewards_only=_all_by_rollout)
def mix(
    credit_NT: Tensor,
    batch: TokenBatch,
    *,
    rules: Sequence[Stage],
    weights: Sequence[float],
    reduce: Reduce = LOCAL,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Several rules side by side: each gets the same credit, and their results are added.

    credit' = sum_k weight_k * rule_k(credit)

    With ``uniform`` among the rules, that part is the advantage itself: ``mix(rules=(uniform, a),
    weights=(l, 1 - l))`` is l * GRPO + (1 - l) * a. The scales of the parts may differ: ``mass``
    of every part (sum|credit| before its weight) is logged. Keeps the sign if every rule does and
    no weight is negative; does not keep the mass.

    Args:
        credit_NT: [N, T].
        rules: bound credit rules without memory, one or more.
        weights: one number per rule; they need not sum to 1.

    Reference: SDPO, arXiv 2601.20802, section 4.5 (0.9 on GRPO for a small model). Equal to mixing
        losses only where both terms have the same loss and denominator.

    >>> from counterpoise.credit import negative_mass, uniform
    >>> batch = TokenBatch.from_lists([[1]], group=[0], reward=[0.0], sampler_logp=[[-1.0]])
    >>> mix(rules=(uniform, negative_mass(factor=0.5)), weights=(0.25, 0.75))(
    ...     torch.tensor([[-1.0]]), batch
    ... ).tolist()
    [[-0.625]]
    """
    _check_mix(rules, weights)
    parts = _parts(credit_NT, batch, rules, reduce, generator)
    mixed_NT = torch.zeros_like(credit_NT)
    for weight, part_NT in zip(weights, parts, strict=True):
        mixed_NT = mixed_NT + weight * part_NT
    return mixed_NT


def _check_mix(rules: object, weights: object) -> None:
    """As many numbers as rules, each a bound credit rule without memory."""
    if not isinstance(rules, (list, tuple)) or not rules:
        raise ValueError(f"mix: rules must be a list of one or more credit rules, got {rules!r}.")
    for rule in rules:
        check_rule("mix", rule)
    if not isinstance(weights, (list, tuple)) or len(weights) != len(rules):
        raise ValueError(
            f"mix: weights must be a list of {len(rules)} numbers, one per rule, got {weights!r}."
        )
    for k, weight in enumerate(weights):
        check_number("mix", **{f"weights[{k}]": weight})


def check_rule(stage: str, rule: object) -> None:
    """``rule`` must be a bound credit rule without memory."""
    if isinstance(rule, Stage) and rule.init:
        raise ValueError(
            f"{stage}: a rule with memory cannot be nested; put it on the credit axis by itself."
        )
    if not callable(rule):
        raise ValueError(
            f"{stage}: rule must be a credit rule such as top_entropy(fraction=0.2), got {rule!r}"
        )
