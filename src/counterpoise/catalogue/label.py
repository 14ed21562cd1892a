"""What a method is called where it stands beside others: the preset and what was changed. No torch.

``grpo, plan query_preserved`` is GRPO under a recipe that pins the plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from counterpoise.catalogue.presets import DEFAULT, PRESETS
from counterpoise.errors import nearest
from counterpoise.stage import NESTED


def label(method: str | Mapping[str, Any]) -> str:
    """The preset's name and each axis that differs from it.

    Args:
        method: what a recipe says under ``method``, or ``Method.describe()``.

    >>> label({"name": "grpo", "plan": "query_preserved"})
    'grpo, plan query_preserved'
    >>> label({"name": "dapo", "plan": "random_rows", "credit": [{"name": "delta", "top": 3}]})
    'dapo, credit delta(top=3)'
    >>> label({"name": "dapo", "loss": {"clip_high": 0.3}})
    'dapo, loss clip_high=0.3'
    >>> label({"name": "dapo", "credit": {"name": "mix", "rules": ["uniform", "ktae"]}})
    'dapo, credit mix(rules=[uniform, ktae])'
    """
    given = {"name": method} if isinstance(method, str) else method
    name = str(given.get("name", ""))
    preset = {**DEFAULT, **PRESETS[name][2]} if name in PRESETS else {}
    changes = [
        f"{key} {text}"
        for key, value in given.items()
        if key != "name" and (text := _change(value, preset.get(key, _ABSENT)))
    ]
    return ", ".join([name, *changes])


_ABSENT = object()  # of a method that is not a preset nothing is known: all it says is a change


def axis_hint(name: str, stages: Mapping[str, Any]) -> str:
    """Where a parameter belongs that was given as an axis; else the nearest axis."""
    for axis, value in stages.items():
        for stage in value if isinstance(value, tuple) else (value,):
            if stage is not None and name in stage.parameters:
                return f"It is a parameter of {stage.name}: write {axis}: {{{name}: ...}}."
    return nearest(name, stages)


def _change(value: object, preset: object) -> str:
    """How a value differs from the preset's; empty if it does not."""
    if isinstance(value, Mapping) and "name" not in value:  # parameters of the preset's stage
        first = _stages(preset)[:1]
        kept = first[0] if first else {}
        return ", ".join(f"{k}={v}" for k, v in value.items() if kept.get(k, _ABSENT) != v)
    return (
        ""
        if _stages(value) == _stages(preset)
        else " + ".join(map(_text, _stages(value))) or "none"
    )


def _stages(spec: object) -> list[dict[str, Any]]:
    """An axis in one form: a list of mappings with ``name``."""
    specs = spec if isinstance(spec, (list, tuple)) else [] if spec is None else [spec]
    named = [dict(one) if isinstance(one, Mapping) else {"name": one} for one in specs]
    for stage in named:
        if isinstance(stage.get("rules"), (list, tuple)):
            stage["rules"] = _stages(stage["rules"])
        for key in NESTED:
            if isinstance(stage.get(key), str):
                stage[key] = {"name": stage[key]}
    return named


def _text(stage: Mapping[str, Any]) -> str:
    params = ", ".join(f"{key}={_value(value)}" for key, value in stage.items() if key != "name")
    return f"{stage.get('name')}({params})" if params else str(stage.get("name"))


def _value(value: object) -> str:
    """A nested stage as such, anything else as JSON would write it."""
    if isinstance(value, Mapping) and "name" in value:
        return _text(value)
    if isinstance(value, (list, tuple)) and any(isinstance(one, Mapping) for one in value):
        return f"[{', '.join(map(_value, value))}]"
    return str(value) if isinstance(value, (str, float, int)) else json.dumps(value, default=str)
