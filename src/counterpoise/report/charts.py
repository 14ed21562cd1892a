"""The report's charts: what each shows, how to read it, what the number is, and how it is drawn. ``counterpoise.plot`` is the same list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from counterpoise.report import credit_numbers as tokens
from counterpoise.report import figures
from counterpoise.report.credit_numbers import SIGNS, Row
from counterpoise.report.figures import SIGN_COLOUR, Drawing, Key
from counterpoise.report.folder import RunFolder
from counterpoise.report.groups import Curve, Group, curve, eval_curve
from counterpoise.report.stats import Interval, over_seeds
from counterpoise.report.text import number, with_interval

MAX_LEDGER_STEPS = 40
Draw = Callable[[Sequence[Group], "int | None"], "Drawing | None"]


class Chart(NamedTuple):
    """A chart of the report. ``draw(groups, step)`` gives None where the files hold nothing to draw."""

    name: str
    section: str
    title: str
    help: str
    definition: str
    draw: Draw
    is_wide: bool = False


def of_metric(key: str, *, zero: bool = False) -> Draw:
    """Curves of one key of metrics.jsonl."""

    def draw(groups: Sequence[Group], step: int | None) -> Drawing | None:
        found = [(group.label, c) for group in groups if (c := curve(group, key)) is not None]
        return figures.curves(found, zero=zero) if found else None

    return draw


def of_evals(groups: Sequence[Group], step: int | None) -> Drawing | None:
    found = [(group.label, c) for group in groups if (c := eval_curve(group)) is not None]
    return figures.curves(found, markers=True, x="rollout batches trained") if found else None


def of_positive_share(groups: Sequence[Group], step: int | None) -> Drawing | None:
    """The band from the least to the most positive optimizer step of each batch."""
    low = [curve(group, "plan/positive_frac_min") for group in groups]
    high = [curve(group, "plan/positive_frac_max") for group in groups]
    found = [(g.label, _band(a, b)) for g, a, b in zip(groups, low, high) if a is not None and b is not None]
    if not found:
        return None
    drawing = figures.curves(found)
    drawing.figure.update_yaxes(range=[0, 1])
    return drawing


def of_tokens(column: str, x: str) -> Draw:
    """Distribution of a token column by the sign of the advantage."""

    def draw(groups: Sequence[Group], step: int | None) -> Drawing | None:
        found = []
        for at, (group, frame) in enumerate(_frames(groups, step)):
            if not tokens.has(frame, column, "sign"):
                continue
            for sign, name in SIGNS.items():
                value = np.asarray(frame[column][(frame["sign"] == sign) & frame[column].notna()], float)
                shade = SIGN_COLOUR[name] if len(groups) == 1 else figures.colour(at)
                style = "solid" if len(groups) == 1 or sign > 0 else "dot"
                if len(value):
                    found.append((_signed(group, name, groups), shade, style, value))
        return figures.histograms(found, x=x) if found else None

    return draw


def of_categories(groups: Sequence[Group], step: int | None) -> Drawing | None:
    found = []
    for at, (group, frame) in enumerate(_frames(groups, step)):
        for name, rows in tokens.category_mass(frame).items():
            shade = SIGN_COLOUR[name] if len(groups) == 1 else figures.colour(at)
            if len(groups) == 1 or name == "positive":
                found.append((_signed(group, name, groups), shade, rows))
    return figures.bars(found, y="share of |credit|") if found else None


def of_flips(groups: Sequence[Group], step: int | None) -> Drawing | None:
    """Flip rate by sign over the steps that have a ledger."""
    figure, keys = figures.blank("rollout batch", "share of tokens"), []
    for at, group in enumerate(groups):
        by_step = _ledger_rows(group, tokens.flip_rates)
        for k, name in enumerate(SIGNS.values()):
            rows = {s: row for s, found in by_step.items() for row in found if row.label == name and np.isfinite(row.value.mean)}
            if rows:
                shade = SIGN_COLOUR[name] if len(groups) == 1 else figures.colour(at)
                style = "solid" if len(groups) == 1 or k == 0 else "dot"
                figures.add_interval_points(figure, list(rows), list(rows.values()), _signed(group, name, groups), shade, style)
                keys.append(Key(_signed(group, name, groups), shade, style, with_interval(*list(rows.values())[-1].value)))
    figure.update_yaxes(rangemode="tozero", tickformat=".0%")
    return Drawing(figure, keys) if keys else None


def of_changes(groups: Sequence[Group], step: int | None) -> Drawing | None:
    found = []
    for at, (group, frame) in enumerate(_frames(groups, step)):
        for name, rows in tokens.change_shares(frame).items():
            shade = SIGN_COLOUR[name] if len(groups) == 1 else figures.colour(at)
            if len(groups) == 1 or name == "positive":
                found.append((_signed(group, name, groups), shade, rows))
    return figures.bars(found, y="share of tokens") if found else None


def of_prediction(groups: Sequence[Group], step: int | None) -> Drawing | None:
    found = []
    for at, (group, frame) in enumerate(_frames(groups, step)):
        seen = tokens.prediction(frame)
        if seen is not None:
            label = f"{group.label} step {frame.attrs['step']}"
            text = f"r = {number(seen.correlation, 4)} over {seen.num_tokens:,} tokens"
            xs, ys = seen.sample["predicted"].to_numpy(float), seen.sample["delta"].to_numpy(float)
            found.append((label, figures.colour(at), xs, ys, text))
    return figures.scatter(found, x="predicted change of the log-prob", y="actual change") if found else None


def of_cancellation(groups: Sequence[Group], step: int | None) -> Drawing | None:
    found = []
    for at, (group, frame) in enumerate(_frames(groups, step)):
        rows = [row for row in tokens.cancellation_by_sharing(frame) if row.count]
        if rows:
            found.append((group.label, figures.colour(at), rows))
    return figures.bars(found, y="mean cancellation") if found else None


def of_keys(*names: tuple[str, str], zero: bool = True) -> Draw:
    """Several keys of metrics.jsonl in one chart: (key, label). With several groups each gets a line a key."""

    def draw(groups: Sequence[Group], step: int | None) -> Drawing | None:
        found = []
        for group in groups:
            for key, label in names:
                c = curve(group, key)
                if c is not None:
                    found.append((label if len(groups) == 1 else f"{group.label}: {label}", c))
        return figures.curves(found, zero=zero, markers=True) if found else None

    return draw


def draw(chart: Chart, groups: Sequence[Group], step: int | None = None) -> Drawing | None:
    """A chart of some groups of runs; ``step`` chooses the tokens table (the last one by default)."""
    return chart.draw(groups, step)


def _frames(groups: Sequence[Group], step: int | None) -> list[tuple[Group, pd.DataFrame]]:
    """The tokens of a step, pooled over the runs of each group; prompts of different runs stay apart."""
    out = []
    for group in groups:
        found = [tokens.tokens_of(run, step) for run in group.runs]
        parts = [frame.assign(group=_apart(frame, k)) for k, pair in enumerate(found) if pair is not None for _, frame in [pair]]
        if parts:
            pooled = pd.concat(parts, ignore_index=True)
            pooled.attrs["step"] = next(pair[0] for pair in found if pair is not None)
            out.append((group, pooled))
    return out


def _apart(frame: pd.DataFrame, run: int) -> pd.Series:
    prompt = frame["group"] if "group" in frame else pd.Series(0, index=frame.index)
    return prompt.fillna(-1).astype("int64") + run * 1_000_000


def _ledger_rows(group: Group, number_of: Callable[[pd.DataFrame], list[Row]]) -> dict[int, list[Row]]:
    """Rows of every step that has a tokens table; over seeds where there are several runs, else over prompts."""
    steps = sorted({step for run in group.runs for step in run.steps("tokens")})
    picked = [steps[k] for k in sorted({round(x) for x in np.linspace(0, len(steps) - 1, min(len(steps), MAX_LEDGER_STEPS))})]
    out: dict[int, list[Row]] = {}
    for step in picked:
        found = [number_of(pair[1]) for run in group.runs if (pair := _tokens_at(run, step)) is not None]
        found = [rows for rows in found if rows]
        if found:
            out[step] = found[0] if len(found) == 1 else [_over_runs(list(rows)) for rows in zip(*found)]
    return out


def _tokens_at(run: RunFolder, step: int) -> tuple[int, pd.DataFrame] | None:
    return tokens.tokens_of(run, step) if step in run.steps("tokens") else None


def _over_runs(rows: list[Row]) -> Row:
    values = [row.value.mean for row in rows]
    interval = Interval(float(np.mean(values)), min(values), max(values)) if len(values) == 2 else over_seeds(values)
    return Row(rows[0].label, interval, sum(row.count for row in rows))


def _band(low: Curve, high: Curve) -> Curve:
    return Curve(low.step, (low.mean + high.mean) / 2, low.mean, high.mean, low.runs[:1], "own")


def _signed(group: Group, sign: str, groups: Sequence[Group]) -> str:
    return f"{sign} advantage" if len(groups) == 1 else f"{group.label}, {sign}"


CHARTS: tuple[Chart, ...] = (
    Chart(
        "accuracy",
        "learning",
        "Held-out accuracy",
        "The result. Prompts were never trained on; differences smaller than the band are noise.",
        "Mean reward over held-out prompts. Band: 95%, over prompts for one run, over seeds for three or more (two: their range).",
        of_evals,
        is_wide=True,
    ),
    Chart(
        "reward",
        "learning",
        "Training reward",
        "Should rise; a jagged line is the noise of a small batch, a fall is instability.",
        "Mean of the grader's number over all rollouts of a batch.",
        of_metric("reward/mean"),
    ),
    Chart(
        "entropy",
        "learning",
        "Policy entropy",
        "A slow fall is learning; a drop to zero means the policy stopped exploring, a climb that it falls apart.",
        "Mean over response tokens of the entropy of the sampling distribution, in nats.",
        of_metric("entropy/mean", zero=True),
    ),
    Chart(
        "length",
        "learning",
        "Response length",
        "A drift without a gain in accuracy is the reward or the reduction paying for length.",
        "Mean number of response tokens a rollout.",
        of_metric("rollouts/length"),
    ),
    Chart(
        "grad_norm",
        "learning",
        "Gradient norm",
        "Spikes come before collapses; a flat line at the clip norm means that every step is clipped.",
        "L2 norm of the gradient before clipping, mean over the optimizer steps of a batch.",
        of_metric("loss/grad_norm", zero=True),
    ),
    Chart(
        "pairs_kept",
        "plan",
        "Pairs that meet",
        "1 means that good and bad answers to one prompt are always in the same optimizer step, where their shared tokens can cancel.",
        "Share of same-prompt (positive, negative) pairs of rollouts that one optimizer step holds together.",
        of_metric("plan/pairs_kept", zero=True),
    ),
    Chart(
        "positive_share",
        "plan",
        "Positives in a step",
        "A narrow band means that optimizer steps are balanced alike; a wide one that some see mostly failures.",
        "Share of rollouts with reward above 0.5 in an optimizer step; the band runs from the least to the most positive step of a batch.",
        of_positive_share,
    ),
    Chart(
        "weights",
        "credit",
        "Token weights",
        "A spike at 1 is uniform credit; what is left or right of it is what the credit rules changed.",
        "Weight = credit / advantage, one number a token. The outermost percent is drawn in the outer bins.",
        of_tokens("weights", "weight"),
    ),
    Chart(
        "credit",
        "credit",
        "Token credit",
        "Right of 0 pushes a token up, left of 0 down; the two sides should weigh about the same.",
        "Credit: the signed number a token that the loss gets.",
        of_tokens("advantages", "credit"),
    ),
    Chart(
        "categories",
        "credit",
        "Where the credit goes",
        "Credit on template tokens teaches format; credit on numbers and reasoning words teaches the task.",
        "Share of the sum of |credit| by token category, within the tokens of one sign. Whiskers: 95% bootstrap over prompts.",
        of_categories,
        is_wide=True,
    ),
    Chart(
        "flips",
        "ledger",
        "Flips",
        "0 would mean that every token moved as its own advantage says; what is above is other tokens winning.",
        "Share of tokens whose log-prob moved against the sign of their own advantage. Band: 95% bootstrap over prompts, or over seeds.",
        of_flips,
        is_wide=True,
    ),
    Chart(
        "changes",
        "ledger",
        "Boosted and suppressed",
        "If good and bad answers show like shares, the update does not tell them apart token by token.",
        "Share of tokens whose log-prob rose, fell, or stayed within the noise floor, by the sign of the advantage, at the last ledger step.",
        of_changes,
    ),
    Chart(
        "predicted",
        "ledger",
        "Predicted against actual change",
        "Points on the dotted line: the first-order account explains the update, so its parts can be trusted.",
        "Predicted: first-order change along the actual parameter difference. r: Pearson's correlation over all tokens; points: a sample.",
        of_prediction,
    ),
    Chart(
        "cancellation",
        "ledger",
        "Cancellation by sharedness",
        "Tokens that good and bad answers share should cancel (high); tokens of one side should not (low).",
        "1 - |sum of the classes' parts| / sum of |parts|, mean over tokens; shared means the same prompt, prefix and token.",
        of_cancellation,
    ),
    Chart(
        "residuals",
        "ledger",
        "What is left at shared tokens",
        "0 means that tokens which good and bad answers share cancel; the other lines say which part of the method broke that.",
        "|sum of A alpha| / sum of |A alpha| over the rollouts of a shared trie node, mean over nodes; the others: what each adds.",
        of_keys(
            ("ledger/residual/full", "residual"),
            ("ledger/residual/coupling", "from coupling"),
            ("ledger/residual/clip", "from the clip"),
            ("ledger/residual/length", "from the length"),
        ),
    ),
    Chart(
        "tax",
        "ledger",
        "Learning tax",
        "Change where all answers agree is paid for nothing; change at the forks is what learning is for.",
        "KL(after || before) of an optimizer step, mean over tokens, by context: all rollouts or both signs take this token; forks: they part.",
        of_keys(
            ("ledger/tax/shared", "shared by all"),
            ("ledger/tax/both_signs", "shared by both signs"),
            ("ledger/tax/discriminating", "forks"),
            ("ledger/tax/other", "elsewhere"),
        ),
    ),
    Chart(
        "tax_cumulative",
        "ledger",
        "Learning tax so far",
        "The steeper the shared line against the forks, the more of the training went into what no answer needed changed.",
        "The same KL summed over the optimizer steps that the ledger accounted for, since the start of the run.",
        of_keys(
            ("ledger/tax/cumulative_shared", "shared by all"),
            ("ledger/tax/cumulative_both_signs", "shared by both signs"),
            ("ledger/tax/cumulative_discriminating", "forks"),
            ("ledger/tax/cumulative_other", "elsewhere"),
        ),
    ),
    Chart(
        "drift",
        "ledger",
        "Solution drift",
        "Moves among equally correct solutions: taste, not skill. A method that only removes errors stays near 0.",
        "Mean over a frozen bank of prompts of |change of the log-odds between two verified solutions| since they were first scored.",
        of_keys(
            ("ledger/drift/log_odds_change", "log-odds change"),
        ),
    ),
    Chart(
        "shared_entropy",
        "ledger",
        "Entropy of shared and other tokens",
        "Entropy that falls at shared tokens closes paths that no answer needed closed.",
        "Mean entropy of the policy, in nats, at tokens that two or more rollouts share and at the others.",
        of_keys(("ledger/entropy/shared", "shared"), ("ledger/entropy/other", "not shared")),
    ),
)
