"""What was run: the method on its six axes, model, task, command, versions; and the headline
numbers.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import pandas as pd

from counterpoise.catalogue.presets import DEFAULT, PRESETS
from counterpoise.maths.intervals import Interval
from counterpoise.report.runs import LAST, Group, at_point, eval_series, final, seed_of, series_of
from counterpoise.report.tokens import flip_rates, tokens_of
from counterpoise.run.read import RunFolder
from counterpoise.text import number, percent, shorten, with_interval

AXES = {
    "advantage": "one number per rollout",
    "credit": "how it is spread over tokens",
    "loss": "shape of ratio and clip",
    "reduction": "the denominator",
    "plan": "which rollouts share an update",
    "controller": "what changes over batches",
}
SETTINGS = (
    "model",
    "task",
    "num_batches",
    "rollouts",
    "optimizer",
    "trl",
    "eval",
    "ledger",
    "lora",
)
NOT_IN_FILES = "not in the files"
BY_PRESET = "preset"


class Table(NamedTuple):
    """A small table; ``hints`` explain the rows, ``numeric`` says which columns hold numbers,
    ``merge`` joins the equal cells of a row.
    """

    head: list[str]
    rows: list[list[str]]
    hints: list[str]
    numeric: tuple[int, ...] = ()
    merge: bool = False


class Tile(NamedTuple):
    """A headline number."""

    label: str
    value: str
    note: str


def axes_table(groups: Sequence[Group]) -> Table:
    """The method of each group on the six axes; from the manifest, else what the config says."""
    rows, hints = [], []
    for axis, hint in AXES.items():
        rows.append([axis, *(_axis(group.runs[0], axis) for group in groups)])
        hints.append(hint)
    return Table(["method", *(group.label for group in groups)], rows, hints, merge=True)


def settings_table(groups: Sequence[Group]) -> Table:
    """Model, task and the settings of each group."""
    rows = []
    for name in SETTINGS:
        values = [in_words(group.runs[0].config.get(name)) for group in groups]
        if any(values):
            rows.append([name, *(value or "–" for value in values)])
    rows.append(
        [
            "seeds",
            *(", ".join(in_words(seed_of(run)) or "–" for run in group.runs) for group in groups),
        ]
    )
    rows.append(
        [
            "batches trained",
            *(", ".join(str(len(run.metrics)) for run in group.runs) for group in groups),
        ]
    )
    changes = ["; ".join(filter(None, map(changes_of, group.runs))) for group in groups]
    if any(changes):
        rows.append(["changed on resume", *(text or "–" for text in changes)])
    return Table(
        ["setting", *(group.label for group in groups)], rows, [""] * len(rows), merge=True
    )


def changes_of(run: RunFolder) -> str:
    """Settings that changed when the run was resumed, each with its batch (from the manifest)."""
    changes = run.manifest.get("changes")
    return ", ".join(
        f"{in_words(one.get('key'))} {in_words(one.get('before')) or 'none'} →"
        f" {in_words(one.get('now')) or 'none'} from batch {in_words(one.get('batch'))}"
        for one in (changes if isinstance(changes, list) else [])
        if isinstance(one, dict)
    )


def origin(run: RunFolder) -> list[tuple[str, str]]:
    """Where a run comes from: command, commit, device, versions."""
    manifest = run.manifest
    command = manifest.get("command")
    words = (
        [str(word) for word in command]
        if isinstance(command, list)
        else [str(command)]
        if command
        else []
    )
    versions, absent = manifest.get("versions"), manifest.get("not_in_dump")
    lines = [
        ("folder", str(run.path)),
        ("command", shlex.join(words) if words else ""),
        ("imported from", in_words(manifest.get("imported_from"))),
        ("not in the dump", ", ".join(map(str, absent)) if isinstance(absent, list) else ""),
        ("commit", in_words(manifest.get("commit"))),
        (
            "device",
            " · ".join(
                filter(None, [in_words(manifest.get("device")), in_words(manifest.get("platform"))])
            ),
        ),
        (
            "versions",
            ", ".join(f"{name} {version}" for name, version in versions.items())
            if isinstance(versions, dict)
            else "",
        ),
    ]
    return [(label, value) for label, value in lines if value]


def tiles(groups: Sequence[Group]) -> list[Tile]:
    """Headline numbers of one group; a comparison has its table instead."""
    if len(groups) != 1:
        return []
    kinds = (_accuracy_tile, _reward_tile, _flip_tile, _tokens_tile)
    return [tile for kind in kinds if (tile := kind(groups[0])) is not None]


def _accuracy_tile(group: Group) -> Tile | None:
    series = [s for run in group.runs if not (s := eval_series(run)).empty]
    if not series:
        return None
    first = percent(at_point(group, "eval/accuracy", 0).mean)
    note = f"from {first} after {int(series[0].index[-1])} batches{_of_seeds(series)}"
    return Tile("held-out accuracy", percent(*final(group, "eval/accuracy")), note)


def _reward_tile(group: Group) -> Tile | None:
    lengths = [n for run in group.runs if (n := len(series_of(run, "reward/mean")))]
    if not lengths:
        return None
    kind = _of_seeds(lengths) or ", interval over them"
    num = min(LAST, max(lengths))
    return Tile(
        "training reward",
        with_interval(*final(group, "reward/mean")),
        f"last {num} batches{kind}" if num > 1 else f"one batch{_of_seeds(lengths)}",
    )


def _flip_tile(group: Group) -> Tile | None:
    runs = group.runs
    of_batch = tokens_of(runs[0])
    rows = [row for row in flip_rates(of_batch[1]) if row.count] if of_batch else []
    if not of_batch or not rows:
        return None
    note = " / ".join(f"{row.label}{_percents(row.value)}" for row in rows)
    of_run = f" of {runs[0].name}" if len(runs) > 1 else ""
    return Tile(
        "flipped tokens",
        " / ".join(percent(row.value.mean) for row in rows),
        f"{note} rollouts, batch {of_batch[0]}{of_run}",
    )


def _percents(value: Interval) -> str:
    return f" [{100 * value.low:.1f}, {100 * value.high:.1f}]" if math.isfinite(value.low) else ""


def _tokens_tile(group: Group) -> Tile | None:
    runs = group.runs
    totals = [
        run.metrics["rollouts/num_tokens"].sum()
        for run in runs
        if "rollouts/num_tokens" in run.metrics
    ]
    if not totals:
        return None
    seconds = [_seconds(run.timing) for run in runs]
    known = [s for s in seconds if s > 0]
    notes = [f"in {sum(known) / 60:.1f} minutes"] if known else []
    turns = final(group, "turns/mean").mean
    notes += [f"{number(turns)} turns per episode"] if math.isfinite(turns) else []
    return Tile("tokens sampled", f"{int(sum(totals)):,}", ", ".join(notes))


def _seconds(timing: pd.DataFrame) -> float:
    return (
        float(
            timing[[c for c in timing.columns if c.endswith("_s") and not c.endswith("_per_s")]]
            .sum()
            .sum()
        )
        if len(timing)
        else 0.0
    )


def _of_seeds(series: Sequence[object]) -> str:
    return f", {len(series)} seeds" if len(series) > 1 else ""


def _axis(run: RunFolder, axis: str) -> str:
    """A stage from the manifest; of older runs from the config, then from the installed preset of
    that name.
    """
    resolved, asked = run.manifest.get("method"), run.config.get("method")
    for source in (resolved, asked):
        if isinstance(source, dict) and axis in source:
            return _stage(source[axis], axis)
    name = asked.get("name") if isinstance(asked, dict) else asked
    preset = DEFAULT | PRESETS[name][2] if isinstance(name, str) and name in PRESETS else {}
    return f"{_stage(preset[axis], axis)} ({BY_PRESET})" if axis in preset else NOT_IN_FILES


def _stage(value: object, axis: str) -> str:
    if isinstance(value, list):
        return (
            " → ".join(_stage(one, axis) for one in value)
            if value
            else "uniform"
            if axis == "credit"
            else "none"
        )
    return "none" if value is None else in_words(value)


def in_words(value: object) -> str:
    """A setting in words: ``name (key value, ...)`` for what has a name, ``key value, ...`` for the
    rest.
    """
    if isinstance(value, dict):
        rest = ", ".join(
            f"{key} {in_words(v)}"
            for key, v in islice(value.items(), 40)
            if key != "name" and v is not None
        )
        name = in_words(value.get("name"))
        return f"{name} ({rest})" if name and rest else name or rest
    if isinstance(value, list) and len(value) == 1:
        return in_words(value[0])
    if value is None:
        return ""
    return shorten(value if isinstance(value, str) else json.dumps(value, default=str), 400)
