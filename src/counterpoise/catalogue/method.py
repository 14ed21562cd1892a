"""Method: a point on the six axes.

``method("dapo", plan="query_preserved")`` starts from a preset and changes axes.

The data's way::

    out = method.assign(batch)                                  # Credit
    for batch in method.plan(batch, num_updates=4, seed=0):        # rows of each update
        rows = method.rows(batch, out, batch)                    # Rows: the batch's columns with scale_NT
        loss = method.loss(trainer_logp_NT, rows)               # TokenLoss; rows.select(...) for a micro-batch
        (loss.loss_NT * rows.scale_NT).sum().backward()

A loss that must see the whole batch before it is cut (``method.needs_update_logp``) gets it by
``rows = method.prepare(update_logp_NT, rows)`` with the no-grad log-probs of all the batch's rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from counterpoise.catalogue.registry import FAMILIES
from counterpoise.errors import nearest
from counterpoise.maths.reduce import LOCAL, Reduce, check_finite, masked_mean, seeded_generator
from counterpoise.plans import manifest
from counterpoise.stage import Stage, Stateful, base, bound, build, call, describe, needs_of, rebind
from counterpoise.types import Credit, Plan, Rows, TokenBatch, TokenLoss

# axis -> field of Method
AXES = {
    "advantage": "advantage",
    "credit": "rules",
    "loss": "terms",
    "reduction": "reduction",
    "plan": "planner",
    "controller": "controller",
}


@dataclasses.dataclass(frozen=True)
class Method:
    """A point on six independent axes; make one with ``counterpoise.method``.

    Attributes:
        advantage: (reward_N, group_N) -> advantage_N.
        rules: the credit axis, (credit_NT, batch) -> credit_NT, applied in order.
        terms: the loss axis, (trainer_logp_NT, rows) -> TokenLoss, added up.
        reduction: (mask_NT, credit_NT, advantage_N) -> scale_NT.
        planner: (group_N, reward_N, length_N) -> rows of each update.
        controller: state over batches that sets parameters of the advantage and of the first rule.
    """

    name: str
    advantage: Stage
    rules: tuple[Any, ...]
    terms: tuple[Stage, ...]
    reduction: Stage
    planner: Stage
    controller: Stateful | None = None
    reference: str = ""
    summary: str = ""

    @property
    def stages(self) -> list[Any]:
        """All stages, in the data's order."""
        last = [self.controller] if self.controller else []
        return [self.advantage, *self.rules, *self.terms, self.reduction, self.planner, *last]

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """Optional columns that some stage reads: known before any forward."""
        return frozenset().union(*(needs_of(stage) for stage in self.stages))

    @property
    def needs_update_logp(self) -> bool:
        """Whether ``prepare`` must see the log-probs of a whole update before it is cut."""
        return any(base(term).prepare for term in self.terms)

    def init(self) -> dict[str, Any]:
        """The state before the first batch; JSON."""
        return {
            "controller": self.controller.init() if self.controller else None,
            "rules": [rule.init() if isinstance(rule, Stateful) else None for rule in self.rules],
        }

    def assign(
        self,
        batch: TokenBatch,
        state: dict[str, Any] | None = None,
        *,
        reduce: Reduce = LOCAL,
        seed: int = 0,
        batch_number: int = 0,
    ) -> Credit:
        """Credit of every token: the advantage, then the chain of rules.

        Args:
            batch: the whole batch (of this rank), before any cut.
            state: what the last call returned, None at the start.
            reduce: pools statistics over ranks (``counterpoise.over_ranks()``).
            seed, batch: rules that draw at random derive their generator from them.
        """
        self._check_columns(batch)
        state = self.init() if state is None else state
        controlled, controller_state, metrics = self._controlled(batch, state, reduce)
        advantage_N = call(controlled.advantage, batch.reward_N, batch.group_N, reduce=reduce)
        check_finite(
            f"advantage {base(self.advantage).__name__}",
            advantage_N,
            torch.ones_like(advantage_N, dtype=torch.bool),
        )
        credit_NT, rule_states = torch.where(batch.mask_NT, advantage_N[:, None], 0), []
        for k, rule in enumerate(controlled.rules):
            before_NT, offers = (
                credit_NT,
                {
                    "reduce": reduce,
                    "generator": seeded_generator(seed, batch_number, f"credit/{k}"),
                },
            )
            credit_NT, rule_state = _applied(rule, state["rules"][k], credit_NT, batch, offers)
            rule_states.append(rule_state)
            credit_NT = _checked(base(rule).__name__, credit_NT, batch.mask_NT)
            metrics |= _rule_metrics(rule, before_NT, credit_NT, batch, reduce)
        return Credit(
            advantage_N=advantage_N,
            weight_NT=_weight(credit_NT, advantage_N, batch.mask_NT),
            credit_NT=credit_NT,
            state={"controller": controller_state, "rules": rule_states},
            metrics=metrics,
        )

    def plan(
        self, batch: TokenBatch, num_updates: int, seed: int = 0, batch_number: int = 0
    ) -> Plan:
        """Which rollouts share an update.

        Ranks and micro-batches are cut later (``shard``) and change nothing.
        """
        if num_updates < 1:
            raise ValueError(f"plan: num_updates must be at least 1, got {num_updates}.")
        group_N, reward_N, length_N = (
            batch.group_N.cpu(),
            batch.reward_N.cpu(),
            batch.length_N.cpu(),
        )
        updates = call(
            self.planner,
            group_N,
            reward_N,
            length_N,
            num_updates=num_updates,
            generator=seeded_generator(seed, batch_number, "plan"),
        )
        return Plan(
            tuple(updates),
            manifest(updates, group_N)
            | {
                "plan": describe(FAMILIES["plan"], self.planner),
                "seed": seed,
                "batch": batch_number,
            },
        )

    def rows(
        self, batch: TokenBatch, credit: Credit, row_R: Tensor, *, reduce: Reduce = LOCAL
    ) -> Rows:
        """The columns of one update, with the reduction taken over the whole of it."""
        row_R = row_R.to(batch.mask_NT.device)
        mask_NT, credit_NT, advantage_N = (
            batch.mask_NT[row_R],
            credit.credit_NT[row_R],
            credit.advantage_N[row_R],
        )
        return Rows(
            row_R=row_R,
            mask_NT=mask_NT,
            group_N=batch.group_N[row_R],
            reward_N=batch.reward_N[row_R],
            advantage_N=advantage_N,
            credit_NT=credit_NT,
            sampler_logp_NT=batch.sampler_logp_NT[row_R],
            scale_NT=call(
                self.reduction,
                mask_NT,
                credit_NT,
                advantage_N,
                reduce=reduce,
                max_length=batch.max_length,
            ),
            ref_logp_NT=None if batch.ref_logp_NT is None else batch.ref_logp_NT[row_R],
        )

    def prepare(self, update_logp_NT: Tensor, rows: Rows) -> Rows:
        """What a loss must know of the whole batch, from the detached log-probs of all its rows; for
        other losses nothing changes.
        """
        for term in self.terms:
            if base(term).prepare:
                rows = rows._replace(
                    update_NT=base(term).prepare(update_logp_NT.detach(), rows, **bound(term))
                )
        return rows

    def loss(self, trainer_logp_NT: Tensor, rows: Rows) -> TokenLoss:
        """The loss of every token: the sum of the terms; ratio and clip are those of the first."""
        check_finite("trainer_logp_NT", trainer_logp_NT.detach(), rows.mask_NT, rows.row_R)
        first, *others = [term(trainer_logp_NT, rows) for term in self.terms]
        for term in others:
            first = first._replace(
                loss_NT=first.loss_NT + term.loss_NT, coef_NT=first.coef_NT + term.coef_NT
            )
        return first

    def describe(self) -> dict[str, Any]:
        """The mapping from which ``counterpoise.method(**mapping)`` makes this method again; JSON."""
        out: dict[str, Any] = {"name": self.name}
        for axis, field in AXES.items():
            value = getattr(self, field)
            many = isinstance(value, tuple) and not isinstance(value, Stateful)
            out[axis] = (
                [describe(FAMILIES[axis], stage) for stage in value]
                if many
                else value and describe(FAMILIES[axis], value)
            )
        return out

    def _controlled(
        self, batch: TokenBatch, state: dict[str, Any], reduce: Reduce
    ) -> tuple[Method, Any, dict[str, float]]:
        if self.controller is None:
            return self, None, {}
        control = call(self.controller.apply, state["controller"], batch, reduce=reduce)
        name = base(self.controller).__name__
        metrics = {
            f"controller/{name}/{key}": float(value) for key, value in control.metrics.items()
        }
        return change_axes(self, control.settings), control.state, metrics

    def _check_columns(self, batch: TokenBatch) -> None:
        for stage in self.stages:
            for column in sorted(needs_of(stage)):
                try:
                    batch.column(column)
                except ValueError as missing:
                    raise ValueError(f"{base(stage).__name__} reads {column}. {missing}") from None


def change_axes(method: Method, axes: dict[str, Any]) -> Method:
    """A method with some axes changed.

    A name, a mapping with ``name``, a function or a list of them replaces the axis; a mapping
    without ``name`` changes parameters of the stage that is there (of the first one, where there
    are several)."""
    fields: dict[str, Any] = {}
    for axis, spec in axes.items():
        if axis not in AXES:
            raise ValueError(f"method: unknown axis {axis!r}. {nearest(axis, AXES)}")
        fields[AXES[axis]] = _axis(axis, spec, getattr(method, AXES[axis]))
    return dataclasses.replace(method, **fields)


def _axis(axis: str, spec: Any, current: Any) -> Any:
    known = FAMILIES[axis]
    if axis in ("credit", "loss"):
        if isinstance(spec, dict) and "name" not in spec:
            if not current:
                raise ValueError(
                    f"method: {axis} has no stage whose parameters {sorted(spec)} could change;"
                    " give a list of stages."
                )
            return (rebind(current[0], spec), *current[1:])
        stages = tuple(
            build(f"{axis} rule" if axis == "credit" else axis, known, one)
            for one in _as_list(spec)
        )
        if axis == "loss" and not stages:
            raise ValueError("method: the loss axis needs at least one term.")
        return stages
    if spec is None and axis == "controller":
        return None
    if isinstance(spec, dict) and "name" not in spec:
        return rebind(current, spec)
    return build(axis, known, spec)


def _as_list(spec: Any) -> list[Any]:
    if spec is None:
        return []
    return (
        list(spec) if isinstance(spec, (list, tuple)) and not isinstance(spec, Stateful) else [spec]
    )


def _applied(
    rule: Any, state: Any, credit_NT: Tensor, batch: TokenBatch, offers: dict[str, Any]
) -> tuple[Tensor, Any]:
    if isinstance(rule, Stateful):
        return call(rule.apply, state, credit_NT, batch, **offers)
    return call(rule, credit_NT, batch, **offers), None


def _checked(name: str, credit_NT: Tensor, mask_NT: Tensor) -> Tensor:
    if credit_NT.shape != mask_NT.shape:
        raise ValueError(
            f"credit rule {name} returned shape {list(credit_NT.shape)}, expected"
            f" {list(mask_NT.shape)}: one number a token."
        )
    check_finite(f"credit rule {name}", credit_NT, mask_NT)
    return torch.where(mask_NT, credit_NT, 0)


def _weight(credit_NT: Tensor, advantage_N: Tensor, mask_NT: Tensor) -> Tensor:
    """credit / advantage; 1 on the tokens of rollouts whose advantage is 0, 0 on padding."""
    is_zero_N1 = (advantage_N == 0)[:, None]
    weight_NT = torch.where(
        is_zero_N1, 1, credit_NT / torch.where(is_zero_N1, 1, advantage_N[:, None])
    )
    return torch.where(mask_NT, weight_NT, 0)


def _rule_metrics(
    rule: Any, before_NT: Tensor, after_NT: Tensor, batch: TokenBatch, reduce: Reduce
) -> dict[str, float]:
    """What a rule did: share of credited tokens kept, mass sum|credit| after / before, log-prob of
    kept and dropped; then its own report.
    """
    had_NT, has_NT = (before_NT != 0) & batch.mask_NT, (after_NT != 0) & batch.mask_NT
    mass_before, mass_after = reduce.sum(before_NT.abs().sum()), reduce.sum(after_NT.abs().sum())
    metrics = {
        "kept_frac": masked_mean(has_NT.to(before_NT.dtype), had_NT, reduce),
        "mass_ratio": mass_after / mass_before if mass_before > 0 else torch.ones(()),
        "kept_logp": masked_mean(batch.sampler_logp_NT, had_NT & has_NT, reduce),
        "dropped_logp": masked_mean(batch.sampler_logp_NT, had_NT & ~has_NT, reduce),
    }
    report = getattr(base(rule), "report", None)
    if report:
        metrics |= call(report, before_NT, after_NT, batch, reduce=reduce, **bound(rule))
    return {f"credit/{base(rule).__name__}/{key}": float(value) for key, value in metrics.items()}
