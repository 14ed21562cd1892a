"""Every method and stage by name: the presets, what a process registers, what plug-ins bring."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import traceback
import warnings
from collections.abc import Iterable
from typing import Any

import torch

from counterpoise.catalogue.method import AXES, FAMILIES, Axis, Method, change_axes
from counterpoise.catalogue.presets import DEFAULT, PRESETS
from counterpoise.catalogue.returned import check_own_log_prob, path
from counterpoise.errors import OwnCodeError, is_our_file, is_ours, nearest
from counterpoise.stage import Function, Stage, check_stage, describe
from counterpoise.types import COLUMNS, TokenBatch

ENTRY_POINTS = "counterpoise.methods"

_registered: dict[str, Method] = {}
_plugins_loaded = False


def method(name: str, *, success: float | None = None, **axes: Axis) -> Method:
    """A preset with some axes changed, checked by a dry run.

    Args:
        name: a preset, see ``methods()``.
        success: a reward of at least this much is a success; None leaves it to the batch, which the
            trainer fills from ``task.success``.
        axes: ``advantage``, ``credit``, ``loss``, ``reduction``, ``plan``, ``controller``: a name
            or an import path ``your.module:function``, a mapping with ``name`` and parameters, a
            bound stage, for ``credit`` and ``loss`` also a list of them; a mapping without ``name``
            changes parameters of the preset's stage.

    >>> method(
    ...     "dapo", plan="query_preserved", credit=[{"name": "top_entropy", "fraction": 0.2}]
    ... ).needs
    frozenset({'entropy_NT'})
    """
    load_plugins()
    chosen = change_axes(_preset(name), axes)
    if success is not None:
        chosen = dataclasses.replace(chosen, success=success)
    dry_run(chosen)
    return chosen


def methods() -> dict[str, dict[str, Any]]:
    """Every preset: its summary, reference, axes, the parameters of its stages and the columns it
    needs; JSON.

    >>> methods()["dfpo_min"]["axes"]["loss"]
    [{'name': 'dfpo', 'transform': 'min'}]
    """
    load_plugins()
    return {name: _info(_preset(name)) for name in [*PRESETS, *_registered]}


def register_method(name: str, chosen: Method) -> Method:
    """Make a method of your own available as ``method(name)``."""
    if name in PRESETS or name in _registered:
        raise ValueError(f"register_method: {name!r} is taken. Choose another name.")
    dry_run(chosen)
    _registered[name] = dataclasses.replace(chosen, name=name)
    return _registered[name]


def load_plugins() -> None:
    """Run every entry point of the group ``counterpoise.methods`` once; one that fails is
    named in a warning.
    """
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            point.load()()
        except Exception as error:
            warnings.warn(
                f"counterpoise plug-in {point.name!r} ({point.value}) failed: {error!r}. Its"
                " methods are missing.",
                stacklevel=2,
            )


def dry_run(chosen: Method) -> None:
    """Run every stage on two rollouts of three tokens, so that a wrong parameter shows now and not
    at batch 300.
    """
    try:
        batch = _example(chosen)
        rows = chosen.rows(
            batch, chosen.assign(batch), chosen.plan(batch, num_updates=1).updates[0]
        )
        logp_NT = torch.full_like(rows.sampler_logp_NT, -0.5).requires_grad_()
        loss_NT = chosen.loss(logp_NT, rows).loss_NT
        own = [term for term in chosen.terms if not is_ours(term.fn)]
        if own:
            check_own_log_prob(
                ", ".join(path(FAMILIES["loss"], term) for term in own), loss_NT, logp_NT
            )
    except OwnCodeError as error:
        raise ValueError(
            f"method {chosen.name!r} does not run on a 2 x 3 example: {error}"
            f"{_undeclared(chosen, error)}"
        ) from error
    except ValueError as error:
        raise ValueError(f"method {chosen.name!r}: {error}") from None
    except Exception as error:
        raise ValueError(
            f"method {chosen.name!r} does not run on a 2 x 3 example: {error!r}"
        ) from error


def _undeclared(chosen: Method, error: Exception) -> str:
    """The columns that the code which raised reads, and no stage of the method says it needs."""
    read: set[str] = set()
    for frame, _ in traceback.walk_tb(
        None if error.__cause__ is None else error.__cause__.__traceback__
    ):
        if not is_our_file(frame.f_code.co_filename):
            read |= {name for name in frame.f_code.co_names if name in COLUMNS}
    missing = sorted(read - chosen.needs)
    if not missing:
        return ""
    needs = repr(missing[0] if len(missing) == 1 else tuple(missing))
    return (
        f" It reads {', '.join(missing)}, which is only there where a stage needs it. Say so:"
        f" @counterpoise.declare(needs={needs}), of a loss @counterpoise.token_loss(needs={needs})."
    )


def unknown_method(
    name: str, known: Iterable[str], form: str = "method={{name: dapo, {axis}: {value}}}"
) -> str:
    """What is said of a name that is no method; a stage of one axis is told how to be set.

    Args:
        form: the setting, with places for ``axis`` and ``value``.

    >>> unknown_method("clipped", [], "--set method.{axis}={value}")
    "unknown method 'clipped': it is a loss. Set it on a method: --set method.loss=clipped"
    """
    axes = [axis for axis, stages in FAMILIES.items() if name in stages]
    if not axes:
        return f"unknown method {name!r}. {nearest(name, known)}"
    axis = axes[0]
    noun = {"credit": "a credit rule", "advantage": "an advantage"}.get(axis, f"a {axis}")
    setting = form.format(axis=axis, value=f"[{name}]" if axis == "credit" else name)
    return f"unknown method {name!r}: it is {noun}. Set it on a method: {setting}"


def _preset(name: str) -> Method:
    if name in _registered:
        return _registered[name]
    if name not in PRESETS:
        raise ValueError(unknown_method(name, [*PRESETS, *_registered]))
    summary, reference, axes = PRESETS[name]
    unset: Any = None
    blank = Method(name, unset, (), (), unset, unset, reference=reference, summary=summary)
    return change_axes(blank, {**DEFAULT, **axes})


def _example(chosen: Method) -> TokenBatch:
    gen = torch.Generator().manual_seed(0)
    ready: dict[str, torch.Tensor] = {
        "entropy_NT": torch.rand(2, 3, generator=gen) + 0.1,
        "trainer_logp_NT": torch.full((2, 3), -0.7),
        "ref_logp_NT": torch.full((2, 3), -0.8),
        "teacher_logp_NT": torch.full((2, 3), -0.6),
        "has_teacher_N": torch.tensor([True, False]),
        "ref_kl_NT": torch.full((2, 3), 0.05),
        "importance_NT": torch.tensor([[0.0, 0.3, -1.0], [0.2, 0.1, 0.4]]),
        "hidden_NTD": torch.randn(2, 3, 4, generator=gen),
        "topk_ids_NTK": torch.arange(3).expand(2, 3, 3),
        "topk_logp_NTK": torch.full((2, 3, 3), -1.2),
        "head_VD": torch.randn(8, 4, generator=gen),
        "turn_score_NU": torch.rand(2, 1, generator=gen),
        "state_NU": torch.zeros(2, 1, dtype=torch.long),
        "segment_NT": torch.tensor([[0, 0, 1]] * 2),
        "value_NT": torch.tensor([[0.5, 0.5, 0.8], [0.5, 0.5, 0.2]]),
    }
    extra = {name: torch.rand(2, 3, generator=gen) for name in chosen.needs if name not in COLUMNS}
    return TokenBatch(
        token_ids_NT=torch.tensor([[1, 2, 3], [1, 4, 5]]),
        mask_NT=torch.ones(2, 3, dtype=torch.bool),
        group_N=torch.zeros(2, dtype=torch.long),
        reward_N=torch.tensor([1.0, 0.0]),
        sampler_logp_NT=torch.tensor([[-0.1, -0.5, -1.0], [-0.1, -0.6, -1.1]]),
        max_length=2**20,  # a limit of which no parameter can be a part too large
        extra=extra,
        **{name: value for name, value in ready.items() if name in chosen.needs},  # pyright: ignore[reportArgumentType]
    )


def _info(chosen: Method) -> dict[str, Any]:
    described = chosen.describe()
    return {
        "summary": chosen.summary,
        "reference": chosen.reference,
        "axes": {axis: described[axis] for axis in AXES},
        "parameters": {
            axis: _axis_parameters(axis, getattr(chosen, field)) for axis, field in AXES.items()
        },
        "needs": sorted(chosen.needs),
    }


def _axis_parameters(axis: str, value: Stage | tuple[Stage, ...] | None) -> dict[str, Any]:
    stages = value if isinstance(value, tuple) else (value,) if value else ()
    return {
        describe(FAMILIES[axis], stage)["name"]: {**stage.parameters, **stage.params}
        for stage in stages
    }


def register(axis: str, name: str, fn: Function) -> Stage:
    """Add a stage of your own, or a plain function, to an axis; returns the stage.

    The same function may be registered twice, another one under a taken name may not.
    """
    stage = check_stage(axis, name, fn)
    taken = FAMILIES[axis].setdefault(name, stage)
    if taken.fn is not stage.fn:
        raise ValueError(
            f"register: {axis} {name!r} is taken by {taken.fn.__module__}.{taken.name}. Choose"
            " another name."
        )
    return taken


def register_advantage(name: str, fn: Function) -> Stage:
    """``fn(reward_N, group_N, *, params) -> advantage_N``, as ``method(..., advantage=name)``."""
    return register("advantage", name, fn)


def register_rule(name: str, fn: Function) -> Stage:
    """``fn(credit_NT, batch, *, params) -> credit_NT`` becomes ``method(..., credit=[name])``.

    With memory, ``Stage(fn, init=...)``: ``fn(state, credit_NT, batch, *, params) -> (credit_NT,
    state)``.
    """
    return register("credit", name, fn)


def register_loss(name: str, loss: Function) -> Stage:
    """A function decorated with ``counterpoise.token_loss`` becomes ``method(..., loss=name)``."""
    return register("loss", name, loss)


def register_reduction(name: str, fn: Function) -> Stage:
    """``fn(mask_NT, credit_NT, advantage_N, *, params) -> scale_NT`` becomes ``method(...,
    reduction=name)``.
    """
    return register("reduction", name, fn)


def register_plan(name: str, fn: Function) -> Stage:
    """``fn(group_N, reward_N, length_N, *, num_updates, generator, params) -> [row_R, ...]``
    becomes ``method(..., plan=name)``.
    """
    return register("plan", name, fn)


def register_controller(name: str, fn: Stage) -> Stage:
    """``Stage(fn, init=...)`` with ``fn(state, batch, *, params) -> Control`` becomes ``method(...,
    controller=name)``.
    """
    return register("controller", name, fn)
