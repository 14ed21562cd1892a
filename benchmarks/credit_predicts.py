"""Does the audit of a rule predict how its method trains? Rank correlations over presets between
the audit's numbers (summaries of the probes) and the arena's differences to the control.

    python benchmarks/credit_predicts.py benchmarks/results/credit_bundled \
        benchmarks/results/arena_builtin/summary.json benchmarks/results/arena_builtin2/summary.json

Of a preset that is in several summaries the last counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from credit_table import numbers
from scipy.stats import spearmanr

DRAWS = 2000
MEASURES = {
    ("gradient", "cosine"): "one batch's update with the true gradient",
    ("gradient", "cosine_of_mean"): "the mean update with the true gradient",
    ("localisation", "share"): "punishment on the first wrong token",
    ("token_value", "cosine"): "credit with the token's value",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("audit", type=Path)
    parser.add_argument("summary", type=Path, nargs="+")
    args = parser.parse_args()
    trained = {arm: row for path in args.summary for arm, row in differences(path).items()}
    print("| audit | batch | arms | sampled | greedy |\n|---|---|---|---|---|")
    for (probe, key), words in MEASURES.items():
        for batch in (0, 20, 40):
            audited = measured(args.audit, probe, key, batch)
            arms = sorted(audited.keys() & trained.keys())
            cells = [rank_correlation(audited, trained, arms, place) for place in (0, 1)]
            print(f"| {words} | {batch} | {len(arms)} | {' | '.join(cells)} |")


def differences(summary: Path) -> dict[str, tuple[float, float]]:
    """Sampled and greedy accuracy against the control, by preset."""
    rows = json.loads(summary.read_text())["final"]["rows"]
    return {
        row["arm"]: (row["differences"]["sampled"][0], row["differences"]["greedy"][0])
        for row in rows
        if row["differences"] and row["verdict"]["kind"] != "repeat"
    }


def measured(audit: Path, probe: str, key: str, batch: int) -> dict[str, float]:
    """A number of the audit by rule; those without it are left out."""
    rules = numbers(audit, probe, batch)["gradient" if probe == "gradient" else "rules"]
    numbers_of = {rule: (row.get(key) or {}).get("mean") for rule, row in rules.items()}
    return {rule: value for rule, value in numbers_of.items() if value is not None}


def rank_correlation(
    audited: dict[str, float], trained: dict[str, tuple[float, float]], arms: list[str], place: int
) -> str:
    """Spearman's rho with a percentile bootstrap interval over presets."""
    x, y = (np.array(values) for values in zip(*((audited[a], trained[a][place]) for a in arms)))
    rng = np.random.default_rng(0)
    draws = rng.integers(len(arms), size=(DRAWS, len(arms)))
    rhos = [spearmanr(x[draw], y[draw]).statistic for draw in draws]
    low, high = np.nanpercentile(rhos, [2.5, 97.5])
    return f"{spearmanr(x, y).statistic:+.2f} [{low:+.2f}, {high:+.2f}]"


if __name__ == "__main__":
    main()
