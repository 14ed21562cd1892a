"""Tiny random models, and loops-only references for what is measured on them."""

from __future__ import annotations

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2_SIZES = {
    "vocab_size": 29,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny(name="llama", seed=0, dtype=torch.float32, **changes):
    """A random model with logits of a few units, so that distributions are neither flat nor
    certain.
    """
    torch.manual_seed(seed)
    model = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES | changes)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES | changes)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES | {"head_dim": 4} | changes)),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(
                **SIZES
                | {"head_dim": 4, "sliding_window": 6, "final_logit_softcapping": 2.0}
                | changes
            )
        ),
        "cohere": lambda: CohereForCausalLM(
            CohereConfig(**SIZES | {"logit_scale": 0.25} | changes)
        ),
        "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES | changes)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(**GPT2_SIZES | {"initializer_range": 0.4} | changes)
        ),
    }[name]()
    return model.to(dtype).eval()


def row_logits(model, prompt, response):
    """Logits that predict each response token, by the model's own forward on one unpadded row."""
    ids = torch.tensor([list(prompt) + list(response)])
    return model(input_ids=ids).logits[0, len(prompt) - 1 : -1]


def row_logp_entropy(model, prompt, response, temperature=1.0):
    """(log-prob, entropy) of each response token, one token at a time."""
    logp, entropy = [], []
    for logits_V, token in zip(row_logits(model, prompt, response), response):
        logp_V = torch.log_softmax(logits_V / temperature, dim=-1)
        logp.append(logp_V[token])
        entropy.append(-sum(p.exp() * p for p in logp_V))
    return torch.stack(logp), torch.stack(entropy)
