"""Rollouts: load a policy, sample from it, score what was sampled, branch from a prefix."""

from counterpoise.rollouts.branch import branch
from counterpoise.rollouts.logp import TokenScores, logp_function, token_logp
from counterpoise.rollouts.measure import MEASURED, measure
from counterpoise.rollouts.models import Policy, add_lora, encode_prompts, load_model, locate
from counterpoise.rollouts.pack import length_buckets
from counterpoise.rollouts.sample import SAMPLED, Rollouts, sample

__all__ = [
    "MEASURED",
    "SAMPLED",
    "Policy",
    "Rollouts",
    "TokenScores",
    "add_lora",
    "branch",
    "encode_prompts",
    "length_buckets",
    "load_model",
    "locate",
    "logp_function",
    "measure",
    "sample",
    "token_logp",
]
