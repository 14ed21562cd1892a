"""Other trainers' dumps as a run folder, so that the viewer, the report and the audit serve their
runs too.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from counterpoise.errors import nearest
from counterpoise.run import write
from counterpoise.run.files import Columns, write_folder
from counterpoise.run.importers.dump import Encode, Imported, Reader
from counterpoise.run.importers.turns import has_turns, turn_columns, turns_of
from counterpoise.text import visible

log = logging.getLogger("counterpoise.run")
FORMATS = {  # name -> module with ``read``, files in a folder
    "prime-rl": ("prime_rl", "rank_*.jsonl"),
    "nemo-rl": ("nemo_rl", "train_data_step*.jsonl"),
    "slime": ("slime", "*.pt"),
    "trl": ("trl", "*.parquet"),
    "verl": ("verl", "*.jsonl"),
}
TOKEN_LISTS = ("sampler_logp", "trainer_logp", "entropy", "ratio", "credit", "is_clipped")
ROLLOUT_VALUES = ("reward", "advantage")
Decode = Callable[[list[int]], str]
Categories = Callable[[Sequence[str]], list[str]]


def import_run(
    kind: str,
    source: Path,
    out: Path,
    *,
    tokenizer: Path | None = None,
    rewards: Sequence[str] = (),
    categories: Categories | None = None,
) -> dict[int, int]:
    """Read a dump and write a run folder, whole or not at all; returns how many rollouts each batch
    has.

    Args:
        kind: ``prime-rl``, ``nemo-rl``, ``slime``, ``trl`` or ``verl``.
        source: a file of the dump, or a folder that holds some.
        out: the run folder to make; must not hold anything yet.
        tokenizer: a ``tokenizer.json``, or a folder with one, for the texts of token ids.
        rewards: for ``trl`` and ``verl``, columns whose sum is the reward; by default all numeric
            ones, or verl's ``score``.
        categories: token texts -> category names.
    """
    if kind not in FORMATS:
        raise ValueError(f"import: unknown format {kind!r}. {nearest(kind, FORMATS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"import: {str(out)!r} is not empty. Choose another folder with --out.")
    module, pattern = FORMATS[kind]
    read: Reader = importlib.import_module(f"counterpoise.run.importers.{module}").read
    decode, encode = _tokenizer(tokenizer) if tokenizer else (None, None)
    by_batch: dict[int, list[Imported]] = defaultdict(list)
    num_empty = 0
    for rollout in read(_files(source, pattern), encode, rewards):
        if rollout.columns["token_ids"]:
            by_batch[rollout.batch].append(rollout)
        else:
            num_empty += 1
    if not by_batch:
        raise ValueError(f"import: no rollouts with tokens in {str(source)!r}.")
    if num_empty:
        log.warning("import: %d rollouts without a token are left out.", num_empty)

    facts = {"imported_from": kind, "method": {"name": kind}, "not_in_dump": _absent(by_batch)}

    def fill(folder: Path) -> None:
        for batch in sorted(by_batch):
            _write_batch(folder, batch, by_batch[batch], decode, categories)
        write.create_run(folder, None, facts)

    write_folder(out, fill)
    return {batch: len(rows) for batch, rows in sorted(by_batch.items())}


def _absent(by_batch: Mapping[int, list[Imported]]) -> list[str]:
    """What no rollout of the dump has, of what pages show."""
    rows = [row for rows in by_batch.values() for row in rows]
    lacks = [name for name in ROLLOUT_VALUES if all(getattr(row, name) is None for row in rows)]
    return lacks + [name for name in TOKEN_LISTS[:-1] if not any(name in r.columns for r in rows)]


def _write_batch(
    out: Path,
    batch: int,
    rows: list[Imported],
    decode: Decode | None,
    categories: Categories | None,
) -> None:
    groups: dict[Hashable, int] = {}
    keys = [_group(row) for row in rows]
    group_N = [groups.setdefault(key, len(groups)) for key in keys]
    texts = _texts(rows, decode)
    prompts = [
        row.prompt if row.prompt is not None else decode(row.prompt_ids) if decode else None
        for row in rows
    ]
    rollouts = _rollout_columns(batch, rows, group_N, prompts, texts)
    write.write_rollout_columns(out, batch, rollouts)
    write.write_tokens(out, batch, _token_columns(batch, rows, group_N, texts, categories))
    write.append_row(out, "metrics", batch, _metrics(rows))


def _group(row: Imported) -> Hashable:
    if row.group is not None:
        return row.group
    return row.prompt if row.prompt is not None else tuple(row.prompt_ids)


def _rollout_columns(
    batch: int,
    rows: list[Imported],
    group_N: list[int],
    prompts: list[str | None],
    texts: list[list[str]] | None,
) -> Columns:
    advantage_N = [row.advantage for row in rows]
    has_advantage = any(value is not None for value in advantage_N)
    return {
        "batch": [batch] * len(rows),
        "rollout": list(range(len(rows))),
        "group": group_N,
        "prompt_id": [f"prompt-{group}" for group in group_N],
        "prompt": prompts,
        "answer": [row.answer for row in rows],
        "text": [
            row.text if row.text is not None else "".join(texts[k]) if texts else None
            for k, row in enumerate(rows)
        ],
        "reward": _floats(row.reward for row in rows),
        **({"advantage": _floats(advantage_N)} if has_advantage else {}),
        "stop_reason": [row.stop_reason for row in rows],
        "prompt_ids": [row.prompt_ids for row in rows],
        **{
            name: [row.columns.get(name) for row in rows]
            for name in ("token_ids", "loss_mask", *TOKEN_LISTS[:3], "credit")
        },
        "weight": [_weights(row) for row in rows],
        **turn_columns(rows, texts),
    }


def _token_columns(
    batch: int,
    rows: list[Imported],
    group_N: list[int],
    texts: list[list[str]] | None,
    categories: Categories | None,
) -> dict[str, list[Any]]:
    length_N = [len(row.columns["token_ids"]) for row in rows]

    def spread(values: Sequence[Any]) -> list[Any]:
        return [value for value, length in zip(values, length_N) for _ in range(length)]

    def flat(name: str) -> list[Any]:
        return [
            value
            for row, length in zip(rows, length_N)
            for value in row.columns.get(name) or [None] * length
        ]

    advantage_N = [row.advantage for row in rows]
    out = {
        "batch": spread([batch] * len(rows)),
        "group": spread(group_N),
        "rollout": spread(range(len(rows))),
        "position": [t for length in length_N for t in range(length)],
        "token_id": flat("token_ids"),
        "loss_mask": flat("loss_mask"),
        "reward": _floats(spread([row.reward for row in rows])),
        "advantage": _floats(spread(advantage_N)),
        "sign": spread(
            [0 if a is None or math.isnan(a) else (a > 0) - (a < 0) for a in advantage_N]
        ),
        "weight": [w for row, n in zip(rows, length_N) for w in _weights(row) or [None] * n],
    }
    lacking = {"advantage": ("advantage", "sign", "weight"), "reward": ("reward",)}
    for name, columns in lacking.items():
        if all(getattr(row, name) is None for row in rows):
            out = {key: value for key, value in out.items() if key not in columns}
    out |= {name: flat(name) for name in TOKEN_LISTS if any(name in row.columns for row in rows)}
    if texts:
        out["text"] = [text for row in texts for text in row]
    if has_turns(rows):
        out["turn"] = [turn for row in rows for turn in turns_of(row.columns["loss_mask"])]
    return out | _derive(out, categories)


def _derive(columns: dict[str, list[Any]], categories: Categories | None) -> dict[str, list[Any]]:
    """Columns that follow from others."""
    out: dict[str, list[Any]] = {}
    if "sampler_logp" in columns:
        out["confidence"] = [
            None if v is None else math.exp(min(v, 0.0)) for v in columns["sampler_logp"]
        ]
    if "ratio" not in columns and {"sampler_logp", "trainer_logp"} <= set(columns):
        pairs = zip(columns["trainer_logp"], columns["sampler_logp"])
        out["ratio"] = [
            None if a is None or b is None else math.exp(min(a - b, 50.0)) for a, b in pairs
        ]
    if "text" in columns and categories is not None:
        words = list(dict.fromkeys(columns["text"]))
        known = dict(zip(words, categories(words)))
        out["category"] = [known[text] for text in columns["text"]]
    return out


def _texts(rows: list[Imported], decode: Decode | None) -> list[list[str]] | None:
    if all("text" in row.columns for row in rows):
        return [row.columns["text"] for row in rows]
    if decode is None:
        return None
    known = {i: decode([i]) for i in {i for row in rows for i in row.columns["token_ids"]}}
    return [[known[i] for i in row.columns["token_ids"]] for row in rows]


def _weights(row: Imported) -> Sequence[float | None] | None:
    """credit / advantage; 1 where the dump has one advantage per rollout, missing where that is
    0; None where it has none.
    """
    credit = row.columns.get("credit")
    if row.advantage is None:
        return None
    if credit is None:
        return [1.0] * len(row.columns["token_ids"])
    return [None if v is None or not row.advantage else v / row.advantage for v in credit]


def _metrics(rows: list[Imported]) -> dict[str, float]:
    rewards = [row.reward for row in rows if row.reward is not None]
    lengths = [len(row.columns["token_ids"]) for row in rows]
    entropy = [
        v
        for row in rows
        for v, keep in zip(row.columns.get("entropy") or [], row.columns["loss_mask"])
        if keep and v is not None
    ]
    out = {
        "rollouts/num": len(rows),
        "rollouts/length": sum(lengths) / len(lengths),
        "rollouts/num_tokens": sum(lengths),
    }
    out |= {"reward/mean": sum(rewards) / len(rewards)} if rewards else {}
    return out | ({"entropy/mean": sum(entropy) / len(entropy)} if entropy else {})


def _files(source: Path, pattern: str) -> list[Path]:
    if source.is_file():
        return [source]
    files = sorted(source.rglob(pattern)) if source.is_dir() else []
    if not files:
        raise ValueError(
            f"import: no file at {str(source)!r}"
            + (f" matches {pattern}." if source.is_dir() else ".")
        )
    return files


def _tokenizer(path: Path) -> tuple[Decode, Encode]:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"import: no tokenizer at {str(file)!r}. Give a tokenizer.json or a folder that holds"
            " one."
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(
            f"import: {str(file)!r} is not a tokenizer.json ({visible(error)})."
        ) from None

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    def encode(text: str) -> tuple[list[int], list[str]]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ends = [0, *(end for _, end in encoding.offsets)]
        return encoding.ids, [text[start:end] for start, end in itertools.pairwise(ends)]

    return decode, encode


def _floats(values: Iterable[float | None]) -> pa.Array:
    """A column of numbers, also where none is known."""
    return pa.array(list(values), pa.float64())
