"""What sampling cannot do, said before anything is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel


def check_prompts(
    model: PreTrainedModel, prompt_ids: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    if len(prompt_ids) == 0:
        raise ValueError("sample: no prompts, expected at least one list of token ids.")
    lengths = [len(prompt) for prompt in prompt_ids]
    if min(lengths) == 0:
        raise ValueError(
            f"sample: prompt {lengths.index(0)} has no tokens, expected at least one; prepend the"
            " model's bos token."
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and max(lengths) + max_new_tokens > limit:
        raise ValueError(
            f"sample: prompt {lengths.index(max(lengths))} has {max(lengths)} tokens, with"
            f" max_new_tokens={max_new_tokens} that is more than the model's {limit} positions."
            " Lower max_new_tokens or drop the prompt."
        )


def check_cache(decoder: PreTrainedModel, arguments: frozenset[str]) -> None:
    # such a model would take the cache as one more keyword and forget all but the last token
    if "past_key_values" not in arguments:
        raise ValueError(
            f"sample: {type(decoder).__name__} takes no key-value cache (past_key_values); choose a"
            " model with attention."
        )


def check_settings(counts: dict[str, int], temperature: float, top_p: float, top_k: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"sample: {name}={value}, expected at least 1.")
    if temperature < 0:
        raise ValueError(f"sample: temperature={temperature}, expected 0 (greedy) or more.")
    if not 0 < top_p <= 1:
        raise ValueError(f"sample: top_p={top_p}, expected a number in (0, 1]; 1 keeps all.")
    if top_k < 0:
        raise ValueError(f"sample: top_k={top_k}, expected 0 (keep all) or more.")
