"""Rows of verl's data sets from the prompts of an environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from counterpoise.environments import Environment
from counterpoise.errors import ConfigError
from counterpoise.hosts.verl.conversations import AGENT_LOOP, TurnSettings, environment_of
from counterpoise.maths.reduce import derived_seed
from counterpoise.types import Prompt


def rows(
    environment: Environment | str | Mapping[str, Any], split: str, *, num: int, seed: int = 0
) -> list[dict[str, Any]]:
    """The first ``num`` prompts of a split as rows that verl reads.

    What the environment needs to know of a prompt, its secret too, is in ``extra_info``; the model
    reads ``prompt`` alone. All rollouts of a row play the same episode.

    Args:
        environment: an environment, its name, or a mapping with ``name`` and parameters.
        split: ``train`` or ``test``.
        seed: of the prompts and episodes.

    >>> row = rows("guess", "train", num=1)[0]
    >>> row["prompt"], row["agent_name"]
    ([{'role': 'user', 'content': '1-g:'}], 'counterpoise_turns')
    """
    if isinstance(environment, str | Mapping):
        name = environment if isinstance(environment, str) else environment.get("name", "")
        settings = environment if isinstance(environment, str) else dict(environment)
        environment = environment_of(TurnSettings(settings))
    else:
        name = type(environment).__name__
    prompts = islice(environment.prompts(split, seed), num)
    return [_row(name, k, prompt, seed) for k, prompt in enumerate(prompts)]


def write_rows(
    path: str | Path,
    environment: Environment | str | Mapping[str, Any],
    split: str,
    *,
    num: int,
    seed: int = 0,
) -> None:
    """``rows`` as a parquet file, for ``data.train_files`` or ``data.val_files``."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist(rows(environment, split, num=num, seed=seed))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


def episode_of(row: Mapping[str, Any]) -> tuple[Prompt, int]:
    """The prompt of a row and the seed of its episode."""
    info = row.get("extra_info") or {}
    if "episode" not in info:
        raise ConfigError(
            f"agent loop {AGENT_LOOP!r}: row {info.get('index', '?')} of the data set has no"
            " extra_info.episode. Make the file with counterpoise.hosts.verl.write_rows."
        )
    known = json.loads(info["episode"])
    return Prompt(known["id"], known["text"], known["answer"], known["meta"]), known["seed"]


def _row(name: str, index: int, prompt: Prompt, seed: int) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt.text}],
        "agent_name": AGENT_LOOP,
        "data_source": name,
        "reward_model": {"style": "environment", "ground_truth": prompt.answer},
        "extra_info": {"index": index, "episode": _packed(prompt, index, seed)},
    }


def _packed(prompt: Prompt, index: int, seed: int) -> str:
    """A prompt as text that reads back as the same prompt."""
    known = prompt._asdict() | {"meta": dict(prompt.meta)}
    known["seed"] = derived_seed(seed, index, "episode")
    try:
        text = json.dumps(known, allow_nan=False)
        is_same = json.loads(text) == known
    except (TypeError, ValueError):
        text, is_same = "", False
    if not is_same:
        raise ConfigError(
            f"prompt {prompt.id!r}: its meta does not survive JSON, got {str(prompt.meta)[:80]}."
            " Expected text, finite numbers, lists and mappings with text as keys."
        )
    return text
