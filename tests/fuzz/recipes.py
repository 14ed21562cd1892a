"""Recipes and overrides that nobody would write: each trains up to the model, or says one line."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from unittest import mock

import yaml

import counterpoise
from fuzz.mutate import STRANGE, fault, mutate_bytes, mutate_value

RECIPES = sorted((Path(counterpoise.__file__).parent / "recipes").glob("*.yaml"))
MORE = {
    "task": {
        "name": "jsonl",
        "path": "rows.jsonl",
        "prompt": "question",
        "answer": "answer",
        "template": "{question}",
    },
    "method": {
        "name": "grpo",
        "advantage": {"name": "group_norm"},
        "credit": ["delta", {"name": "top_entropy", "fraction": 0.2}],
        "loss": {"name": "clipped", "clip_low": 0.2, "clip_high": 0.2},
        "reduction": "token_mean",
        "plan": "query_preserved",
    },
    "lora": {"r": 4, "alpha": 8.0, "target_modules": ["q_proj"]},
    "ledger": {"every": 1, "decompose": ["sign"], "categories": None, "bank": 4},
}
SETS = ("optimizer.lr", "task.name", "method", "method.name", "rollouts.group_size", "seed", "a.b",
        "", ".", "task.terms", "method.credit", "eval", "ledger.decompose")  # fmt: skip


class Reached(Exception):
    """The recipe was good enough to load a model."""


def fuzz(seed: int | str, num: int) -> dict[str, str]:
    """Faults of ``num`` cases, each with an example; empty is the goal."""
    faults: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in range(num):
            rng = random.Random(f"recipes/{seed}/{case}")
            file = Path(folder) / "recipe.yaml"
            file.write_bytes(recipe(rng, folder))
            sets = [override(rng) for _ in range(rng.choice((0, 0, 1, 2)))]
            problem = fault(lambda file=file, sets=sets: begin(file, sets))
            if problem:
                faults.setdefault(problem, f"case {seed}/{case}, sets {sets}")
    return faults


def recipe(rng: random.Random, folder: str) -> bytes:
    """The text of a mutated recipe."""
    raw = yaml.safe_load(rng.choice(RECIPES).read_text())
    rows = Path(folder) / "rows.jsonl"
    rows.write_text('{"question": "1+1?", "answer": "2"}\n')
    for key in MORE:
        if rng.random() < 0.4:
            raw[key] = MORE[key]
    if raw["task"].get("name") == "jsonl":
        raw["task"] = {**raw["task"], "path": str(rows)}
    raw["run_dir"] = str(Path(folder) / "run")
    if rng.random() < 0.3:
        return mutate_bytes(yaml.safe_dump(raw).encode(), rng)
    return yaml.safe_dump(mutate_value(raw, rng), allow_unicode=True).encode(
        "utf-8", "surrogatepass"
    )


def override(rng: random.Random) -> str:
    """A ``--set`` that may be anything."""
    value = rng.choice((str(rng.choice(STRANGE)), "[1", "{a: b", "'", "!!python/name:os.system x"))
    return f"{rng.choice(SETS)}{rng.choice(('=', '=', '=', ''))}{value}"


def begin(file: Path, sets: list[str]) -> None:
    """All that ``counterpoise train`` does before it loads a model, and the first prompts."""
    from counterpoise.trainer import loop
    from counterpoise.trainer.config import load_config
    from counterpoise.trainer.prompts import prompts_from

    config = load_config(file, sets)
    with mock.patch.object(loop, "load_policy", side_effect=Reached):
        try:
            loop.train(config)
        except Reached:
            task = loop.make_task(**config.task)
            num = min(config.rollouts.prompts, 4)
            for prompt in prompts_from(task, "train", config.seed, 0, num):
                task.reward(prompt, "The answer is 2.")
