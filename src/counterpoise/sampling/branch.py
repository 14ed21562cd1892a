"""Fresh completions from a prompt and the first tokens of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from counterpoise.sampling.sample import Rollouts, sample


def branch(
    model: PreTrainedModel,
    prompt_ids: Sequence[int] | Sequence[Sequence[int]],
    prefix_ids: Sequence[Sequence[int]],
    num: int,
    *,
    max_new_tokens: int,
    seed: int,
    stop_ids: Sequence[int],
    **sampling: Any,
) -> Rollouts:
    """``num`` fresh answers from each (prompt, response prefix): what the policy makes of a
    response from here on.

    The rollouts hold the new tokens alone (the prefix is context, as the prompt is);
    ``prompt_index_N`` says which prefix each row continues. A prefix that ends with a stop token
    has nothing to continue and is an error.

    Args:
        prompt_ids: token ids of one prompt for all prefixes, or one prompt a prefix.
        prefix_ids: the first tokens of responses; may be empty lists.
        num: completions of each prefix.
        sampling: further arguments of ``sample`` (temperature, top_p, top_k, pad_id, max_rows).

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=16,
    ...     hidden_size=8,
    ...     intermediate_size=16,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=2,
    ... )
    >>> fresh = branch(
    ...     LlamaForCausalLM(config),
    ...     [1, 2],
    ...     [[], [5, 6]],
    ...     num=3,
    ...     max_new_tokens=4,
    ...     seed=0,
    ...     stop_ids=[0],
    ... )
    >>> fresh.prompt_index_N.tolist()
    [0, 0, 0, 1, 1, 1]
    """
    prompts = _per_prefix(prompt_ids, len(prefix_ids))
    for i, prefix in enumerate(prefix_ids):
        if len(prefix) and prefix[-1] in stop_ids:
            raise ValueError(
                f"branch: prefix {i} ends with the stop token {prefix[-1]}: nothing to continue."
                " Cut it before the stop."
            )
    contexts = [list(prompt) + list(prefix) for prompt, prefix in zip(prompts, prefix_ids)]
    return sample(
        model,
        contexts,
        group_size=num,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop_ids=stop_ids,
        **sampling,
    )


def _per_prefix(prompt_ids: Sequence[Any], num_prefixes: int) -> list[Sequence[int]]:
    if len(prompt_ids) and isinstance(prompt_ids[0], int):
        return [prompt_ids] * num_prefixes
    if len(prompt_ids) != num_prefixes:
        raise ValueError(
            f"branch: {len(prompt_ids)} prompts for {num_prefixes} prefixes, expected one prompt,"
            " or one per prefix."
        )
    return list(prompt_ids)
