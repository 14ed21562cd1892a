"""What the token viewer asks for, as JSON and packed numbers: the run, the prompts of a batch,
columns of a prompt, one token.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from counterpoise.report.runs import eval_series, final_of, method_name, seed_of
from counterpoise.run import parquet
from counterpoise.run.read import RunFolder, batch_files
from counterpoise.run.schema import (
    PART_PREFIX,
    ROLLOUT_COLUMNS,
    TOKEN_COLUMNS,
    TOKEN_READ_COLUMNS,
    TOKEN_TURN_COLUMNS,
)
from counterpoise.run.solved import SUCCESS_COLUMN
from counterpoise.viewer.replays import PREFIX
from counterpoise.viewer.tokens import BatchTokens, Column
from counterpoise.viewer.turns import has_turns

DIVERGING = (
    *("credit", "delta", "predicted", "own_head", "own", "others", "coef"),
    *("advantage", "turn_advantage", "sampler_gap", "teacher_gap"),
)
SEQUENTIAL = (
    "weight",
    "entropy",
    "confidence",
    "cancellation",
    "ratio",
    "kl",
    "value",
    "importance",
)
QUANTILE = 0.98  # colours saturate there
PACKED = {"float32": "float32", "float64": "float64", "int32": "int32", "int64": "float64"}


def run_info(run: RunFolder) -> dict[str, Any]:
    """Name, method, batches, the meaning of every column, what is missing."""
    with_tokens = set(run.batches("tokens"))
    task = run.config.get("task")
    return {
        "name": run.name,
        "method": method_name(run),
        "task": str(task.get("name", "")) if isinstance(task, dict) else "",
        "seed": _plain(seed_of(run)),
        "batches": [
            {"batch": batch, "has_tokens": batch in with_tokens}
            for batch in sorted(with_tokens.union(run.batches("rollouts")))
        ],
        "evals": run.batches("evals"),
        "descriptions": (ROLLOUT_COLUMNS | TOKEN_COLUMNS | TOKEN_TURN_COLUMNS | TOKEN_READ_COLUMNS),
        "problems": list(run.problems),
    }


def run_line(run: RunFolder) -> dict[str, Any]:
    """A run in a list of runs."""
    evals, asked = eval_series(run), run.config.get("num_batches")
    return {
        "name": run.name,
        "method": method_name(run),
        "seed": _plain(seed_of(run)),
        "batches": len(run.metrics),
        "asked": _plain(asked),
        "accuracy": _number(float(evals.iloc[-1])) if len(evals) else None,
        "reward": _number(final_of(run, "reward/mean")) if "reward/mean" in run.metrics else None,
        "tokens": len(run.batches("tokens")),
    }


def batch_info(tokens: BatchTokens) -> dict[str, Any]:
    """Prompts and rollouts of a batch, its columns with their colour scales, the vocabulary of its
    token texts.
    """
    return {
        "batch": tokens.batch,
        "source": tokens.source,
        "columns": [
            scale(tokens, name)
            for name in tokens.names
            if name not in ("text", "batch", "group", "rollout")
        ],
        "opens_on": opens_on(tokens),
        "has_turns": has_turns(tokens),
        "texts": tokens.column("text").words or [],
        "groups": _groups(tokens),
        "problems": list(tokens.run.problems),
    }


def pack_column(tokens: BatchTokens, group: int, name: str) -> tuple[str, bytes]:
    """A column of one prompt's tokens as little-endian numbers: (dtype, bytes)."""
    value = tokens.column(name).value_T[tokens.span(group)]
    kind = PACKED.get(str(value.dtype), "float64")
    return kind, np.ascontiguousarray(value, np.dtype(kind).newbyteorder("<")).tobytes()


def token(tokens: BatchTokens, group: int, at: int) -> dict[str, Any]:
    """Every number of one token, the ``at``-th of its prompt; what is missing is null."""
    part = tokens.span(group)
    if not 0 <= at < part.stop - part.start:
        raise ValueError(
            f"prompt {group} of batch {tokens.batch} has tokens 0 to {part.stop - part.start - 1},"
            f" no token {at}."
        )
    return {
        name: _value(tokens.column(name), part.start + at)
        for name in ["text", *(n for n in tokens.names if n != "text")]
    }


def scale(tokens: BatchTokens, name: str) -> dict[str, Any]:
    """How a column is coloured: its kind, and where its colours end."""
    if name in ("category", "change"):
        return {"name": name, "kind": "category", "words": tokens.column(name).words or []}
    kind = (
        "diverging"
        if name in DIVERGING or name.startswith((PART_PREFIX, PREFIX))
        else "sequential"
        if name in SEQUENTIAL
        else "none"
    )
    value = np.asarray(tokens.column(name).value_T, float) if kind != "none" else np.zeros(0)
    value = value[np.isfinite(value)]
    if not len(value):
        return {"name": name, "kind": "none"}
    if name in tokens.replays:  # methods side by side share a scale
        ends = [np.abs(tokens.column(other).value_T) for other in tokens.replays]
        limit = max(float(np.nanquantile(end, QUANTILE)) for end in ends if np.isfinite(end).any())
        return {"name": name, "kind": kind, "limit": limit}
    if kind == "diverging":
        return {"name": name, "kind": kind, "limit": float(np.quantile(np.abs(value), QUANTILE))}
    low, high = (float(x) for x in np.quantile(value, [1 - QUANTILE, QUANTILE]))
    return {"name": name, "kind": kind, "low": low, "high": high}


def opens_on(tokens: BatchTokens) -> str:
    """The colour to begin with: credit; where no rollout's tokens differ in it, what happened to
    them; of samples without credit their entropy.
    """
    known = [name for name in ("credit", "delta", "entropy") if name in tokens.names]
    if known[:2] == ["credit", "delta"] and not _varies(tokens, "credit"):
        return "delta"
    return known[0] if known else ""


def _varies(tokens: BatchTokens, name: str) -> bool:
    """Whether a column tells tokens of some rollout apart."""
    value_T = np.nan_to_num(np.asarray(tokens.column(name).value_T, float))
    first_T = np.repeat(value_T[tokens.start_N[:-1]], np.diff(tokens.start_N))
    return bool(np.abs(value_T - first_T).max(initial=0.0) > 1e-6)


def prompt_history(run: RunFolder, prompt_id: str) -> list[dict[str, Any]]:
    """A prompt wherever it was sampled: the batches and evaluations, and how often it was
    solved.
    """
    out = []
    for kind, folder in (("batch", "rollouts"), ("eval", "evals")):
        for batch, file in batch_files(run.path, folder).items():
            rows = _prompt_rows(file, file.stat().st_mtime_ns)
            prompts = _solved_by_prompt(run, rows) if rows else {}
            if prompt_id in prompts:
                out.append({"kind": kind, "batch": batch, **prompts[prompt_id]})
    return sorted(out, key=lambda row: row["batch"])


@lru_cache(4096)
def _prompt_rows(file: Path, written_ns: int) -> dict[str, list[Any]]:
    """Prompt, reward and success of each rollout of a file; read once while the file stays. A file
    that cannot be read tells nothing.
    """
    needed = ("prompt_id", "group", "reward")
    try:
        table = parquet.read_columns(file, (*needed, SUCCESS_COLUMN))
    except parquet.BROKEN:
        return {}
    return table.to_pydict() if set(needed) <= set(table.column_names) else {}


def _solved_by_prompt(run: RunFolder, rows: dict[str, list[Any]]) -> dict[str, dict[str, int]]:
    """prompt_id -> its group, how many of its rollouts are solved, and of how many."""
    out: dict[str, dict[str, int]] = {}
    for prompt_id, group, solved in zip(rows["prompt_id"], rows["group"], run.solved(rows)):
        one = out.setdefault(str(prompt_id), {"group": group, "solved": 0, "num": 0})
        one["solved"] += solved
        one["num"] += 1
    return out


def _groups(tokens: BatchTokens) -> list[dict[str, Any]]:
    """Prompts with their rollouts, in order; texts of prompts come from the rollouts table where
    there is one.
    """
    about = _rollout_texts(tokens)
    numbers = {
        "reward": tokens.first("reward"),
        "advantage": tokens.first("advantage"),
        "flips": tokens.sums("is_flip"),
    }
    sign_N, mixed_N, length_N = tokens.sign_N, tokens.is_mixed_N, np.diff(tokens.start_N)
    columns: dict[str, Any] = {"reward": numbers["reward"]}
    if any(SUCCESS_COLUMN in row for row in about.values()):
        told = [about.get(row, {}).get(SUCCESS_COLUMN) for row in tokens.rollout_N.tolist()]
        columns[SUCCESS_COLUMN] = told
    solved_N = tokens.run.solved(columns)
    out: dict[int, dict[str, Any]] = {}
    for at, (group, rollout) in enumerate(zip(tokens.group_N.tolist(), tokens.rollout_N.tolist())):
        texts = about.get(rollout, {})
        entry = out.setdefault(
            group,
            {
                "group": group,
                **{k: texts.get(k) for k in ("prompt_id", "prompt", "answer")},
                "rollouts": [],
            },
        )
        entry["rollouts"].append(
            {
                "rollout": rollout,
                "length": int(length_N[at]),
                "sign": int(sign_N[at]),
                "mixed": bool(mixed_N[at]),
                "solved": solved_N[at],
                **{name: _number(value[at]) for name, value in numbers.items()},
                "stop_reason": texts.get("stop_reason"),
            }
        )
    return list(out.values())


def _rollout_texts(tokens: BatchTokens) -> dict[int, dict[str, Any]]:
    folder = "evals" if tokens.source == "evals" else "rollouts"
    columns = ("rollout", "prompt_id", "prompt", "answer", "stop_reason", SUCCESS_COLUMN)
    table = tokens.run.table(folder, tokens.batch, columns)
    if table is None or "rollout" not in table.column_names:
        return {}
    return {
        row["rollout"]: {
            k: v if v is None or k == SUCCESS_COLUMN else str(v) for k, v in row.items()
        }
        for row in table.to_pylist()
    }


def _value(column: Column, at: int) -> str | bool | int | float | None:
    value = column.value_T[at]
    if column.words is not None:
        return column.words[value] if value >= 0 else None
    if column.is_flag:
        return bool(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else _number(value)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _plain(value: object) -> int | float | str | None:
    return value if isinstance(value, (int, float, str)) else None
