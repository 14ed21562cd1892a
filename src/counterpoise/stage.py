"""Name and parameters -> function, and back (``describe``); what a function needs; error messages.

A stage is a module-level function whose parameters are keyword-only. ``@bindable`` lets it be bound
by calling it with keywords alone:
``top_entropy(fraction=0.2)`` is ``functools.partial(top_entropy, fraction=0.2)`` with the parameter
names checked."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from counterpoise.errors import nearest

# keywords that a caller of stages offers; a stage asks for one by naming it. They are no parameters
# of a method.
OFFERS = frozenset({"reduce", "generator", "num_updates", "max_length"})

Stage = Callable[..., Any]


def bindable(fn: Stage) -> Stage:
    """Called with keywords alone the stage binds itself; with its tensors it runs."""

    @functools.wraps(fn)
    def stage(*args: Any, **params: Any) -> Any:
        if args:
            return fn(*args, **params)
        check_parameters(stage, params)
        return functools.partial(stage, **params)

    return stage


def needs(
    *columns: str, by: Callable[..., Iterable[str]] | None = None
) -> Callable[[Stage], Stage]:
    """Declare the columns a stage reads; ``by`` gives those that depend on its parameters."""

    def mark(fn: Stage) -> Stage:
        fn.needs = (frozenset(columns), by)  # pyright: ignore[reportFunctionMemberAccess]
        return fn

    return mark


class Stateful(NamedTuple):
    """A stage with memory.

    ``init(**params) -> state`` (JSON), ``apply(state, ..., **params) -> (result, state)``. Call it
    to bind.
    """

    init: Stage
    apply: Stage

    def __call__(self, **params: Any) -> Stateful:
        check_parameters(self.apply, params)
        for_init = {name: value for name, value in params.items() if name in parameters(self.init)}
        return Stateful(
            functools.partial(self.init, **for_init), functools.partial(self.apply, **params)
        )


def base(stage: Any) -> Any:
    """The module-level function under any number of bindings."""
    if isinstance(stage, Stateful):
        stage = stage.apply
    while isinstance(stage, functools.partial):
        stage = stage.func
    return stage


def bound(stage: Any) -> dict[str, Any]:
    """The parameters bound so far."""
    if isinstance(stage, Stateful):
        stage = stage.apply
    return dict(stage.keywords) if isinstance(stage, functools.partial) else {}


def rebind(stage: Any, params: Mapping[str, Any]) -> Any:
    """The same stage with some parameters changed."""
    if isinstance(stage, Stateful):
        return Stateful(base_init(stage), base(stage))(**{**bound(stage), **params})
    check_parameters(stage, params)
    return functools.partial(base(stage), **{**bound(stage), **params})


def base_init(stage: Stateful) -> Stage:
    init = stage.init
    while isinstance(init, functools.partial):
        init = init.func
    return init


@functools.cache
def _keyword_parameters(fn: Stage) -> dict[str, inspect.Parameter]:
    return {
        name: p
        for name, p in inspect.signature(fn).parameters.items()
        if p.kind is inspect.Parameter.KEYWORD_ONLY
    }


def parameters(stage: Any) -> dict[str, Any]:
    """Parameter -> default (``inspect.Parameter.empty`` if it must be given), offers left out."""
    return {
        name: p.default
        for name, p in _keyword_parameters(base(stage)).items()
        if name not in OFFERS
    }


def check_parameters(stage: Any, params: Mapping[str, Any]) -> None:
    known = parameters(stage)
    for name in params:
        if name not in known:
            raise ValueError(
                f"{base(stage).__name__} has no parameter {name!r}. {nearest(name, known)}"
            )


def call(stage: Stage, *args: Any, **offers: Any) -> Any:
    """Run a stage with those of the offered keywords that it names."""
    named = _keyword_parameters(base(stage))
    return stage(*args, **{name: value for name, value in offers.items() if name in named})


def needs_of(stage: Any) -> frozenset[str]:
    """The columns that a bound stage reads, nested rules included."""
    fixed, by = getattr(base(stage), "needs", (frozenset(), None))
    settings = {
        **{k: v for k, v in parameters(stage).items() if v is not inspect.Parameter.empty},
        **bound(stage),
    }
    nested = [needs_of(inner) for value in bound(stage).values() for inner in _stages(value)]
    return frozenset(fixed).union(by(**settings) if by else (), *nested)


def build(family: str, known: Mapping[str, Any], spec: Any) -> Any:
    """A bound stage from a name, a mapping with ``name`` and parameters, or a stage that is already
    one.
    """
    if isinstance(spec, Stateful) or callable(spec):
        return spec
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, Mapping) or "name" not in spec:
        raise ValueError(
            f"{family}: expected a name, a mapping with 'name', or a function, got {spec!r}."
        )
    name, params = spec["name"], {key: value for key, value in spec.items() if key != "name"}
    if name not in known:
        raise ValueError(f"unknown {family} {name!r}. {nearest(name, known)}")
    if "rule" in params:
        params["rule"] = build(family, known, params["rule"])
    if "rules" in params:
        params["rules"] = tuple(build(family, known, rule) for rule in params["rules"])
    missing = [
        key
        for key, default in parameters(known[name]).items()
        if default is inspect.Parameter.empty and key not in params
    ]
    if missing:
        raise ValueError(f"{family} {name!r} needs the parameter {missing[0]!r}.")
    return known[name](**params)


def describe(known: Mapping[str, Any], stage: Any) -> Any:
    """The mapping from which ``build`` makes this stage again.

    A function outside the table is described as ``module:name``.
    """
    own = base(stage)
    name = next(
        (key for key, value in known.items() if base(value) is own),
        f"{own.__module__}:{own.__qualname__}",
    )
    return {"name": name} | {key: _described(known, value) for key, value in bound(stage).items()}


def _described(known: Mapping[str, Any], value: Any) -> Any:
    if callable(value):
        return describe(known, value)
    return [describe(known, stage) for stage in value] if _stages(value) else value


def _stages(value: Any) -> list[Any]:
    """The stages that a parameter holds: one, several, or none."""
    if callable(value):
        return [value]
    return [one for one in value if callable(one)] if isinstance(value, (list, tuple)) else []


class Control(NamedTuple):
    """What a controller decides: ``settings`` is axis -> parameters, ``state`` is JSON, ``metrics``
    are logged.
    """

    settings: dict[str, dict[str, Any]]
    state: dict[str, Any]
    metrics: dict[str, float]


def reports(report: Stage) -> Callable[[Stage], Stage]:
    """Give a credit rule numbers of its own to log: ``report(before_NT, after_NT, batch, *, params)
    -> dict``.
    """

    def mark(fn: Stage) -> Stage:
        fn.report = report  # pyright: ignore[reportFunctionMemberAccess]
        return fn

    return mark
