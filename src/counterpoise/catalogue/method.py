"""Method: a point on the six axes.

``method("dapo", plan="query_preserved")`` starts from a preset and changes axes.

The data's way::

    out = method.assign(batch)  # Credit
    for row_R in method.plan(batch, num_updates=4, seed=0):  # rows of each update
        rows = method.rows(batch, out, row_R)  # Rows: its columns with scale_NT
        loss = method.loss(trainer_logp_NT, rows)  # TokenLoss; or rows.select(...)
        (loss.loss_NT * rows.scale_NT).sum().backward()

A loss that must see the whole update before it is cut (``method.needs_update_logp``) gets it by
``rows = method.prepare(update_logp_NT, rows)`` with the no-grad log-probs of all the update's rows.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from counterpoise.advantages import ADVANTAGES
from counterpoise.catalogue.chain import advantage_metrics, apply_rules, check_order
from counterpoise.catalogue.label import axis_hint, label
from counterpoise.catalogue.presets import PRESETS
from counterpoise.catalogue.returned import check_returned, path
from counterpoise.catalogue.rows import check_anchor, check_trainer_logp, update_rows
from counterpoise.catalogue.success import Watch, watch_start, watch_success
from counterpoise.controllers import CONTROLLERS
from counterpoise.credit import RULES
from counterpoise.errors import MethodWarning, check_keys, check_number, check_whole
from counterpoise.losses import LOSSES
from counterpoise.maths.reduce import LOCAL, Reduce, check_finite, seeded_generator
from counterpoise.plans import PLANS, check_plan, cut, manifest
from counterpoise.reductions import REDUCTIONS
from counterpoise.stage import Spec, Stage, build, call, describe
from counterpoise.text import shorten
from counterpoise.types import Credit, Plan, Rows, TokenBatch, TokenLoss

# axis -> its stages by name; ``register_*`` adds to them from outside
FAMILIES: dict[str, dict[str, Stage]] = {
    "advantage": ADVANTAGES,
    "credit": RULES,
    "loss": LOSSES,
    "reduction": REDUCTIONS,
    "plan": PLANS,
    "controller": CONTROLLERS,
}

# axis -> field of Method
AXES = {
    "advantage": "advantage",
    "credit": "rules",
    "loss": "terms",
    "reduction": "reduction",
    "plan": "planner",
    "controller": "controller",
}

# what a caller may give for an axis: see ``change_axes``
Axis = Spec | Sequence[Spec] | None


@dataclasses.dataclass(frozen=True, repr=False)
class Method:
    """A point on six independent axes; make one with ``counterpoise.method``.

    Attributes:
        advantage: (reward_N, group_N) -> advantage_N.
        rules: the credit axis, (credit_NT, batch) -> credit_NT, applied in order.
        terms: the loss axis, (trainer_logp_NT, rows) -> TokenLoss, added up.
        reduction: (mask_NT, credit_NT, advantage_N) -> scale_NT.
        planner: (group_N, reward_N, length_N) -> rows of each update.
        controller: state over batches that sets parameters of the advantage and of a credit rule.
        success: a reward of at least this much is a success, for this method; None leaves it to the
            batch.
    """

    name: str
    advantage: Stage
    rules: tuple[Stage, ...]
    terms: tuple[Stage, ...]
    reduction: Stage
    planner: Stage
    controller: Stage | None = None
    success: float | None = None
    reference: str = ""
    summary: str = ""

    def __post_init__(self) -> None:
        check_number("method", or_none=True, success=self.success)
        check_order(self.rules)
        names = [term.name for term in self.terms if term.prepare]
        if len(names) > 1:
            raise ValueError(
                f"method: the losses {' and '.join(names)} each look at the whole update first, and"
                " a method has room for one such loss. Leave one out."
            )

    def __repr__(self) -> str:
        axes = {axis: getattr(self, field) for axis, field in AXES.items()}
        lines = (f"  {axis:<10} {_shown(value)}" for axis, value in axes.items() if value)
        return "\n".join([shorten(f"Method {self.label}", 100), *lines])

    @property
    def label(self) -> str:
        """The preset's name and what differs from it: ``grpo, plan query_preserved``."""
        return label(self.describe()) if self.name in PRESETS else self.name

    @property
    def stages(self) -> list[Stage]:
        """All stages, in the data's order."""
        last = [self.controller] if self.controller else []
        return [self.advantage, *self.rules, *self.terms, self.reduction, self.planner, *last]

    @functools.cached_property
    def needs(self) -> frozenset[str]:
        """Optional columns that some stage reads: known before any forward."""
        return frozenset().union(*(stage.needs for stage in self.stages))

    @property
    def needs_update_logp(self) -> bool:
        """Whether ``prepare`` must see the log-probs of a whole update before it is cut."""
        return any(term.prepare for term in self.terms)

    @property
    def needs_groups(self) -> bool:
        """Whether some stage compares a prompt's rollouts, so that one per prompt is an error."""
        return any(stage.has("needs_groups") for stage in self.stages)

    @property
    def reads_success(self) -> bool:
        """Whether some stage tells successes from failures."""
        return any(
            part.has("reads_success") for stage in self.stages for part in (stage, *stage.nested)
        )

    @property
    def reads_rewards_only(self) -> bool:
        """Whether a rollout's tokens all get one credit, known from rewards and groups alone."""
        return self.controller is None and all(r.has("reads_rewards_only") for r in self.rules)

    @property
    def has_teacher(self) -> bool:
        """Whether some rule reads what a teacher, who read more, makes of the rollouts."""
        return "teacher_logp_NT" in self.needs

    @property
    def collectors(self) -> list[Stage]:
        """The stages that sample more before credit is assigned, in order: the plan, which decides
        how many rollouts there are, before the rules, which work on them.
        """
        every = [part for stage in self.stages for part in (*stage.nested, stage)]
        return [stage for stage in reversed(every) if stage.has("samples_more")]

    def check_sampling(self, host: str) -> None:
        """A host that samples by itself cannot run a stage that samples more, nor one that corrects
        for a sampler, as the host does.
        """
        check_anchor(self.rules, host)
        for stage in self.collectors:
            raise ValueError(
                f"{stage.name} samples more rollouts before credit is assigned, and {host} samples"
                " by itself. Take the stage without it, or train with counterpoise train."
            )

    def check_group_size(self, size: int, where: str) -> None:
        """One rollout per prompt with a stage that compares them: say so before a model loads.

        ``where`` opens the message, for example "rollouts.group_size is 1."
        """
        if size == 1 and self.needs_groups:
            names = ", ".join(stage.name for stage in self.stages if stage.has("needs_groups"))
            unfit = ("needs_groups", "ignores_rewards")
            alone = [key for key, value in ADVANTAGES.items() if not any(map(value.has, unfit))]
            raise ValueError(
                f"{where} {names} compares the rollouts of one prompt. Sample two or"
                f" more per prompt, or use an advantage that works with one: {', '.join(alone)}."
            )

    def check_plan(self, num_prompts: int, group_size: int, num_updates: int) -> None:
        """A batch that the plan cannot cut into updates: say so before anything is sampled."""
        check_plan(self.planner, num_prompts, group_size, num_updates)

    def see(self, batch: TokenBatch) -> TokenBatch:
        """The batch with the method's own threshold of success, if it has one."""
        return batch if self.success is None else batch.replace(success=self.success)

    def init(self) -> dict[str, Any]:
        """The state before the first batch; JSON."""
        return {
            "controller": self.controller.start() if self.controller else None,
            "rules": [rule.start() for rule in self.rules],
        }

    def assign(
        self,
        batch: TokenBatch,
        state: dict[str, Any] | None = None,
        *,
        reduce: Reduce = LOCAL,
        seed: int = 0,
        batch_number: int = 0,
        report: bool = True,
    ) -> Credit:
        """Credit of every token: the advantage, then the chain of rules.

        Args:
            batch: the whole batch (of this rank), before any cut.
            state: what the last call returned, None at the start.
            reduce: pools statistics over ranks (``counterpoise.over_ranks()``).
            seed, batch_number: rules that draw at random derive their generator from them.
            report: False leaves out the numbers of the rules (``Credit.metrics``), which cost time.
        """
        self._check_columns(batch)
        batch = self.see(batch)
        state = self.init() if state is None else state
        controlled, controller_state, metrics = self._control(batch, state, reduce)
        watch = self._watch(batch, state, reduce)
        advantage_N = call(
            controlled.advantage,
            batch.reward_N,
            batch.group_N,
            reduce=reduce,
            success_N=batch.is_success_N,
            length_N=batch.length_N,
            max_length=batch.max_length,
        )
        where = f"advantage {path(ADVANTAGES, self.advantage)}"
        check_returned(where, advantage_N, batch.reward_N.shape, "one number per rollout")
        check_finite(where, advantage_N, batch.mask_NT.any(1))
        shaping = advantage_metrics(controlled.advantage, batch, reduce) if report else {}
        chain = apply_rules(
            controlled.rules,
            advantage_N,
            batch,
            state["rules"],
            reduce=reduce,
            generators=[
                seeded_generator(seed, batch_number, f"credit/{k}") for k in range(len(self.rules))
            ],
            report=report,
        )
        return Credit(
            advantage_N=advantage_N,
            weight_NT=chain.weight_NT,
            credit_NT=chain.credit_NT,
            advantage_NU=chain.advantage_NU,
            state={"controller": controller_state, "rules": chain.states, **watch.kept},
            metrics={**metrics, **shaping, **watch.metrics, **chain.metrics},
            warnings=(watch.warning,) if watch.warning else (),
        )

    def plan(
        self, batch: TokenBatch, num_updates: int, seed: int = 0, batch_number: int = 0
    ) -> Plan:
        """Which rollouts share an update; ranks and micro-batches are cut later."""
        check_whole("plan", least=1, num_updates=num_updates)
        columns = batch.group_N, batch.reward_N, batch.length_N, self.see(batch).is_success_N
        group_N, reward_N, length_N, success_N = (column.cpu() for column in columns)
        updates = cut(
            self.planner,
            group_N,
            reward_N,
            length_N,
            num_updates=num_updates,
            generator=seeded_generator(seed, batch_number, "plan"),
            success_N=success_N,
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
        return update_rows(self.rules, self.terms, self.reduction, batch, credit, row_R, reduce)

    def prepare(self, update_logp_NT: Tensor, rows: Rows) -> Rows:
        """What a loss must know of the whole update, from the detached log-probs of all its rows;
        for other losses nothing changes.
        """
        for term in self.terms:
            if term.prepare:
                update_NT = term.prepare(update_logp_NT.detach(), rows, **term.params)
                rows = rows._replace(update_NT=update_NT)
        return rows

    def loss(self, trainer_logp_NT: Tensor, rows: Rows) -> TokenLoss:
        """The loss of every token: the sum of the terms; ratio and clip are those of the first."""
        check_trainer_logp(trainer_logp_NT.detach(), rows)
        first, *others = [call(term, trainer_logp_NT, rows) for term in self.terms]
        for term in others:
            first = first._replace(
                loss_NT=first.loss_NT + term.loss_NT, coef_NT=first.coef_NT + term.coef_NT
            )
        return first

    def describe(self) -> dict[str, Any]:
        """The mapping (JSON) from which ``counterpoise.method(**mapping)`` makes this method."""
        out: dict[str, Any] = {"name": self.name}
        if self.success is not None:
            out["success"] = self.success
        for axis, field in AXES.items():
            value = getattr(self, field)
            out[axis] = (
                [describe(FAMILIES[axis], stage) for stage in value]
                if isinstance(value, tuple)
                else value and describe(FAMILIES[axis], value)
            )
        return out

    def _control(
        self, batch: TokenBatch, state: dict[str, Any], reduce: Reduce
    ) -> tuple[Method, Any, dict[str, float]]:
        if self.controller is None:
            return self, None, {}
        control = call(self.controller, state["controller"], batch, reduce=reduce)
        metrics = {
            f"controller/{self.controller.name}/{key}": float(value)
            for key, value in control.metrics.items()
        }
        return change_axes(self, control.settings), control.state, metrics

    def _watch(self, batch: TokenBatch, state: dict[str, Any], reduce: Reduce) -> Watch:
        if not self.reads_success:
            return Watch()
        watch = watch_success(self.name, batch, state.get("success") or watch_start(), reduce)
        if watch.warning:
            warnings.warn(watch.warning, MethodWarning, stacklevel=3)
        return watch

    def _check_columns(self, batch: TokenBatch) -> None:
        if not isinstance(batch, TokenBatch):
            kind = type(batch).__name__
            raise ValueError(f"method.assign: expected a TokenBatch (from_lists), got a {kind}.")
        for stage in self.stages:
            for column in sorted(stage.needs):
                try:
                    batch.column(column)
                except ValueError as missing:
                    raise ValueError(f"{stage.name} reads {column}. {missing}") from None


def change_axes(method: Method, axes: Mapping[str, Axis]) -> Method:
    """A method with some axes changed.

    A name, a mapping with ``name``, a function or a list of them replaces the axis; a mapping
    without ``name`` changes parameters of the stage that is there (the first that has them).
    """
    fields: dict[str, Any] = {}
    for axis, spec in axes.items():
        if axis not in AXES:
            stages = {name: getattr(method, field) for name, field in AXES.items()}
            raise ValueError(f"method: unknown axis {axis!r}. {axis_hint(axis, stages)}")
        fields[AXES[axis]] = _axis(axis, spec, getattr(method, AXES[axis]))
    return dataclasses.replace(method, **fields)


def _axis(axis: str, spec: Axis, current: Stage | tuple[Stage, ...] | None) -> Any:
    """The value of one axis: a stage, or a tuple of them where an axis takes several."""
    several = axis in ("credit", "loss")
    if isinstance(spec, Mapping) and "name" not in spec:
        if not current:
            raise ValueError(
                f"method: {axis} has no stage whose parameters {list(spec)} could change;"
                " give a list of stages."
            )
        check_keys(f"method: {axis}", spec)
        if isinstance(current, tuple):
            has = [spec.keys() <= stage.parameters.keys() for stage in current]
            at = has.index(True) if any(has) else 0
            return (*current[:at], current[at](**spec), *current[at + 1 :])
        return current(**spec)
    if not several:
        is_off = spec is None and axis == "controller"
        return None if is_off else build(axis, FAMILIES[axis], spec)  # pyright: ignore[reportArgumentType]
    family = "credit rule" if axis == "credit" else axis
    specs: Any = spec if isinstance(spec, (list, tuple)) else [] if spec is None else [spec]
    if axis == "loss" and not specs:
        raise ValueError("method: the loss axis needs at least one term.")
    return tuple(build(family, FAMILIES[axis], one) for one in specs)


def _shown(value: Stage | tuple[Stage, ...]) -> str:
    """The stages of an axis on one line."""
    return shorten(" + ".join(map(repr, value if isinstance(value, tuple) else (value,))), 86)
