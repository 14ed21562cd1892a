"""Published methods as points on the six axes: data alone, no torch.

A preset holds the vetted defaults of its source; change any axis by name.
"""

from __future__ import annotations

from typing import Any

CLIP = {"name": "clipped", "clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"name": "clipped", "clip_low": 0.2, "clip_high": 0.28}
DELTA_CLIP = {**CLIP_HIGHER, "dual_clip": 10.0}
DEFAULT: dict[str, Any] = {
    "advantage": "group_zscore",
    "credit": [],
    "loss": CLIP_HIGHER,
    "reduction": "per_token",
    "plan": "random_rows",
    "controller": None,
}

# name -> (summary, reference, axes that differ from DEFAULT)
PRESETS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "grpo": (
        "Group z-score, token clip, mean over each rollout.",
        "arXiv 2402.03300",
        {"loss": CLIP, "reduction": "per_sequence"},
    ),
    "dr_grpo": (
        "GRPO without the std and without the length normaliser.",
        "arXiv 2503.20783",
        {"advantage": "group_mean", "loss": CLIP, "reduction": "constant_length"},
    ),
    "dapo": ("Clip-higher and one token mean over the update.", "arXiv 2503.14476", {}),
    "gspo": (
        "One ratio a rollout, clipped as a whole.",
        "arXiv 2507.18071",
        {"loss": "sequence_ratio", "reduction": "per_sequence"},
    ),
    "cispo": (
        "Clipped ratio as a detached weight: no token loses its gradient.",
        "arXiv 2506.13585",
        {"loss": "detached_ratio"},
    ),
    "sapo": (
        "A smooth gate instead of a clip.",
        "arXiv 2511.20347",
        {"loss": "soft_gate", "reduction": "per_sequence"},
    ),
    "rloo": (
        "Baseline is the mean of the other rollouts.",
        "arXiv 2402.14740",
        {"advantage": "leave_one_out", "loss": CLIP},
    ),
    "reinforce_pp": (
        "Whitened over the batch; works with one rollout a prompt.",
        "arXiv 2501.03262",
        {"advantage": "batch_whitened", "loss": CLIP},
    ),
    "psr": (
        "Learns from correct rollouts only.",
        "arXiv 2506.01347",
        {"advantage": "positives_only", "loss": CLIP},
    ),
    "nsr": (
        "Learns from failed rollouts only.",
        "arXiv 2506.01347",
        {"advantage": "negatives_only", "loss": CLIP},
    ),
    "w_reinforce": (
        "Correct rollouts count a tenth of failed ones.",
        "arXiv 2506.01347",
        {"advantage": "weighted_signs", "loss": CLIP},
    ),
    "max_rl": (
        "(R - m)/m: approaches maximum likelihood on hard prompts.",
        "arXiv 2602.02710",
        {"advantage": "max_rl", "loss": CLIP},
    ),
    "gmpo": (
        "Geometric mean of token ratios, clipped in log space.",
        "arXiv 2507.20673",
        {"loss": "geometric", "reduction": "per_sequence"},
    ),
    "ctpo": (
        "Prefix products of ratios, bounds that grow with the square root of the position.",
        "arXiv 2605.07331",
        {"loss": "cumulative"},
    ),
    "tpo": (
        "Cross-entropy to a target distribution over each group.",
        "arXiv 2604.06159",
        {
            "loss": "target",
            "reduction": {"name": "constant_length", "length": 1},
            "plan": "query_preserved",
        },
    ),
    "delta": (
        "Weights tokens by what sets good rollouts apart from bad ones.",
        "arXiv 2605.21467",
        {"credit": ["delta"], "loss": DELTA_CLIP},
    ),
    "fade": (
        "Solve-rate power and failure weight, steered by running solve rate and entropy.",
        "arXiv 2607.01490",
        {"advantage": "fade", "controller": "fade"},
    ),
    "crf_ntf": (
        "Contrastive REINFORCE; of failed rollouts only the rarest tenth of tokens is punished.",
        "arXiv 2606.17250",
        {
            "advantage": "signs",
            "credit": ["negative_token_filter"],
            "loss": "contrastive",
            "reduction": "side_means",
        },
    ),
    "ntf_whitened": (
        "The same filter under batch-whitened advantages.",
        "arXiv 2606.17250",
        {
            "advantage": "batch_whitened",
            "credit": ["negative_token_filter"],
            "loss": CLIP,
            "reduction": "per_sequence",
        },
    ),
    "dfpo_min": (
        "Every rollout of a group weighs as the least: shared tokens cancel exactly.",
        "arXiv 2604.13088v1, Eq. 17",
        {
            "advantage": "group_mean",
            "loss": {"name": "dfpo", "transform": "min"},
            "reduction": "constant_length",
            "plan": "query_preserved",
        },
    ),
    "dfpo_orth": (
        "Sequence weights made orthogonal to the advantages: shared tokens cancel exactly.",
        "arXiv 2604.13088v1, Eq. 18",
        {
            "advantage": "group_mean",
            "loss": {"name": "dfpo", "transform": "orth"},
            "reduction": "constant_length",
            "plan": "query_preserved",
        },
    ),
    "ibpo": (
        "Credit only where a failed rollout differs from its nearest correct sibling.",
        "arXiv 2605.16302",
        {
            "advantage": "group_mean",
            "credit": ["edits"],
            "reduction": {"name": "per_token", "count": "credited"},
            "plan": "query_preserved",
        },
    ),
    "gtpo": (
        "Tokens that correct and failed rollouts share are not punished; undecided rollouts drop.",
        "arXiv 2508.03772",
        {
            "advantage": "group_mean",
            "credit": [
                {"name": "conflict", "multiply": True, "divide": True, "rule": "entropy_filter"}
            ],
            "loss": "reinforce",
            "reduction": "per_sequence",
        },
    ),
    "top_entropy": (
        "Credit on the fifth of tokens with the highest entropy.",
        "arXiv 2506.01939",
        {"credit": ["top_entropy"]},
    ),
    "ar": (
        "Credit scaled down on improbable tokens.",
        "arXiv 2505.12929",
        {
            "credit": [{"name": "probability_scaled", "alpha": 0.2}],
            "loss": {"name": "clipped", "clip_low": 0.2, "clip_high": 0.24, "dual_clip": 10.0},
        },
    ),
    "ktae": (
        "Adds each token's association with correctness in its group.",
        "arXiv 2505.16826",
        {"credit": ["ktae"]},
    ),
    "stapo": (
        "Drops rare confident tokens of correct rollouts.",
        "arXiv 2602.15620",
        {"credit": ["spurious"]},
    ),
    "stare": (
        "Rewards surprising tokens a little more while the entropy is low.",
        "arXiv 2606.19236",
        {"credit": ["surprisal_boost"], "loss": DELTA_CLIP, "controller": "stare"},
    ),
    "opsa": (
        "No reward: the rarest fifth of tokens is made less likely, uncertain ones more so.",
        "arXiv 2608.31046",
        {
            "advantage": "constant",
            "credit": ["rare_uncertain"],
            "loss": "reinforce",
            "reduction": "per_sequence",
        },
    ),
    "ict": (
        "Credit on the tenth of tokens whose distribution differs most from the group's.",
        "arXiv 2606.19771",
        {
            "credit": ["group_divergence"],
            "loss": CLIP,
            "reduction": {"name": "per_sequence", "count": "credited"},
        },
    ),
    "vine_ppo": (
        "Each step gets what it added to the mean reward of fresh completions.",
        "arXiv 2410.01679",
        {
            "advantage": "group_mean",
            "credit": [{"name": "prefix_value", "max_steps": 25}, "whiten"],
            "loss": [CLIP, {"name": "kl", "coef": 1e-4}],
        },
    ),
    "spo_chain": (
        "The same between cuts at improbable tokens, and credit on improbable tokens alone.",
        "arXiv 2505.23564",
        {
            "advantage": "group_mean",
            "credit": [
                {"name": "prefix_value", "split": "improbable"},
                {"name": "only_improbable", "whiten": True},
            ],
            "loss": CLIP,
            "reduction": {"name": "per_token", "count": "credited"},
        },
    ),
    "tempo": (
        "GRPO, and at each fork what the token did to the mean reward of its branch.",
        "arXiv 2509.18314",
        {"advantage": {"name": "group_zscore", "eps": 1e-6}, "credit": ["tree_gain"]},
    ),
    "sdpo": (
        "The policy, having read a right answer or the grader's feedback, teaches itself.",
        "arXiv 2601.20802",
        {
            "credit": ["teacher"],
            "loss": {"name": "detached_ratio", "clip_high": 1.0},
            "reduction": {"name": "per_token", "count": "credited"},
        },
    ),
    "opsd": (
        "The first policy, having read the reference solution, teaches the policy; no reward.",
        "arXiv 2601.18734",
        {
            "advantage": {"name": "constant", "value": 1.0},
            "credit": [{"name": "teacher", "source": "solution", "model": "initial"}],
            "loss": "reinforce",
            "reduction": {"name": "per_token", "count": "credited"},
        },
    ),
    "top_d": (
        "A teacher mixed with the policy; a token is paid for itself and for what follows.",
        "arXiv 2607.04751",
        {
            "advantage": {"name": "constant", "value": 1.0},
            "credit": ["proximal_teacher"],
            "loss": CLIP,
            "reduction": {"name": "per_token", "count": "credited"},
        },
    ),
    "vimpo": (
        "The log-ratio to the reference is a value, fitted to the reward; its parts are credit.",
        "arXiv 2606.20008",
        {
            "advantage": "group_mean",
            "credit": ["implied_advantage", {"name": "whiten", "size": 5e-3}],
            "loss": [CLIP_HIGHER, "implied_value"],
        },
    ),
    "oar": (
        "Credit by each token's influence on the distribution of the answer.",
        "arXiv 2601.07408",
        {"credit": ["answer_influence"], "loss": CLIP, "reduction": "per_sequence"},
    ),
    "clip_cov": (
        "Detaches a few tokens whose log-prob and advantage co-vary most.",
        "arXiv 2505.22617",
        {"loss": {"name": "clip_cov", "clip_low": 1.0, "clip_high": 1.0}},
    ),
    "f_grpo": (
        "Focal weight (1 - solve rate)^gamma on each prompt.",
        "arXiv 2602.06717",
        {"credit": ["focal"], "loss": CLIP},
    ),
    "turn_rloo": (
        "Each turn gets its return from there on, minus that of the prompt's other rollouts.",
        "RLOO (arXiv 2402.14740) by turns",
        {"advantage": "leave_one_out", "credit": ["turn_baseline"], "loss": CLIP},
    ),
    "gigpo": (
        "Adds how each turn did among the group's turns from the same state.",
        "arXiv 2505.10978",
        {
            "advantage": {"name": "group_zscore", "eps": 1e-6},
            "credit": ["state_groups"],
            "loss": CLIP,
        },
    ),
    "mt_grpo": (
        "The outcome's z-score on all turns, that of each turn's reward on the turns up to it.",
        "arXiv 2505.11821",
        {"credit": ["mt_grpo"], "loss": CLIP},
    ),
    "igpo": (
        "Each turn is paid what it adds to the probability of the right answer.",
        "arXiv 2510.14967",
        {"advantage": "leave_one_out", "credit": ["information_gain"], "loss": CLIP},
    ),
    "turn_credit": (
        "What a score of the state gained, smeared backwards over the turns that led to it.",
        "PrimeIntellect-ai/prime-rl#3282",
        {"advantage": "group_mean", "credit": ["turn_credit"], "loss": CLIP},
    ),
}
