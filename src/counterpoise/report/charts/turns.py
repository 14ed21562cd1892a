"""Charts of runs whose rollouts have turns, from the keys ``turns/`` and ``environment/`` of
metrics.jsonl.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from counterpoise.maths.intervals import over_seeds
from counterpoise.report.charts import style as figures
from counterpoise.report.charts.draw import key_lines
from counterpoise.report.charts.style import Drawing
from counterpoise.report.runs import LAST, Group, series_of
from counterpoise.report.tokens import Row
from counterpoise.run.schema import END_REASONS
from counterpoise.text import percent

REWARD, ENVIRONMENT = "turns/reward_", "environment/"


def keys_of(groups: Sequence[Group], prefix: str) -> list[str]:
    """Keys of metrics.jsonl with a prefix, in the order of what follows it."""
    keys = {key for g in groups for run in g.runs for key in run.metrics if key.startswith(prefix)}
    return sorted(keys, key=lambda key: (len(key), key) if prefix == REWARD else (0, key))


def of_turn_rewards(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    """Mean reward of each turn in the first and in the last batches."""
    keys = keys_of(groups, REWARD)
    series = []
    for at, group in enumerate(groups):
        num = min(LAST, max(1, max(len(run.metrics) for run in group.runs) // 2))
        windows = (("first", "hollow", slice(0, num)), ("last", "bar", slice(-num, None)))
        for name, mark, part in windows:
            rows = [row for key in keys if (row := _turn_row(group, key, part)) is not None]
            label = f"{name} {num} batches" if num > 1 else f"{name} batch"
            label = label if len(groups) == 1 else f"{group.label}, {label}"
            if rows:
                series.append((label, figures.colour(at), mark, rows))
    if not series:
        return None
    drawing = figures.bars(series, y="mean reward")
    return drawing._replace(keys=[key._replace(text="") for key in drawing.keys])


def _turn_row(group: Group, key: str, part: slice) -> Row | None:
    """A turn's reward over some batches: of one run over them, of several over runs."""
    values = [series.to_numpy()[part] for run in group.runs if len(series := series_of(run, key))]
    if not values:
        return None
    means = [float(np.mean(value)) for value in values]
    return Row(
        f"turn {key.removeprefix(REWARD)}",
        over_seeds(means if len(means) > 1 else list(map(float, values[0]))),
        sum(map(len, values)),
    )


def of_ends(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    """Shares of rollouts by the reason of their end; reasons that never came are left out."""
    names = [(f"turns/end_{reason.replace(' ', '_')}", reason) for reason in END_REASONS]
    return _shown(groups, names, is_share=True)


def of_environment(groups: Sequence[Group], batch: int | None) -> Drawing | None:
    """Every number that the environment gave."""
    keys = keys_of(groups, ENVIRONMENT)
    return _shown(groups, [(key, key.removeprefix(ENVIRONMENT)) for key in keys], is_share=False)


def _shown(
    groups: Sequence[Group], names: Sequence[tuple[str, str]], *, is_share: bool
) -> Drawing | None:
    is_alone = len(groups) == 1
    lines = [
        line
        for at, group in enumerate(groups)
        for line in key_lines(group, at, names, is_alone)
        if not is_share or figures.size_of(line) > 0
    ]
    if not lines:
        return None
    if not is_share:
        return figures.lines(lines)
    drawing = figures.lines(lines, y="share of rollouts", write=percent)
    drawing.figure.update_yaxes(tickformat=figures.PERCENT)
    return drawing
