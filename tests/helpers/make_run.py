"""Synthetic run folders that follow the schema: a made-up policy learns to add.

For tests, screenshots and benchmarks of readers.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from counterpoise.run.files import append_json, batch_file, write_json, write_table, write_text
from counterpoise.run.schema import SCHEMA_VERSION

# each sets window.pwned if a page runs it, or breaks a terminal or a layout if it is printed as it
# is
HOSTILE = [
    "<script>window.pwned=1</script>",
    '<img src=x onerror="window.pwned=1">',
    '"><svg onload="window.pwned=1">',
    "</script><script>window.pwned=1</script>",
    "<a href=\"javascript:window.pwned=1\" onclick='window.pwned=1'>link</a>",
    "\x1b[31mred\x1b]0;title\x07",
    "\u202eright to left\u202c\u2066x\u2069",
    "\x00\x08\x7f\x85\ufeff\u2028\u2029",
    "{{7*7}} ${7*7} %{x} %(y)s",
    "[bold red]markup[/bold red] :boom:",
    "̸̢̛" * 12,
]
CATEGORIES = {"number": "0123456789", "operator": "+-=", "template": "\n:"}


def make_run(
    path: Path,
    *,
    method: str = "delta",
    seed: int = 0,
    num_batches: int = 20,
    prompts: int = 6,
    group_size: int = 8,
    ledger_every: int = 5,
    eval_every: int = 5,
    gain: float = 1.0,
    hostile: bool = False,
    lr: float = 3e-5,
) -> Path:
    """Write a whole run folder.

    ``gain`` is how well the method learns; ``hostile`` puts hostile strings into every text field.
    """
    rng = np.random.default_rng((seed, len(method), 7))
    path.mkdir(parents=True, exist_ok=True)
    config = _config(
        method, seed, num_batches, prompts, group_size, ledger_every, eval_every, lr, str(path)
    )
    write_text(
        path / "config.yaml",
        yaml.safe_dump(config | ({"note": HOSTILE} if hostile else {}), sort_keys=False),
    )
    write_json(path / "manifest.json", _manifest(method, seed, hostile))
    difficulty_P = np.random.default_rng(5).uniform(-1.5, 1.5, 120)
    _write_eval(path, 0, _solve_rate(0, num_batches, gain), difficulty_P, rng)
    tax = 0.0
    for batch in range(num_batches):
        skill = _solve_rate(batch, num_batches, gain)
        rollouts = _rollouts(batch, prompts, group_size, skill, rng, hostile)
        plan = _plan(rollouts, rng, method)
        write_table(
            batch_file(path, "rollouts", batch, ".parquet"), _rollout_columns(batch, rollouts)
        )
        write_json(batch_file(path, "plan", batch, ".json"), plan)
        metrics = _metrics(batch, rollouts, plan, rng)
        if ledger_every and batch % ledger_every == 0:
            tokens = _tokens(batch, rollouts, plan, rng)
            if hostile:
                tokens |= dict.fromkeys(
                    (HOSTILE[1], f"part_sign_{HOSTILE[0]}"), tokens["delta"]
                )  # names of columns are text as well
            write_table(batch_file(path, "tokens", batch, ".parquet"), tokens)
            tax += 1e-4 * (1 + rng.random())
            metrics |= _ledger_metrics(tokens, tax, rng)
        if eval_every and (batch + 1) % eval_every == 0:
            metrics |= _write_eval(
                path, batch + 1, _solve_rate(batch + 1, num_batches, gain), difficulty_P, rng
            )
        append_json(
            path / "timing.jsonl",
            {"batch": batch, "sample_s": 1.2, "update_s": 0.8, "sample_tokens_per_s": 9000.0},
        )
        append_json(path / "metrics.jsonl", metrics)
    return path


def make_wide_step(
    path: Path, *, rollouts: int = 512, length: int = 1000, groups: int = 64, seed: int = 0
) -> Path:
    """A run with one batch of ``rollouts`` x ``length`` tokens: what the viewer must stay fluid
    with.
    """
    rng = np.random.default_rng(seed)
    words = np.array(
        [
            " the",
            " total",
            " is",
            "\n",
            " 12",
            " +",
            " so",
            " carry",
            " answer",
            " we",
            " add",
            " 7",
            " =",
            " x",
            ".",
            ",",
        ]
    )
    n = rollouts * length
    group_N = np.arange(rollouts) * groups // rollouts
    sign_N = np.where(np.arange(rollouts) % 2 == 0, 1, -1)
    ids = rng.integers(0, len(words), n)
    shared = np.tile(np.arange(length) < length // 5, rollouts)
    ids[shared] = np.tile(np.arange(length) % len(words), rollouts)[shared]
    group, sign = np.repeat(group_N, length), np.repeat(sign_N, length)
    own, others = 1e-3 * sign * rng.random(n), 2e-3 * rng.normal(size=n)
    write_json(path / "manifest.json", _manifest("delta", seed, False))
    write_text(
        path / "config.yaml",
        yaml.safe_dump(
            _config("delta", seed, 1, groups, rollouts // groups, 1, 0, 3e-5, str(path))
        ),
    )
    append_json(path / "metrics.jsonl", {"batch": 0, "reward/mean": 0.5})
    write_table(
        batch_file(path, "tokens", 0, ".parquet"),
        {
            "batch": np.zeros(n, np.int64),
            "group": group,
            "rollout": np.repeat(np.arange(rollouts), length),
            "position": np.tile(np.arange(length), rollouts),
            "token_id": ids,
            "text": words[ids],
            "sign": sign,
            "reward": (sign > 0).astype(np.float64),
            "advantage": sign.astype(np.float32),
            "weight": rng.uniform(0.8, 1.2, n).astype(np.float32),
            "credit": (sign * rng.uniform(0.8, 1.2, n)).astype(np.float32),
            "delta": (own + others).astype(np.float32),
            "predicted": (own + others).astype(np.float32),
            "own_head": (0.03 * own).astype(np.float32),
            "own": own.astype(np.float32),
            "others": others.astype(np.float32),
            "is_flip": (own + others) * sign < 0,
            "entropy": rng.exponential(0.4, n).astype(np.float32),
            "confidence": rng.random(n).astype(np.float32),
            "cancellation": rng.random(n).astype(np.float32),
            "category": np.array(["template", "number", "operator", "other"])[ids % 4],
            "node_positive": np.where(shared, rollouts // groups // 2, 1),
            "node_negative": np.where(shared, rollouts // groups // 2, 0),
        },
    )
    return path


def _config(
    method: str,
    seed: int,
    num_batches: int,
    prompts: int,
    group_size: int,
    ledger: int,
    evals: int,
    lr: float,
    run_dir: str,
) -> dict[str, Any]:
    return {
        "seed": seed,
        "run_dir": run_dir,
        "model": "bundled",
        "task": {"name": "arithmetic"},
        "method": {"name": method},
        "num_batches": num_batches,
        "rollouts": {
            "prompts": prompts,
            "group_size": group_size,
            "max_new_tokens": 96,
            "temperature": 1.0,
        },
        "optimizer": {"lr": lr, "updates_per_batch": 4, "clip_norm": 1.0},
        "eval": {"every": evals, "prompts": 120},
        "ledger": {"every": ledger, "decompose": ["sign"]},
        "trackers": ["tensorboard"],
    }


def _manifest(method: str, seed: int, hostile: bool) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "command": ["counterpoise", "train", "recipes/demo.yaml", *(HOSTILE if hostile else [])],
        "seed": seed,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "versions": {
            "counterpoise": "0.1.0",
            "torch": "2.13.0",
            **({HOSTILE[0]: HOSTILE[1]} if hostile else {}),
        },
        "python": "3.11.2",
        "platform": "Linux",
        "device": HOSTILE[3] if hostile else "cpu",
        "method": {
            "name": HOSTILE[2] if hostile else method,
            "advantage": {"name": "group_zscore", "eps": 1e-6},
            "credit": [{"name": method, "low": 0.8, "high": 1.2}] if method != "grpo" else [],
            "loss": [{"name": "clipped", "clip_low": 0.2, "clip_high": 0.28}],
            "reduction": {"name": "per_token"},
            "plan": {"name": "query_preserved" if method == "delta" else "random_rows"},
            "controller": None,
        },
    }


def _solve_rate(batch: int, num_batches: int, gain: float) -> float:
    return 0.35 + 0.35 * gain * (1 - math.exp(-3 * batch / max(1, num_batches)))


def _write_eval(
    path: Path, batch: int, skill: float, difficulty_P: np.ndarray, rng: np.random.Generator
) -> dict[str, float]:
    solved_P = 1 / (1 + np.exp(-(math.log(skill / (1 - skill)) - difficulty_P)))
    reward_P = (rng.random(len(difficulty_P)) < solved_P).astype(float)
    mean, spread = float(reward_P.mean()), 1.96 * float(reward_P.std()) / math.sqrt(len(reward_P))
    row = {
        "eval/accuracy": mean,
        "eval/accuracy_low": mean - spread,
        "eval/accuracy_high": mean + spread,
        "eval/length": 40.0,
        "eval/pass@4": 1 - (1 - mean) ** 4,
    }
    append_json(
        path / "evals.jsonl", {"batch": batch, **row, "reward_PK": reward_P[:, None].tolist()}
    )
    return row


def _rollouts(
    batch: int, prompts: int, group_size: int, skill: float, rng: np.random.Generator, hostile: bool
) -> list[dict[str, Any]]:
    out = []
    for group in range(prompts):
        terms = [int(x) for x in rng.integers(1, 10, 4)]
        prompt = f"{' + '.join(map(str, terms))} = ?" + (
            "\n" + "\n".join(HOSTILE) if hostile else ""
        )
        rows = [_rollout(terms, skill, rng, hostile) for _ in range(group_size)]
        reward_G = np.array([row["reward"] for row in rows])
        spread = reward_G.std(ddof=1)
        for row, reward in zip(rows, reward_G):
            row |= {
                "group": group,
                "prompt": prompt,
                "rollout": len(out),
                "answer": " ".join(HOSTILE) if hostile else str(sum(terms)),
            }
            row |= {"prompt_id": " ".join(HOSTILE) if hostile else f"add-{batch}-{group}"}
            row["advantage"] = (
                0.0 if spread == 0 else float((reward - reward_G.mean()) / (spread + 1e-6))
            )
            out.append(row)
    return out


def _rollout(
    terms: list[int], skill: float, rng: np.random.Generator, hostile: bool
) -> dict[str, Any]:
    texts, total, truth = ["Let", " us", " add", ":", "\n"], terms[0], terms[0]
    wrong_at = int(rng.integers(1, len(terms))) if rng.random() > skill else 0
    for k, term in enumerate(terms[1:], 1):
        texts += [["so", "then", "and"][int(rng.integers(3))], f" {total}", " +", f" {term}", " ="]
        truth += term
        total = total + term + (int(rng.choice([-1, 1])) if k == wrong_at else 0)
        texts += [f" {total}", "\n"]
    texts += ["Answer", ":", f" {total}", "<eos>"]
    if hostile:
        texts += [HOSTILE[int(rng.integers(len(HOSTILE)))], *HOSTILE]
    confident_T = np.array([0.97 if _category(t) == "template" else 0.6 for t in texts])
    logp_T = np.log(np.clip(confident_T + rng.normal(0, 0.1, len(texts)), 0.02, 0.999))
    return {
        "texts": texts,
        "text": "".join(texts),
        "reward": float(total == truth),
        "logp": logp_T,
        "entropy": -logp_T * rng.uniform(0.5, 1.5, len(texts)),
        "weight": rng.uniform(0.8, 1.2, len(texts)),
        "stop_reason": " ".join(HOSTILE) if hostile else "stop",
    }


def _category(text: str) -> str:
    for name, chars in CATEGORIES.items():
        if text.strip(" ") and all(c in chars for c in text.strip(" ")):
            return name
    return {"so": "connective", "then": "connective", "and": "connective"}.get(text, "other")


def _token_id(text: str) -> int:
    return sum((k + 1) * ord(c) for k, c in enumerate(text)) % 50021


def _rollout_columns(batch: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    names = (
        "rollout",
        "group",
        "prompt_id",
        "prompt",
        "answer",
        "text",
        "reward",
        "advantage",
        "stop_reason",
    )
    return {
        "batch": [batch] * len(rows),
        **{name: [row[name] for row in rows] for name in names},
        "prompt_ids": [[ord(c) % 50021 for c in row["prompt"]] for row in rows],
        "token_ids": [[_token_id(t) for t in row["texts"]] for row in rows],
        "loss_mask": [[True] * len(row["texts"]) for row in rows],
        "credit": [(row["advantage"] * row["weight"]).tolist() for row in rows],
        "weight": [row["weight"].tolist() for row in rows],
        "sampler_logp": [row["logp"].tolist() for row in rows],
        "entropy": [row["entropy"].tolist() for row in rows],
    }


def _plan(rows: list[dict[str, Any]], rng: np.random.Generator, method: str) -> dict[str, Any]:
    group_N = np.array([row["group"] for row in rows])
    order = np.argsort(group_N, kind="stable") if method == "delta" else rng.permutation(len(rows))
    batches = [part.tolist() for part in np.array_split(order, 4)]
    return {
        "schema_version": SCHEMA_VERSION,
        "num_rows": len(rows),
        "rows": batches,
        "groups": [sorted(set(group_N[part].tolist())) for part in batches],
        "left_out": [],
        "plan": {"name": "query_preserved" if method == "delta" else "random_rows"},
        "seed": 0,
    }


def _metrics(
    batch: int, rows: list[dict[str, Any]], plan: dict[str, Any], rng: np.random.Generator
) -> dict[str, Any]:
    reward_N, length_N = (
        np.array([r["reward"] for r in rows]),
        np.array([len(r["texts"]) for r in rows]),
    )
    share = [float(reward_N[part].mean()) for part in plan["rows"] if part]
    return {
        "batch": batch,
        "reward/mean": float(reward_N.mean()),
        "reward/constant_group_frac": 0.1,
        "rollouts/cut_frac": 0.02,
        "grader/num_failures": 0,
        "loss/sampler_gap": 0.002,
        "rollouts/length": float(length_N.mean()),
        "rollouts/num_tokens": int(length_N.sum()),
        "entropy/mean": float(np.concatenate([r["entropy"] for r in rows]).mean()),
        "loss/grad_norm": float(0.4 + 0.1 * rng.random()),
        "loss/clipped_frac": float(0.01 * rng.random()),
        "plan/pairs_kept": 1.0
        if plan["plan"]["name"] == "query_preserved"
        else float(0.25 + 0.05 * rng.random()),
        "plan/prompts_split_frac": 0.0 if plan["plan"]["name"] == "query_preserved" else 1.0,
        "plan/positive_frac_min": min(share),
        "plan/positive_frac_max": max(share),
        "plan/rows_left_out": 0,
    }


def _tokens(
    batch: int, rows: list[dict[str, Any]], plan: dict[str, Any], rng: np.random.Generator
) -> dict[str, Any]:
    """The ledger's rows: a first-order world in which tokens push identical tokens of
    their group.
    """
    step_of_row = {row: k for k, part in enumerate(plan["rows"]) for row in part}
    nodes, members = {}, defaultdict(set)
    out: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        for t in range(len(row["texts"])):
            node = nodes.setdefault((row["group"], tuple(row["texts"][: t + 1])), len(nodes))
            members[node].add((row["rollout"], np.sign(row["advantage"])))
    push: dict[Any, float] = defaultdict(float)
    for row in rows:
        for t, text in enumerate(row["texts"]):
            push[row["group"], text] += (
                row["advantage"] * row["weight"][t] * (1 - math.exp(row["logp"][t]))
            )
    for row in rows:
        sign = int(np.sign(row["advantage"]))
        for t, text in enumerate(row["texts"]):
            p, credit = math.exp(row["logp"][t]), row["advantage"] * row["weight"][t]
            own, others = (
                4e-3 * credit * (1 - p) ** 2,
                1e-3 * push[row["group"], text] * (1 - p) + 4e-4 * rng.normal(),
            )
            delta = own + others + 1e-4 * rng.normal()
            node = nodes[row["group"], tuple(row["texts"][: t + 1])]
            signs = [s for _, s in members[node]]
            up, down = max(own + others, 0) + 1e-3 * rng.random(), 0.0
            down = own + others - up
            for name, value in {
                "batch": batch,
                "update": step_of_row[row["rollout"]],
                "group": row["group"],
                "rollout": row["rollout"],
                "position": t,
                "token_id": _token_id(text),
                "text": text,
                "loss_mask": True,
                "reward": row["reward"],
                "advantage": row["advantage"],
                "sign": sign,
                "weight": row["weight"][t],
                "credit": credit,
                "coef": credit,
                "scale": 1 / 400,
                "is_clipped": False,
                "ratio": 1.0 + 0.02 * rng.normal(),
                "sampler_logp": row["logp"][t],
                "sampler_gap": 0.01 * ((t % 7) - 3),
                "trainer_logp": row["logp"][t],
                "trainer_logp_after": row["logp"][t] + delta,
                "delta": delta,
                "noise_floor": 1e-6,
                "change": "boosted"
                if delta > 1e-6
                else "suppressed"
                if delta < -1e-6
                else "unchanged",
                "is_flip": bool(delta * sign < 0),
                "entropy": row["entropy"][t],
                "confidence": p,
                "category": text if text in HOSTILE else _category(text),
                "node": node,
                "node_positive": sum(s > 0 for s in signs),
                "node_negative": sum(s < 0 for s in signs),
                "predicted": own + others,
                "own_head": 0.03 * own,
                "own": own,
                "others": others,
                "cancellation": 1 - abs(up + down) / (abs(up) + abs(down)),
                "part_sign_positive": up,
                "part_sign_negative": down,
            }.items():
                out[name].append(value)
    return dict(out)


def _ledger_metrics(
    tokens: dict[str, Any], tax: float, rng: np.random.Generator
) -> dict[str, float]:
    sign, flip = np.array(tokens["sign"]), np.array(tokens["is_flip"])
    return {
        "ledger/flip/all": float(flip[sign != 0].mean()) if (sign != 0).any() else 0.0,
        "ledger/flip/positive": float(flip[sign > 0].mean()) if (sign > 0).any() else 0.0,
        "ledger/flip/negative": float(flip[sign < 0].mean()) if (sign < 0).any() else 0.0,
        "ledger/predicted/correlation": float(
            np.corrcoef(tokens["predicted"], tokens["delta"])[0, 1]
        ),
        "ledger/residual/full": 0.2 + 0.02 * float(rng.random()),
        "ledger/residual/coupling": 0.1,
        "ledger/residual/clip": 0.05,
        "ledger/residual/length": 0.05,
        "ledger/tax/shared": 1e-4,
        "ledger/tax/discriminating": 4e-4,
        "ledger/tax/other": 5e-5,
        "ledger/tax/cumulative_shared": tax,
        "ledger/tax/cumulative_discriminating": 4 * tax,
        "ledger/tax/cumulative_other": 0.5 * tax,
        "ledger/drift/slope": 0.2 * float(rng.normal()),
        "ledger/drift/log_odds_change": 0.1 * float(rng.random()),
        "ledger/entropy/common": 0.2 + 0.02 * float(rng.random()),
        "ledger/entropy/single": 0.5 + 0.02 * float(rng.random()),
    }


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Write a synthetic run folder.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--wide", action="store_true")
    args = parser.parse_args()
    print(
        json.dumps(
            {
                "run": str(
                    make_wide_step(args.path)
                    if args.wide
                    else make_run(args.path, hostile=args.hostile)
                )
            }
        )
    )
