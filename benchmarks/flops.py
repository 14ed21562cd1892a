"""Operations that an update needs by its model's shape: what model FLOPs utilisation divides by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

PEAK_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}  # bfloat16, dense


def update_flops(run_dir: Path) -> float | None:
    """Of the updates of one batch of the run, from its last checkpoint's shape and last rollouts:
    6 per weight of a matrix and token, 12 per layer, width and key that a token attends to. A
    prompt counts once for its rollouts, the head for response tokens alone; nothing is counted
    for what is computed twice. None where adapters are trained.
    """
    configs = sorted(run_dir.glob("checkpoints/*/config.json"))
    if not configs:
        return None
    config = json.loads(configs[-1].read_text())
    rows = pq.read_table(
        sorted(run_dir.glob("rollouts/*.parquet"))[-1], columns=["group", "prompt_ids", "token_ids"]
    ).to_pylist()
    prompts = {row["group"]: len(row["prompt_ids"]) for row in rows}
    responses = [(prompts[row["group"]], len(row["token_ids"])) for row in rows]
    num_response = sum(length for _, length in responses)
    num_keys = sum(length**2 / 2 for length in prompts.values())
    num_keys += sum(length * (prompt + length / 2) for prompt, length in responses)
    tokens = sum(prompts.values()) + num_response
    width, layers = attention_width(config), config["num_hidden_layers"]
    head = config["hidden_size"] * config["vocab_size"]
    return (
        6.0 * layers * layer_weights(config) * tokens
        + 6.0 * head * num_response
        + 12.0 * layers * width * num_keys
    )


def attention_width(config: dict[str, Any]) -> int:
    heads = config["num_attention_heads"]
    return heads * (config.get("head_dim") or config["hidden_size"] // heads)


def layer_weights(config: dict[str, Any]) -> int:
    """Weights of the matrices of one decoder layer of a Llama, Qwen2 or Qwen3."""
    hidden, width = config["hidden_size"], attention_width(config)
    kv_width = width * config["num_key_value_heads"] // config["num_attention_heads"]
    return hidden * (2 * width + 2 * kv_width + 3 * config["intermediate_size"])
