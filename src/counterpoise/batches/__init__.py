"""Plans (which rollouts share an optimizer step: a decision), shards (ranks and micro-batches: may not matter), reductions (a column)."""

from __future__ import annotations

from typing import Any

from counterpoise.batches.audit import Audit, audit, manifest
from counterpoise.batches.balance import is_ready, quota, reward_balanced
from counterpoise.batches.plans import length_sorted, query_preserved, random_rows, round_robin
from counterpoise.batches.scale import constant_length, per_sequence, per_token, side_means
from counterpoise.batches.shard import shard

PLANS: dict[str, Any] = {
    "query_preserved": query_preserved,
    "reward_balanced": reward_balanced,
    "random_rows": random_rows,
    "length_sorted": length_sorted,
    "round_robin": round_robin,
}

REDUCTIONS: dict[str, Any] = {
    "per_token": per_token,
    "per_sequence": per_sequence,
    "constant_length": constant_length,
    "side_means": side_means,
}

__all__ = [
    "PLANS",
    "REDUCTIONS",
    "Audit",
    "audit",
    "constant_length",
    "is_ready",
    "length_sorted",
    "manifest",
    "per_sequence",
    "per_token",
    "query_preserved",
    "quota",
    "random_rows",
    "reward_balanced",
    "round_robin",
    "shard",
    "side_means",
]
