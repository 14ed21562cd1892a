"""Losses: one value a token, never reduced. ``LOSSES`` is the table of names."""

from __future__ import annotations

from counterpoise.losses.covariance import clip_cov, kl_cov
from counterpoise.losses.drift_fixing import dfpo, dfpo_weight
from counterpoise.losses.implied_value import implied_value
from counterpoise.losses.kl_term import kl
from counterpoise.losses.ratio import (
    clipped,
    contrastive,
    detached_ratio,
    dual_clip,
    reinforce,
    soft_gate,
    symmetric_clip,
)
from counterpoise.losses.sequence import cumulative, geometric, sequence_ratio
from counterpoise.losses.target_matching import target
from counterpoise.losses.token_loss import token_loss
from counterpoise.stage import Stage

LOSSES: dict[str, Stage] = {
    "reinforce": reinforce,
    "clipped": clipped,
    "dual_clip": dual_clip,
    "symmetric_clip": symmetric_clip,
    "detached_ratio": detached_ratio,
    "soft_gate": soft_gate,
    "contrastive": contrastive,
    "sequence_ratio": sequence_ratio,
    "geometric": geometric,
    "cumulative": cumulative,
    "target": target,
    "dfpo": dfpo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "kl": kl,
    "implied_value": implied_value,
}

__all__ = [
    "LOSSES",
    "clip_cov",
    "clipped",
    "contrastive",
    "cumulative",
    "detached_ratio",
    "dfpo",
    "dfpo_weight",
    "dual_clip",
    "geometric",
    "implied_value",
    "kl",
    "kl_cov",
    "reinforce",
    "sequence_ratio",
    "soft_gate",
    "symmetric_clip",
    "target",
    "token_loss",
]
