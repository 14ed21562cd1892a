"""Dumps of every importer, damaged at random: an import ends in a run folder that opens, or in one
line of a typed error and no folder.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from counterpoise.run.importers.convert import import_run
from counterpoise.run.read import open_run
from counterpoise.viewer.api import batch_info
from counterpoise.viewer.tokens import open_batch

PROMPT, RESPONSE = [5, 6], [7, 8, 9]
HOSTILE = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "text",
    "\x1b[31m\u202e",
    "\ud800",
    [],
    [[]],
    [None],
    ["a", 1],
    {},
    {"name": [1]},
    [1, 2, 3],
    [0.1] * 5,
    [True] * 5,
)


def fuzz(seed: int | str, num: int) -> dict[str, str]:
    """Faults of ``num`` damaged dumps, each with an example; empty is the goal."""
    faults: dict[str, str] = {}
    for case in range(num):
        with tempfile.TemporaryDirectory() as folder:
            draw = random.Random(f"{seed} {case}")
            kind = draw.choice(sorted(WRITERS))
            problem = attempt(kind, draw, Path(folder))
            if problem:
                faults.setdefault(f"{kind}: {problem}", f"case {seed}/{case}")
    return faults


def attempt(kind: str, draw: random.Random, folder: Path) -> str:
    """What is wrong with one import; empty if nothing is."""
    source, target = folder / "dump", folder / "new" / "run"
    source.mkdir()
    WRITERS[kind](draw, source)
    for file in source.iterdir():
        if draw.random() < 0.3:
            damage_bytes(draw, file)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batches = import_run(kind, source, target)
    except (ValueError, FileNotFoundError) as error:
        return line_trouble(error) or ("it left a folder" if target.parent.exists() else "")
    except Exception:
        return traceback.format_exc(limit=-3)
    return run_trouble(target, batches)


def line_trouble(error: Exception) -> str:
    """Why an error is not one line of ours."""
    line = str(error)
    is_line = line.startswith("import: ") and "\n" not in line and line.isprintable()
    return "" if is_line and len(line) < 600 else f"not a line of ours: {error!r}"


def run_trouble(target: Path, batches: dict[int, int]) -> str:
    """Why the run folder does not open in the viewer."""
    try:
        run = open_run(target)
        for batch in batches:
            batch_info(open_batch(run, batch))
    except Exception:
        return traceback.format_exc(limit=-3)
    return "; ".join(run.problems)


def damage_bytes(draw: random.Random, file: Path) -> None:
    """Bytes changed, cut off or added."""
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice([0, 1, 1, 5, 50])):
        if data:
            data[draw.randrange(len(data))] = draw.randrange(256)
    cut = draw.choice([None, None, draw.randrange(len(data) + 1)])
    file.write_bytes(bytes(data[:cut]) + draw.choice([b"", b"", b"\xff\xfe", b"[" * 200_000]))


def damage(draw: random.Random, value: Any, depth: int = 0) -> Any:
    """A copy with one value replaced, removed, renamed or repeated somewhere inside."""
    if depth > 3 or not isinstance(value, (dict, list)) or not value or draw.random() < 0.15:
        return draw.choice(HOSTILE)
    value = copy.copy(value)
    at = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
    act = draw.random()
    if act < 0.2:
        del value[at]
    elif act < 0.3 and isinstance(value, list):
        value.insert(at, draw.choice(HOSTILE))
    else:
        value[at] = damage(draw, value[at], depth + 1)
    return value


def prime_rl_row(draw: random.Random) -> dict[str, Any]:
    size, mask = 5, [False, False, True, draw.random() < 0.8, True]
    names = ("advantages", "rewards", "inference_logprobs", "trainer_logprobs", "entropy")
    columns = {name: [round(draw.gauss(0, 1), 3) for _ in range(size)] for name in names}
    return {"step": 3, "token_ids": PROMPT + RESPONSE, "loss_mask": mask, **columns}


def nemo_rl_row(draw: random.Random) -> dict[str, Any]:
    row = {
        "rewards": draw.random(),
        "input_lengths": 5,
        "token_ids": [*PROMPT, *RESPONSE, 0],
        "token_loss_mask": [0, 0, 1, 1, 1, 0],
        "sample_loss_mask": 1.0,
        "advantages": [0.5] * 6,
        "generation_logprobs": [-0.1] * 6,
        "prev_logprobs": [-0.2] * 6,
    }
    return {key: [value] for key, value in row.items()} if draw.random() < 0.5 else row


def verl_row(draw: random.Random) -> dict[str, Any]:
    row = {"input": "what is", "output": "five plus one", "gts": "6", "score": 1.0, "step": 2}
    return row | {"uid": f"a{draw.randrange(2)}_{draw.randrange(4)}_0", "acc": True}


def write_lines(
    draw: random.Random, file: Path, make: Callable[[random.Random], dict[str, Any]]
) -> None:
    rows: list[Any] = [make(draw) for _ in range(3)]
    for _ in range(draw.choice([0, 1, 1, 1, 2])):
        at = draw.randrange(len(rows))
        rows[at] = damage(draw, rows[at])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_slime(draw: random.Random, folder: Path) -> None:
    data: Any = {
        "tokens": [torch.tensor(PROMPT + RESPONSE), torch.tensor([*PROMPT, 7])],
        "response_lengths": [3, 1],
        "rewards": [0.7, -0.7],
        "raw_reward": [9.0, 1.0, 9.0, 0.0],
        "partition": [1, 3],
        "truncated": [0, 1],
        "loss_masks": [torch.ones(3), torch.ones(1)],
        "rollout_log_probs": [torch.tensor([-0.1, -0.2, -0.3]), torch.tensor([-0.1])],
        "advantages": [torch.full((3,), 0.7), torch.full((1,), -0.7)],
    }
    whole: Any = {"rollout_id": 5, "rank": 0, "rollout_data": data}
    for _ in range(draw.choice([0, 1, 1, 2])):
        whole = damage(draw, whole)
    torch.save(whole, folder / "5_0.pt")


def write_trl(draw: random.Random, folder: Path) -> None:
    chat = [{"role": "user", "content": "what is"}]
    columns: dict[str, list[Any]] = {
        "step": [4, 4],
        "prompt": draw.choice([["what is", "what is"], [chat, chat]]),
        "completion": ["five plus one", "six"],
        "accuracy": [1.0, 0.0],
        "advantage": [0.7, -0.7],
    }
    for _ in range(draw.choice([0, 1, 1, 2])):
        name = draw.choice(list(columns))
        value = draw.choice(HOSTILE)
        columns[name] = [value, draw.choice([value, None])]
        if draw.random() < 0.3:
            del columns[name]
    file, compression = folder / "completions_00004.parquet", draw.choice(["none", "zstd"])
    try:
        pq.write_table(pa.table(columns), file, compression=compression)
    except (pa.ArrowException, OverflowError, ValueError):  # no such file exists
        pq.write_table(pa.table({"prompt": ["what is"], "completion": ["six"]}), file)


WRITERS: dict[str, Callable[[random.Random, Path], None]] = {
    "prime-rl": lambda draw, folder: write_lines(draw, folder / "rank_0.jsonl", prime_rl_row),
    "nemo-rl": lambda draw, folder: write_lines(
        draw, folder / "train_data_step3.jsonl", nemo_rl_row
    ),
    "verl": lambda draw, folder: write_lines(draw, folder / "2.jsonl", verl_row),
    "slime": write_slime,
    "trl": write_trl,
}
