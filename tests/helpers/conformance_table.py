"""One row for every stage: what to run it with, and the laws it declares.

A stage without a row fails the suite.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rule(NamedTuple):
    params: dict[str, Any] = {}
    keeps_mass: bool = False  # sum |credit| is unchanged
    keeps_sign: bool = True  # no token changes its sign
    is_random: bool = False  # draws: equal only for equal rollout order and padding


class Advantage(NamedTuple):
    params: dict[str, Any] = {}
    is_centred: bool = False  # sums to 0 over each group
    by_group: bool = (
        False  # compares rollouts of a prompt: constant groups get 0, G = 1 is an error
    )


class Loss(NamedTuple):
    params: dict[str, Any] = {}
    is_random: bool = False


class Reduction(NamedTuple):
    params: dict[str, Any] = {}
    total: float | None = None  # sum of the scale column over a batch


class PlanRow(NamedTuple):
    params: dict[str, Any] = {}
    covers: bool = True  # every row is in a batch
    whole_prompts: bool = False


ADVANTAGES = {
    "group_mean": Advantage(is_centred=True, by_group=True),
    "group_zscore": Advantage(is_centred=True, by_group=True),
    "leave_one_out": Advantage(is_centred=True, by_group=True),
    "batch_whitened": Advantage(),
    "group_mean_batch_std": Advantage(is_centred=True, by_group=True),
    "signs": Advantage(),
    "positives_only": Advantage(),
    "negatives_only": Advantage(),
    "weighted_signs": Advantage(),
    "constant": Advantage(),
    "max_rl": Advantage(is_centred=True, by_group=True),
    "fade": Advantage({"alpha": 2.0, "delta": 1.0}, is_centred=True, by_group=True),
    "overlong": Advantage({"rule": "batch_whitened", "limit": 8}),
}

RULES = {
    "uniform": Rule(keeps_mass=True),
    "delta": Rule({"proxy": "row"}),
    "negative_token_filter": Rule({"fraction": 0.3}),
    "edits": Rule(keeps_sign=False),
    "top_entropy": Rule({"fraction": 0.3}),
    "conflict": Rule(),
    "entropy_filter": Rule({"limit": 1.0}, keeps_sign=False),
    "probability_scaled": Rule(),
    "ktae": Rule(keeps_sign=False),
    "shared_prefix": Rule(),
    "spurious": Rule({"max_prob": 0.9, "renormalise": "mass"}, keeps_mass=True),
    "covariance": Rule({"fraction": 0.2, "low": -100.0, "high": 100.0}, is_random=True),
    "focal": Rule({"gamma": 1.0}),
    "kl_penalty": Rule({"coef": 0.1}, keeps_sign=False),
    "soften_negatives": Rule(),
    "surprise_negatives": Rule(),
    "negative_mass": Rule(),
    "negatives": Rule({"mass": 0.5, "location": 0.5}),
    "value_baseline": Rule({"features": 3, "siblings": True}, keeps_sign=False),
    "mismatch_weight": Rule({"mode": "icepop"}),
    "turn_baseline": Rule(keeps_sign=False),
    "turn_index_baseline": Rule(keeps_sign=False),
    "mt_grpo": Rule(keeps_sign=False),
    "state_groups": Rule(keeps_sign=False),
    "information_gain": Rule(keeps_sign=False),
    "turn_credit": Rule(keeps_sign=False),
    "surprisal_boost": Rule({"share": 0.3, "damp": 0.9}),
    "rare_uncertain": Rule({"fraction": 0.4}),
    "group_divergence": Rule({"fraction": 0.3}),
    "prefix_value": Rule(keeps_sign=False),
    "only_improbable": Rule({"max_prob": 0.3}),
    "whiten": Rule(keeps_sign=False),
    "tree_gain": Rule(keeps_sign=False),
    "teacher": Rule(keeps_sign=False),
    "proximal_teacher": Rule(keeps_sign=False),
    "implied_advantage": Rule({"beta": 0.1}, keeps_sign=False),
    "answer_influence": Rule(keeps_mass=True),
    "keep_mass": Rule({"rule": "top_entropy"}, keeps_mass=True),
    "even_mass": Rule({"rule": "top_entropy"}),
    "only_positive": Rule({"rule": "top_entropy"}),
    "only_negative": Rule({"rule": "top_entropy"}),
    "mix": Rule({"rules": ["uniform", "top_entropy"], "weights": [0.25, 0.75]}),
}

LOSSES = {
    "reinforce": Loss(),
    "clipped": Loss({"clip_low": 0.2, "clip_high": 0.28}),
    "dual_clip": Loss(),
    "symmetric_clip": Loss(),
    "sequence_ratio": Loss({"clip_low": 0.2, "clip_high": 0.2}),
    "detached_ratio": Loss(),
    "soft_gate": Loss(),
    "geometric": Loss(),
    "cumulative": Loss({"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.4}),
    "target": Loss(),
    "contrastive": Loss(),
    "dfpo": Loss({"transform": "orth"}),
    "clip_cov": Loss(is_random=True),
    "kl_cov": Loss(is_random=True),
    "kl": Loss({"coef": 0.1}),
    "implied_value": Loss({"beta": 0.1}),
}

REDUCTIONS = {
    "per_token": Reduction(total=1.0),
    "per_sequence": Reduction(total=1.0),
    "constant_length": Reduction({"length": 7}),
    "side_means": Reduction(),
}

PLANS = {
    "query_preserved": PlanRow(whole_prompts=True),
    "reward_balanced": PlanRow({"mode": "groups"}, covers=False, whole_prompts=True),
    "dynamic_sampling": PlanRow({"order": "query_preserved"}, covers=False, whole_prompts=True),
    "random_rows": PlanRow(),
    "length_sorted": PlanRow(),
    "round_robin": PlanRow(),
}

CONTROLLERS = {
    "fade": {"rate": 0.1},
    "stare": {"target": 5.0, "adaptive": True, "damp": 0.9},
    "entropy_target": {"path": "advantage.alpha", "start": 1.0, "lo": 1.0, "hi": 3.0, "rate": 0.5},
}

# presets whose credit or loss draws at random (then padding may change the draw)
RANDOM_PRESETS = {"clip_cov"}
