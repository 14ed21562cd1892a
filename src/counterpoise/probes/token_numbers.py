"""Credit against the true advantage of tokens: the numbers.

Weights are one over the chance of being drawn; intervals are over prompts, all numbers on the same
draws. Axes: M tokens, B draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from counterpoise.probes.output import Frame, number_dict
from counterpoise.probes.ranking import (
    auroc,
    cosine,
    draw_weights,
    effective_size,
    rank_correlation,
    share,
)
from counterpoise.probes.references import UNIFORM

MEASURES = {
    "cosine": "cosine",
    "above_uniform": "above uniform",
    "cosine_within": "within rollouts",
    "rank_correlation": "rank corr.",
    "rank_correlation_corrected": "corrected",
    "sign_agreement": "sign",
    "auroc": "AUROC top tenth",
    "null_credit": "credit on nothing",
}
LEAST_RELIABILITY = 0.3  # below it a correction would multiply noise: there is none
BEYOND_NOISE = 1.96  # standard errors
TOP = 0.1

Credits = Mapping[str, tuple[ArrayLike, ArrayLike]]  # label -> credit, its mean over the rollout


def token_numbers(table: Frame, rules: Credits, references: Credits) -> dict[str, Any]:
    """The truth's own numbers, and those of every rule against it.

    Args:
        table: one row per token with ``group``, ``weight``, ``half_1``, ``half_2``, ``value``,
            ``se`` and ``band``.
        rules, references: label -> (credit, mean credit of the token's rollout), one per row.
    """
    truth = Truth(table, draw_weights(table["weight"], table["group"]))
    control_B = truth.cosine(np.asarray(references[UNIFORM][0], float))
    sides = {"rules": rules, "references": references}
    return {"truth": truth.numbers()} | {
        side: {label: truth.against(*both, control_B) for label, both in credits.items()}
        for side, credits in sides.items()
    }


class Truth:
    """Estimated advantages of tokens with their noise, and what credit is worth against them."""

    def __init__(self, table: Frame, weight_BM: np.ndarray) -> None:
        columns = ("value", "se", "half_1", "half_2", "band")
        value, se, first, second, band = (table[name].to_numpy(float) for name in columns)
        self.weight_BM, self.value, self.halves = weight_BM, value, (first, second)
        self.band = float(band.max(initial=0))
        self.stratum = table.get("stratum", None)
        self.is_null = np.abs(value) + BEYOND_NOISE * se < band
        self.is_decisive = (np.abs(value) > BEYOND_NOISE * se) & (np.abs(value) > band)
        self.is_top = is_top(np.abs(value), weight_BM[0])
        half_B = rank_correlation(first, second, weight_BM)
        self.reliability_B = 2 * half_B / (1 + half_B)  # Spearman and Brown
        self.signal_B = weight_BM @ (first * second)  # noise of one half is not in the other

    def numbers(self) -> dict[str, Any]:
        """How much there is to find, and how well it is known."""
        reliability = float(self.reliability_B[0])
        enough = reliability >= LEAST_RELIABILITY
        low = f"reliability {reliability:.2f} is below {LEAST_RELIABILITY}: take more samples"
        return {
            "num_tokens": len(self.value),
            "effective_tokens": effective_size(self.weight_BM[0]),
            "num_decisive": int(self.is_decisive.sum()),
            "num_null": int(self.is_null.sum()),
            "band": self.band,
            "reliability": number_dict(self.reliability_B),
            "null_tokens": number_dict(
                share(np.ones(len(self.value)), self.is_null, self.weight_BM)
            ),
            "strata": strata_numbers(self.stratum, self.weight_BM[0]),
            "notes": [] if enough else [f"no rank correlation is corrected for noise: {low}"],
        }

    def against(
        self, credit: ArrayLike, rollout_mean: ArrayLike, control_B: np.ndarray
    ) -> dict[str, Any]:
        """The measures of one rule; None where a number is not defined.

        Credit less its mean over the rollout is what a rule says beyond the rollout's advantage.
        """
        credit, weight_BM = np.asarray(credit, float), self.weight_BM
        inner = credit - np.asarray(rollout_mean, float)
        inner[np.abs(inner) < 1e-6 * np.abs(credit).max(initial=0)] = 0  # a mean is not exact
        rank_B = rank_correlation(credit, self.value, weight_BM)
        has_sign = self.is_decisive & (credit != 0)
        agrees = np.sign(credit) == np.sign(self.value)
        out = {
            "cosine": self.cosine(credit),
            "above_uniform": self.cosine(credit) - control_B,
            "cosine_within": self.cosine(inner),
            "rank_correlation": rank_B,
            "rank_correlation_corrected": self.correct(rank_B),
            "sign_agreement": share(has_sign, agrees, weight_BM),
            "auroc": auroc(np.abs(credit), self.is_top, weight_BM),
            "null_credit": share(np.abs(credit), self.is_null, weight_BM),
            "silent": share(self.is_decisive, credit == 0, weight_BM),
        }
        return {name: number_dict(value_B) for name, value_B in out.items()}

    def cosine(self, credit: np.ndarray) -> np.ndarray:
        """Cosine with the true advantages: their length is that of the halves' product."""
        noisy_B, size_B = cosine(credit, self.value, self.weight_BM), self.weight_BM @ self.value**2
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.signal_B > 0, noisy_B * np.sqrt(size_B / self.signal_B), np.nan)

    def correct(self, rank_B: np.ndarray) -> np.ndarray:
        """The correlation without the noise of the values: over the root of their reliability."""
        enough_B = self.reliability_B >= LEAST_RELIABILITY
        out_B = np.where(
            enough_B, rank_B / np.sqrt(np.where(enough_B, self.reliability_B, 1)), np.nan
        )
        return out_B if enough_B[0] else np.full_like(out_B, np.nan)


def is_top(size_M: np.ndarray, weight_M: np.ndarray) -> np.ndarray:
    """The tokens of the largest size that hold a tenth of the weight; never those of size 0.

    >>> is_top(np.array([1.0, 5.0, 0.0]), np.array([1.0, 1.0, 18.0])).tolist()
    [True, True, False]
    """
    order = np.argsort(-size_M, kind="stable")
    before = np.cumsum(weight_M[order]) - weight_M[order]
    out = np.zeros(len(size_M), bool)
    out[order] = before < TOP * weight_M.sum()
    return out & (size_M > 0)


def strata_numbers(stratum: Frame, weight_M: np.ndarray) -> dict[str, dict[str, float]]:
    """Tokens drawn of each stratum and the weight of one."""
    if stratum is None:
        return {}
    return {
        name: {
            "num": int((stratum == name).sum()),
            "weight": float(weight_M[stratum == name].mean()),
        }
        for name in dict.fromkeys(stratum)
    }
