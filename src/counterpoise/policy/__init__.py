"""A language model: load it, score tokens with it, measure the columns that rules need."""

from counterpoise.models import locate
from counterpoise.policy.importance import measure_importance
from counterpoise.policy.load import Policy, add_lora, decode_texts, encode_prompts, load_model
from counterpoise.policy.logp import logp_function, token_logp
from counterpoise.policy.measure import MEASURED, REFERENCE, measure
from counterpoise.policy.pack import length_buckets

__all__ = [
    "MEASURED",
    "REFERENCE",
    "Policy",
    "add_lora",
    "decode_texts",
    "encode_prompts",
    "length_buckets",
    "load_model",
    "locate",
    "logp_function",
    "measure",
    "measure_importance",
    "token_logp",
]
