"""Stage: a function with bound parameters that says what it needs and what is true of it.

An author writes a module-level function, tensors positional and parameters keyword-only::

    @declare(needs="entropy_NT", report=_threshold)
    def top_entropy(credit_NT, batch, *, fraction=0.2): ...


    top_entropy(credit_NT, batch, fraction=0.2)  # with its tensors it runs
    top_entropy(fraction=0.2)  # with keywords alone it binds: a Stage again

``@Stage`` alone does where there is nothing to declare."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from counterpoise.errors import check_keys, import_path, is_import_path, nearest, own_code

if TYPE_CHECKING:
    from counterpoise.rollouts import Completions, RolloutBatch

# keywords that a caller of stages offers; a stage asks for one by naming it. They are no parameters
# of a method.
OFFERS = frozenset(
    {"reduce", "generator", "num_updates", "max_length", "length_N", "success_N", "advantage_NT"}
)

# a reward of at least this much is a success, where neither the task nor the method says otherwise
SUCCESS = 0.5


def success_of(task: Mapping[str, Any]) -> float | None:
    """The threshold of a recipe's ``task``, None where nothing was said; of programs all tests."""
    given = task.get("success", 1.0 if task.get("name") == "code" else None)
    return None if given is None else float(given)


# what a stage may declare of itself: a bool, or a function of its parameters that gives one
FACTS = {
    "needs_groups": "compares the rollouts of a prompt: one rollout per prompt is an error",
    "reads_success": "tells successes from failures (``success`` of the task, method or batch)",
    "reads_rewards_only": "a credit rule: one factor per rollout, from rewards and groups",
    "ignores_rewards": "an advantage: no reward changes it",
    "keeps_prompts_whole": "a plan: all rollouts that it takes of a prompt are in one update",
    "drops_rollouts": "a plan: it may take some rollouts of a prompt and leave out others",
    "shuffles_rows": "a plan: rows in random order, cut into equal updates, as most trainers do",
    "prepares_by_prompt": "a loss: what it prepares of an update it takes prompt by prompt",
    "values_rollouts": "a loss: fits a number per rollout to its advantage, without credit, as a"
    " mean over rollouts whatever the reduction",
    "samples_more": "its ``collect`` samples more; declared where that depends on parameters",
    "assigns_turns": "a credit rule: one number per turn, on all of its tokens; it comes first",
    "anchors_at_trainer": "a credit rule: the loss takes ratios against the trainer's log-probs",
    "replaces_credit": "a credit rule: it does not read the credit that it gets; it comes first",
    "is_unbiased": "an advantage or a credit rule: the mean of sum credit * grad log-prob over all"
    " groups is the gradient of the expected reward",
}

NESTED = ("rule", "order")  # parameters that are stages of the same axis

OWN = "your.module:function"  # what a name may be besides those that are known

Function = Callable[..., Any]
Fact = bool | Callable[..., bool]
Columns = str | tuple[str, ...] | Callable[..., Iterable[str]]
Spec = str | Mapping[str, Any] | Function


@dataclasses.dataclass(frozen=True, repr=False)
class Stage:
    """A point on one of the six axes: a function, its bound parameters, what it declares.

    Attributes:
        fn: the function itself.
        params: the bound parameters.
        columns: optional columns of a batch that it reads: a name, several, or a function of its
            parameters that gives them. ``needs`` is the answer.
        report: ``report(before_NT, after_NT, batch, *, params) -> dict``, a credit rule's own
            numbers to log; ``state`` is the one after the batch, for a rule with memory. Of an
            advantage it is ``report(batch, *, params)``.
        prepare: ``prepare(update_logp_NT, rows, *, params) -> update_NT``, what a loss must know of
            a whole update before it is cut.
        init: ``init(*, params) -> state`` (JSON) of a stage with memory; its ``fn`` then takes the
            state first and returns (result, state), or a ``Control``.
        collect: ``collect(rollouts, sampler, *, params) -> rollouts``, samples more before credit
            is assigned; ``sampler`` is a ``Sampler``.
        keeps: ``keeps(batch, *, params) -> kept_N``, rollouts that stay in the loss and its
            denominator; None keeps all.
        facts: see ``FACTS``; ask with ``has``.
    """

    fn: Function
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    columns: Columns = ()
    report: Function | None = None
    prepare: Function | None = None
    init: Function | None = None
    collect: Function | None = None
    keeps: Function | None = None
    facts: Mapping[str, Fact] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for fact in self.facts:
            if fact not in FACTS:
                raise ValueError(f"{self.name}: unknown fact {fact!r}. {nearest(fact, FACTS)}")
        # documentation and signature are those of the function
        copied = {key: getattr(self.fn, key, None) for key in functools.WRAPPER_ASSIGNMENTS}
        vars(self).update(copied, __wrapped__=self.fn)

    def __call__(self, *args: object, **params: object) -> Any:
        """Run on the given tensors; without any, bind the parameters."""
        if args:
            return self.fn(*args, **{**self.params, **params})
        known = self.parameters
        for name in params:
            if name not in known:
                raise ValueError(f"{self.name} has no parameter {name!r}. {self._hint(name)}")
        new = {key: _with_stages(value) for key, value in params.items()}
        return dataclasses.replace(self, params={**self.params, **new})

    def _hint(self, unknown: str) -> str:
        if unknown == "threshold" and self.has("reads_success"):
            return "What counts as success is set once: method.success, or task.success."
        return nearest(unknown, self.parameters)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.params.items())})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By reference: where the function is decorated, its name stands for the stage."""
        module, name = self.fn.__module__, self.fn.__qualname__
        home = _at_home(module, name)
        if isinstance(home, Stage) and home.fn is self.fn:
            return _restore, (module, name, dict(self.params))
        return super().__reduce_ex__(protocol)

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", repr(self.fn))

    @property
    def parameters(self) -> dict[str, Any]:
        """Parameter -> default (``inspect.Parameter.empty`` if it must be given)."""
        return {name: p.default for name, p in _keywords(self.fn).items() if name not in OFFERS}

    @property
    def settings(self) -> dict[str, Any]:
        """Parameter -> value: the bound ones over the defaults."""
        given = {k: v for k, v in self.parameters.items() if v is not inspect.Parameter.empty}
        return {**given, **self.params}

    @property
    def nested(self) -> list[Stage]:
        """The stages among its parameters, alone or in a list, and those among theirs."""
        own = [
            inner
            for value in self.params.values()
            for inner in (value if isinstance(value, (list, tuple)) else (value,))
            if isinstance(inner, Stage)
        ]
        return [part for inner in own for part in (inner, *inner.nested)]

    @property
    def needs(self) -> frozenset[str]:
        """The optional columns that it reads, those of nested stages included."""
        columns = call(self.columns, **self.settings) if callable(self.columns) else self.columns
        own = {columns} if isinstance(columns, str) else columns
        return frozenset(own).union(*(inner.needs for inner in self.nested))

    def has(self, fact: str) -> bool:
        """Whether it declares a fact (``FACTS``) with the parameters it has.

        >>> from counterpoise.plans import query_preserved
        >>> query_preserved.has("keeps_prompts_whole"), query_preserved.has("samples_more")
        (True, False)
        """
        default = fact == "samples_more" and self.collect is not None
        declared = self.facts.get(fact, default)
        return call(declared, **self.settings) if callable(declared) else declared

    def start(self) -> Any:
        """The state before the first batch; None without memory."""
        return None if self.init is None else call(self.init, **self.settings)


class Control(NamedTuple):
    """What a controller decides: ``settings`` is axis -> parameters, ``state`` is JSON, ``metrics``
    are logged.
    """

    settings: dict[str, dict[str, Any]]
    state: dict[str, Any]
    metrics: dict[str, float]


def declare(
    *,
    needs: Columns = (),
    report: Function | None = None,
    prepare: Function | None = None,
    init: Function | None = None,
    collect: Function | None = None,
    keeps: Function | None = None,
    **facts: Fact,
) -> Callable[[Function], Stage]:
    """Make a stage of a function and say what it needs and what is true of it (``FACTS``).

    >>> @declare(needs="mine_NT")
    ... def scaled(credit_NT, batch, *, power=1.0):
    ...     "credit * mine^power"
    ...     return credit_NT * batch.column("mine_NT") ** power
    >>> scaled(power=2.0), sorted(scaled.needs)
    (scaled(power=2.0), ['mine_NT'])
    """
    return functools.partial(
        Stage,
        columns=needs,
        report=report,
        prepare=prepare,
        init=init,
        collect=collect,
        keeps=keeps,
        facts=facts,
    )


def as_stage(fn: Function) -> Stage:
    """A stage as it is; a plain function as a stage that declares nothing."""
    return fn if isinstance(fn, Stage) else Stage(fn)


def call(fn: Function, *args: object, **offers: object) -> Any:
    """Run a stage, or a function that belongs to one, with those of the offered keywords that it
    names.
    """
    named = _keywords(fn.fn if isinstance(fn, Stage) else fn)
    chosen = {name: value for name, value in offers.items() if name in named}
    if not isinstance(fn, Stage):
        return fn(*args, **chosen)
    with own_code(f"{fn.fn.__module__}:{fn.name}", fn.fn):
        return fn(*args, **chosen)


def build(family: str, known: Mapping[str, Stage], spec: Spec) -> Stage:
    """A bound stage from a name, a mapping with ``name`` and parameters, or a function."""
    if callable(spec):
        return as_stage(spec)
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, Mapping) or "name" not in spec:
        raise ValueError(
            f"{family}: expected a name, a mapping with 'name', or a function, got {spec!r}."
        )
    check_keys(family, spec)
    name, params = spec["name"], {key: value for key, value in spec.items() if key != "name"}
    stage = named_stage(family, known, name)
    if isinstance(params.get("rules"), (list, tuple)):
        params["rules"] = tuple(build(family, known, rule) for rule in params["rules"])
    params |= {key: build(family, known, params[key]) for key in NESTED if key in params}
    missing = [
        key
        for key, default in stage.parameters.items()
        if default is inspect.Parameter.empty and key not in params
    ]
    if missing:
        raise ValueError(f"{family} {name!r} needs the parameter {missing[0]!r}.")
    return stage(**params)


def named_stage(family: str, known: Mapping[str, Stage], name: str) -> Stage:
    """The stage of a name in the table, or of an import path ``your.module:function``."""
    if isinstance(name, str) and name in known:
        return known[name]
    if not is_import_path(name):
        raise ValueError(f"unknown {family} {name!r}. {nearest(name, [*known, OWN])}")
    return check_stage(family, name, import_path(name, family))


def check_stage(family: str, name: str, fn: object) -> Stage:
    """A function of a user's own as a stage; one that this axis cannot take is an error."""
    if not callable(fn) or isinstance(fn, type):
        raise ValueError(f"{family} {name!r} is a {type(fn).__name__}, expected a function.")
    if family == "loss" and not isinstance(fn, Stage):
        raise ValueError(
            f"loss {name!r} is a plain function. Decorate it with @counterpoise.token_loss, which"
            " derives coef_NT."
        )
    if family == "controller" and (not isinstance(fn, Stage) or fn.init is None):
        raise ValueError(
            f"controller {name!r} has no init=, the state before the first batch. Decorate it with"
            " @counterpoise.declare(init=...)."
        )
    return as_stage(fn)


def describe(known: Mapping[str, Stage], stage: Stage) -> dict[str, Any]:
    """The mapping from which ``build`` makes this stage again.

    A function outside the table is described as ``module:name``.
    """
    name = next(
        (key for key, value in known.items() if value.fn is stage.fn),
        f"{stage.fn.__module__}:{stage.fn.__qualname__}",
    )
    return {"name": name} | {
        key: _describe_value(known, value) for key, value in stage.params.items()
    }


def _describe_value(known: Mapping[str, Stage], value: Any) -> Any:
    if isinstance(value, Stage):
        return describe(known, value)
    if isinstance(value, (list, tuple)):
        return [_describe_value(known, one) for one in value]
    return value


def _with_stages(value: Any) -> Any:
    """A parameter's value, functions in it as stages."""
    if callable(value):
        return as_stage(value)
    if isinstance(value, (list, tuple)) and any(map(callable, value)):
        return tuple(map(_with_stages, value))
    return value


@functools.cache
def _keywords(fn: Function) -> dict[str, inspect.Parameter]:
    return {
        name: p
        for name, p in inspect.signature(fn).parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _at_home(module: str, name: str) -> object:
    """What a module calls by this name, if it has it."""
    home = importlib.import_module(module)
    return functools.reduce(lambda at, part: getattr(at, part, None), name.split("."), home)


def _restore(module: str, name: str, params: dict[str, Any]) -> Stage:
    stage = _at_home(module, name)
    assert isinstance(stage, Stage)
    return dataclasses.replace(stage, params=params)


class Sampler(Protocol):
    """What a trainer offers to the ``collect`` hook of a stage."""

    def more(self) -> RolloutBatch:
        """The next prompts of the stream, sampled and graded as the batch was."""
        ...

    def answer(
        self,
        rollouts: RolloutBatch,
        rows: Sequence[int],
        prompts: Sequence[str],
        *,
        samples: int,
        purpose: str,
    ) -> RolloutBatch:
        """Answers to other prompts, graded as answers to the prompts of some rollouts.

        Prompt k stands in for the prompt of rollout ``rows[k]``, whose group its ``samples``
        answers join; ``extra["source_N"]`` of the result is k. ``purpose`` seeds the draws.
        """
        ...

    def score(self, rollouts: RolloutBatch) -> RolloutBatch:
        """The same rollouts with sampler log-probs and entropies under their plain prompts."""
        ...

    def complete(
        self,
        rollouts: RolloutBatch,
        places: Sequence[tuple[int, int]],
        *,
        samples: int,
        purpose: str,
    ) -> Completions:
        """``samples`` fresh ends of each (rollout, position): its response up to there is kept, and
        the whole is graded as an answer to its prompt. ``purpose`` seeds the draws.
        """
        ...

    def tokens_at(
        self, rollouts: RolloutBatch, offsets: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Positions of the first tokens that begin at or behind characters of a rollout's text;
        each once, without those of the first and behind the last.
        """
        ...
