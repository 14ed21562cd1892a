"""Samples of a batch: a few rollouts with every token coloured by its credit, the tokens with the
most credit, the plan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from counterpoise.report.overview import Table
from counterpoise.report.tokens import Frame, TopToken, has, to_types, tokens_of, top_tokens
from counterpoise.run.read import RunFolder
from counterpoise.run.solved import SUCCESS_COLUMN
from counterpoise.text import number, percent, shorten, visible

NUMBERS = ("group", "rollout", "reward", "advantage")
MAX_TOKENS = 500
MAX_REPLY = 400  # characters of a reply that are shown
BINS = 10


class Token(NamedTuple):
    """A token as the page shows it: text, colour class, numbers on hover."""

    text: str
    css: str
    title: str


class Sample(NamedTuple):
    """One rollout."""

    rollout: int
    reward: float
    advantage: float
    num_tokens: int
    stop_reason: str
    tokens: list[Token]
    num_left_out: int


class SamplePrompt(NamedTuple):
    """A prompt with its best and its worst rollout, what colours their tokens, and the number at
    which colours end.
    """

    batch: int
    coloured_by: str
    limit: float
    group: int
    prompt: str
    answer: str
    solved: str
    samples: list[Sample]


class Tops(NamedTuple):
    """Tokens with the largest and the smallest sum of credit in a batch; ``scale`` is the largest
    bound of their means.
    """

    batch: int
    up: list[TopToken]
    down: list[TopToken]
    scale: float


class Detail(NamedTuple):
    """What is shown of a group's first run: the last plan, the tokens with the most credit,
    samples.
    """

    label: str
    plan: tuple[int, Table] | None
    tops: Tops | None
    samples: list[SamplePrompt]


def detail(label: str, run: RunFolder, batch: int | None, num: int) -> Detail:
    """Plan, top tokens and ``num`` sample prompts of a run."""
    return Detail(label, plan_table(run), tops(run, batch), sample_prompts(run, batch, num))


def sample_prompts(run: RunFolder, batch: int | None = None, num: int = 3) -> list[SamplePrompt]:
    """Prompts of the last batch, those answered both ways first; their best and worst rollout."""
    at = _batch(run, batch)
    if at is None:
        return []
    columns = (
        "group",
        "rollout",
        "prompt",
        "answer",
        "text",
        "reward",
        SUCCESS_COLUMN,
        "advantage",
        "stop_reason",
        "token_ids",
        "turn",
        "turn_reply",
    )
    table = run.table("rollouts", at, columns)
    if table is None or not {"group", "rollout", "reward", "text"} <= set(table.column_names):
        return []
    rollouts = to_types(table.to_pandas(), NUMBERS).dropna(subset=["group", "rollout", "reward"])
    of_batch = tokens_of(run, at) if at in run.batches("tokens") else None
    tokens = of_batch[1] if of_batch else None
    column = colour_column(tokens)
    rollouts["solved"] = run.solved(rollouts)
    mixed = (
        rollouts.groupby("group")["solved"]
        .agg(lambda solved: min(solved.mean(), 1 - solved.mean()))
        .sort_values(ascending=False, kind="stable")
    )
    return [
        _prompt(at, rollouts[rollouts["group"] == group], tokens, column)
        for group in mixed.index[:num]
    ]


def diverging(value: float, limit: float) -> str:
    """Colour class of a signed number: blue above 0, orange below.

    >>> diverging(0.5, 1.0), diverging(-9.0, 1.0), diverging(0.0, 1.0)
    ('d-p5', 'd-n10', 'd-0')
    """
    if not np.isfinite(value) or limit <= 0:
        return ""
    level = min(BINS, int(np.ceil(abs(value) / limit * BINS - 1e-9)))
    return "d-0" if level == 0 else f"d-{'p' if value > 0 else 'n'}{level}"


def colour_column(tokens: Frame | None) -> str:
    """Credit, where the method told tokens of a rollout apart; under uniform credit what happened
    to them says more.
    """
    if tokens is None or not has(tokens, "credit"):
        return ""
    spread = tokens.groupby("rollout")["credit"].agg(lambda credit: credit.max() - credit.min())
    return "delta" if float(spread.max()) < 1e-6 and has(tokens, "delta") else "credit"


def colour_limit(tokens: Frame, column: str) -> float:
    """The 98th percentile of the absolute value: where the colour scale ends."""
    return float(np.quantile(tokens[column].abs().dropna(), 0.98)) if column else 1.0


def tops(run: RunFolder, batch: int | None = None) -> Tops | None:
    """The batch, and its tokens with the largest and smallest sum of credit."""
    of_batch = tokens_of(run, batch)
    up, down = top_tokens(of_batch[1]) if of_batch else ([], [])
    if not of_batch or not (up or down):
        return None
    bounds = [
        abs(bound) for token in [*up, *down] for bound in token.mean_credit if np.isfinite(bound)
    ]
    return Tops(of_batch[0], up, down, max(bounds, default=1.0))


def plan_table(run: RunFolder) -> tuple[int, Table] | None:
    """The last plan: rows, prompts, tokens of the model, positives and sum of advantage of each
    update.
    """
    for batch in reversed(run.batches("plan")):
        plan, table = (
            run.plan(batch),
            run.table(
                "rollouts", batch, ("group", "reward", SUCCESS_COLUMN, "advantage", "loss_mask")
            ),
        )
        if plan is None:
            continue
        rollouts = (
            to_types(table.to_pandas(), NUMBERS)
            if table is not None and {"group", "reward"} <= set(table.column_names)
            else None
        )
        if rollouts is not None:
            rollouts["solved"] = run.solved(rollouts)
        rows = [_plan_row(k, part, rollouts) for k, part in enumerate(plan["rows"])]
        head = ["update", "rollouts", "prompts", "tokens", "positive share", "sum of advantage"]
        return batch, Table(head, rows, [""] * len(rows), numeric=(1, 2, 3, 4, 5))
    return None


def _batch(run: RunFolder, batch: int | None) -> int | None:
    if batch is not None:
        return batch
    both = sorted(set(run.batches("tokens")) & set(run.batches("rollouts"))) or run.batches(
        "rollouts"
    )
    return both[-1] if both else None


def _prompt(batch: int, rows: Frame, tokens: Frame | None, column: str) -> SamplePrompt:
    by = ["solved", "reward"]
    best = rows.sort_values(by, ascending=False, kind="stable").index[0]
    worst = rows.sort_values(by, kind="stable").index[0]
    first = rows.iloc[0]
    return SamplePrompt(
        batch=batch,
        limit=colour_limit(tokens, column) if tokens is not None else 1.0,
        coloured_by={"credit": "credit", "delta": "the change of their log-prob"}.get(column, ""),
        group=int(first["group"]),
        prompt=visible(first.get("prompt"), "\n"),
        answer=visible(first.get("answer"), "\n"),
        solved=f"{int(rows['solved'].sum())} of {len(rows)}",
        samples=[
            _sample(rows.loc[at].to_dict(), tokens, column) for at in dict.fromkeys([best, worst])
        ],
    )


def _sample(row: dict[str, Any], tokens: Frame | None, column: str) -> Sample:
    own = (
        tokens[tokens["rollout"] == row["rollout"]]
        if tokens is not None and "rollout" in tokens
        else None
    )
    if own is not None and len(own) and "text" in own:
        parts = _with_replies(own, row, column, colour_limit(tokens, column))
        left_out = max(0, len(own) - MAX_TOKENS)
    else:
        parts, left_out = [Token(visible(row["text"], "\n"), "", "")], 0
    return Sample(
        rollout=int(row["rollout"]),
        reward=float(row["reward"]),
        advantage=float(row.get("advantage", np.nan)),
        num_tokens=_num_tokens(row),
        stop_reason=visible(row.get("stop_reason")),
        tokens=parts,
        num_left_out=left_out,
    )


def _num_tokens(row: dict[str, Any]) -> int:
    """Tokens that the model wrote."""
    turns, ids = row.get("turn"), row.get("token_ids")
    if isinstance(turns, np.ndarray) and np.issubdtype(turns.dtype, np.number):
        return int((turns >= 0).sum())
    return len(ids) if ids is not None else 0


def _with_replies(own: Frame, row: dict[str, Any], column: str, limit: float) -> list[Token]:
    """Tokens of a rollout; after each turn what the environment said, cut where it is long."""
    replies = row.get("turn_reply")
    replies = list(replies) if isinstance(replies, np.ndarray) and "turn" in own else []
    out, rows = [], own.head(MAX_TOKENS).to_dict("records")
    for at, token in enumerate(rows):
        out.append(_token(token, column, limit))
        turn = token.get("turn")
        ends = at + 1 < len(rows) and rows[at + 1].get("turn") != turn
        if ends and isinstance(turn, (int, float)) and 0 <= turn < len(replies):
            text = visible(shorten(str(replies[int(turn)]), MAX_REPLY), "\n")
            out.append(Token(text, "reply", f"reply to turn {int(turn)}"))
    return out


def _token(token: dict[Any, Any], column: str, limit: float) -> Token:
    credit, delta = token.get("credit", np.nan), token.get("delta", np.nan)
    text = visible(token["text"], "\n").replace("\n", "⏎\n")
    return Token(
        text,
        diverging(token.get(column, np.nan), limit),
        f"credit {number(credit)}, change of the log-prob {number(delta)}",
    )


def _plan_row(at: int, part: list[int], rollouts: Frame | None) -> list[str]:
    if rollouts is None or max(part, default=-1) >= len(rollouts):
        return [str(at), str(len(part)), "–", "–", "–", "–"]
    rows = rollouts.iloc[part]
    tokens = f"{sum(map(np.count_nonzero, rows['loss_mask'])):,}" if "loss_mask" in rows else "–"
    advantage = (
        number(float(rows["advantage"].sum()), scale=float(rows["advantage"].abs().sum()))
        if "advantage" in rows
        else "–"
    )
    return [
        str(at),
        str(len(part)),
        str(rows["group"].nunique()),
        tokens,
        percent(float(rows["solved"].mean())),
        advantage,
    ]
