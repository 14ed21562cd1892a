"""Arena folders with known effects: what training would have written, drawn from normals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from counterpoise.arena.design import Arm, Design, write_design
from counterpoise.run.files import json_line

RATES = (1e-5, 3e-5, 1e-4, 3e-4)
BEST = 1e-4


def make_design(arms=("delta",), num_seeds=8, **changes) -> Design:
    """grpo, its A/A arm, and the arms."""
    own = [Arm("grpo", {"method": {"name": "grpo"}}), Arm("grpo again", repeats="grpo")]
    own += [Arm(a, {"method": {"name": a}}) if isinstance(a, str) else a for a in arms]
    settings = {
        "recipe": {"model": "bundled", "task": {"name": "arithmetic"}, "num_batches": 60},
        "arms": tuple(own),
        "control": "grpo",
        "rates": RATES,
        "equal_rate": 3e-5,
        "seeds": tuple(range(100, 100 + num_seeds)),
        "tuning_seeds": (0, 1, 2),
        "margin": 0.01,
        "evaluations": (0, 30, 60),
        "eval": {"prompts": 800, "samples": 8},
    }
    return Design(**settings | changes)


def make_arena(
    out: Path, design: Design, *, effects=None, greedy=None, stopped=None, cosines=None, sd=0.015
) -> Path:
    """A folder.

    Args:
        effects, greedy: arm -> what its method adds.
        stopped: arm -> how many of its seeds stop.
        cosines: arm -> cosine with its control.
    """
    out.mkdir(parents=True, exist_ok=True)
    write_design(out, design)
    rng = np.random.default_rng(0)
    rows = []
    for arm in design.arms:
        name, best = arm.name, BEST if BEST in design.rates else design.rates[0]
        tuning = [] if arm.repeats else [(r, s) for r in design.rates for s in design.tuning_seeds]
        equal = [design.equal_rate] if design.equal_rate else []
        seeds = [(rate, s) for rate in {best, *equal} for s in design.seeds_of(name)]
        for lr, seed in [*tuning, *seeds]:
            skill = (effects or {}).get(name, 0.0) - 0.05 * abs(np.log10(lr / best))
            sharp = (greedy or {}).get(name, (effects or {}).get(name, 0.0))
            is_stopped = seed in design.seeds_of(name)[: (stopped or {}).get(name, 0)]
            rows += run_rows(design, rng, (name, lr, seed), skill, sharp, sd, is_stopped)
    (out / "results.jsonl").write_text("".join(map(json_line, rows)))
    measured = {
        name: {"control": design.control_of(name), "cosine": [cosine] * 3}
        for name, cosine in (cosines or {}).items()
    }
    (out / "activity.json").write_text(json.dumps({"batches": 3, "arms": measured}))
    return out


def run_rows(design, rng, run, skill, sharp, sd, is_stopped):
    key = dict(zip(("arm", "lr", "seed"), run))
    noise = rng.normal(0, sd)
    for at, batch in enumerate(design.evaluations):
        share = at / max(1, len(design.evaluations) - 1)
        if is_stopped and batch == design.last:
            yield {**key, "batch": batch - 1, "stopped": "the loss is not finite"}
            return
        sampled = 0.4 + share * (0.3 + skill + noise)
        yield {
            **key,
            "batch": batch,
            "sampled": sampled,
            "greedy": 0.5 + share * (0.3 + sharp + noise + rng.normal(0, sd / 4)),
            **{f"pass@{k}": 1 - (1 - sampled) ** (0.5 * (k + 1)) for k in (2, 4, 8)},
            "entropy": 0.5 - 0.2 * share,
            "length": 40.0 + 3 * share + 10 * noise,
            "train_reward": None if batch == 0 else sampled,
            "num_updates": 4 * batch,
        }
