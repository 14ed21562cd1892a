"""What a recipe's start does on its task before training: the table of docs/results/regimes.md.

    python benchmarks/measure_regimes.py demo long_answers rare_success --out regimes.jsonl
    python benchmarks/measure_regimes.py demo --set task.difficulty=hard rollouts.max_new_tokens=160
    python benchmarks/measure_regimes.py --table regimes.jsonl

Answers to held-out prompts at temperature 1, one line of JSON per recipe. Axes: P prompts, K
answers of a prompt, T tokens."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from counterpoise.maths.intervals import over_prompts
from counterpoise.maths.reduce import derived_seed
from counterpoise.maths.trie import prefix_nodes
from counterpoise.policy import encode_prompts, load_model
from counterpoise.sampling import Rollouts, sample_from
from counterpoise.tasks import Task, first_error, task
from counterpoise.text import percent
from counterpoise.trainer.config import Config, load_config
from counterpoise.trainer.evaluate import pass_at_k
from counterpoise.trainer.prompts import prompts_from
from counterpoise.types import Prompt

GROUPS = (8, 16)
SAID = re.compile(r"\d+|[+-]|\b(?:plus|and|minus|less)\b")
HEAD = (
    "regime",
    "solved",
    "of these, no wrong step",
    "prompts with a success in 8 / 16 / 64",
    "mixed groups of 8 / 16",
    "tokens, mean",
    "sd within a group",
    "longest over shortest right answer",
    "different right answers in 16",
    "cut off",
    "entropy, nats",
    "tokens shared by all of a group",
    "by at least two",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--set", nargs="+", default=[], metavar="a.b=c")
    parser.add_argument("--name", help="what the row is called instead of the recipe's name")
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--out", type=Path, help="append one line of JSON per recipe")
    parser.add_argument("--table", type=Path, help="print the table of such a file")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.table.read_text().splitlines()] if args.table else []
    for recipe in args.recipes:
        row = measure(load_config(recipe, args.set), args.prompts, args.samples)
        rows.append({"regime": args.name or Path(recipe).stem, **row})
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for row in rows:
        print(f"| {' | '.join(cells(row))} |")


def measure(config: Config, num_prompts: int, samples: int) -> dict[str, Any]:
    """Sample, grade, summarise; the recipe's model as it starts."""
    policy, sums, settings = load_model(config.model), task(**config.task), config.rollouts
    prompts = prompts_from(sums, "test", 0, 0, num_prompts)
    rollouts = sample_from(
        policy,
        encode_prompts(policy, [prompt.text for prompt in prompts], chat=config.chat),
        group_size=samples,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        seed=derived_seed(0, 0, "eval"),
        max_rows=settings.max_rows or 1024,
    )
    ids = [row[keep].tolist() for row, keep in zip(rollouts.token_ids_NT, rollouts.mask_NT)]
    texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    shape = (num_prompts, samples)
    answers = list(zip((prompts[p] for p in rollouts.prompt_index_N.tolist()), texts))
    is_right_PK = np.array([sums.reward(*one) >= config.success for one in answers]).reshape(shape)
    return {
        "config": {"model": config.model, "task": config.task},
        "prompts": num_prompts,
        "samples": samples,
        **success_numbers(is_right_PK),
        **length_numbers(rollouts, is_right_PK),
        **token_numbers(rollouts, samples),
        "distinct_right": distinct_right(texts, is_right_PK),
        "sound": sound_share(sums, answers, is_right_PK),
    }


def success_numbers(is_right_PK: np.ndarray) -> dict[str, Any]:
    """Share solved, prompts with a success in k answers, groups with both rewards."""
    samples = is_right_PK.shape[1]
    return {
        "solved": over_prompts(is_right_PK.mean(1)),
        "success_in": {k: pass_at_k(is_right_PK, k) for k in (*GROUPS, 64) if k <= samples},
        # a group is mixed unless all succeed or all fail
        "mixed": {
            k: pass_at_k(is_right_PK, k) + pass_at_k(~is_right_PK, k) - 1
            for k in GROUPS
            if k <= samples
        },
    }


def length_numbers(rollouts: Rollouts, is_right_PK: np.ndarray) -> dict[str, float]:
    """Mean length, its sd within a prompt (root of the mean variance), the longest right answer of
    a prompt over its shortest (among 16 answers, and among all), share cut off.
    """
    length_PK = rollouts.mask_NT.sum(1).numpy().reshape(is_right_PK.shape)
    return {
        "length": float(length_PK.mean()),
        "length_sd": float(length_PK.std()),
        "length_sd_within": float(np.sqrt(length_PK.var(1, ddof=1).mean())),
        "length_ratio": length_ratio(length_PK[:, :16], is_right_PK[:, :16]),
        "length_ratio_all": length_ratio(length_PK, is_right_PK),
        "cut_off": float(np.mean([reason == "length" for reason in rollouts.stop_reason])),
    }


def length_ratio(length_PK: np.ndarray, is_right_PK: np.ndarray) -> float:
    """Longest over shortest right answer: the median over prompts with two right ones."""
    ratios = [
        length_K[is_right_K].max() / length_K[is_right_K].min()
        for length_K, is_right_K in zip(length_PK, is_right_PK)
        if is_right_K.sum() > 1
    ]
    return float(np.median(ratios)) if ratios else float("nan")


def token_numbers(rollouts: Rollouts, samples: int) -> dict[str, float]:
    """Entropy per token; how many first tokens all answers of a group of 8 share, and the share of
    tokens that at least two of them have after the same words.
    """
    mask_NT = rollouts.mask_NT
    is_first_N = torch.arange(len(mask_NT)) % samples < 8
    token_ids_NT, group_N = rollouts.token_ids_NT[is_first_N], rollouts.prompt_index_N[is_first_N]
    nodes = prefix_nodes(token_ids_NT, mask_NT[is_first_N], group_N)
    num_tokens = mask_NT[is_first_N].sum()
    return {
        "entropy": float(rollouts.entropy_NT[mask_NT].mean()),
        "shared_by_all": float((nodes.size_NT == 8).sum() / 8 / len(group_N.unique())),
        "shared_by_two_frac": float((nodes.size_NT >= 2).sum() / num_tokens),
    }


def distinct_right(texts: list[str], is_right_PK: np.ndarray) -> float:
    """Different ways among the right answers of a prompt, mean over prompts with one: the numbers
    and operators that an answer says in order, its first 16 answers.
    """
    samples = is_right_PK.shape[1]
    ways = [
        {way_of(texts[p * samples + k]) for k in np.flatnonzero(is_right_K[:16])}
        for p, is_right_K in enumerate(is_right_PK)
    ]
    counts = [len(way) for way in ways if way]
    return float(np.mean(counts)) if counts else float("nan")


def sound_share(sums: Task, answers: list[tuple[Prompt, str]], is_right_PK: np.ndarray) -> float:
    """Share of right answers without a wrong step; the others are right by luck."""
    right = [answers[at] for at in np.flatnonzero(is_right_PK)]
    return float(np.mean([first_error(sums, *one) is None for one in right])) if right else 0.0


def way_of(text: str) -> tuple[str, ...]:
    """Numbers and operators of an answer in order; the words around them do not matter.

    >>> way_of("Then 7 less 3 makes 4.") == way_of("Next 7 minus 3 is 4.")
    True
    """
    signs = {"plus": "+", "and": "+", "minus": "-", "less": "-"}
    atoms: list[str] = SAID.findall(text)
    return tuple(signs.get(atom, atom) for atom in atoms)


def cells(row: dict[str, Any]) -> list[str]:
    """One row of the table, in the order of ``HEAD``."""

    def shares(values: dict[Any, float]) -> str:
        return " / ".join(f"{100 * value:.1f}%" for value in values.values())

    return [
        row["regime"],
        percent(*row["solved"]),
        f"{100 * row['sound']:.0f}%",
        shares(row["success_in"]),
        shares(row["mixed"]),
        f"{row['length']:.0f}",
        f"{row['length_sd_within']:.1f}",
        f"{row['length_ratio']:.2f}",
        f"{row['distinct_right']:.1f}",
        f"{100 * row['cut_off']:.1f}%",
        f"{row['entropy']:.2f}",
        f"{row['shared_by_all']:.1f}",
        f"{100 * row['shared_by_two_frac']:.0f}%",
    ]


if __name__ == "__main__":
    main()
