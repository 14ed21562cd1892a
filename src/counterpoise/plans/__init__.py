"""Plans: which rollouts share an update. ``PLANS`` is the table of names."""

from __future__ import annotations

from counterpoise.plans.audit import Audit, audit, manifest, plan_metrics
from counterpoise.plans.balance import is_ready, quota, reward_balanced
from counterpoise.plans.cut import check_plan, cut
from counterpoise.plans.dynamic import dynamic_sampling, is_mixed
from counterpoise.plans.orders import length_sorted, query_preserved, random_rows, round_robin
from counterpoise.stage import Stage

PLANS: dict[str, Stage] = {
    "query_preserved": query_preserved,
    "reward_balanced": reward_balanced,
    "dynamic_sampling": dynamic_sampling,
    "random_rows": random_rows,
    "length_sorted": length_sorted,
    "round_robin": round_robin,
}

__all__ = [
    "PLANS",
    "Audit",
    "audit",
    "check_plan",
    "cut",
    "dynamic_sampling",
    "is_mixed",
    "is_ready",
    "length_sorted",
    "manifest",
    "plan_metrics",
    "query_preserved",
    "quota",
    "random_rows",
    "reward_balanced",
    "round_robin",
]
