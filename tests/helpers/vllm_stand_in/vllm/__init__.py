"""A stand-in for vLLM 0.24 without a GPU: as much of it as TRL's two modes call.

What matters for training is as in vLLM:

- the engine holds weights of its own, read from the model's folder, and gets new ones by
  ``load_weights`` alone;
- its log-probs are near the trainer's and not equal: logits are rounded to bfloat16;
- a request without a seed takes one from numpy's global state, which an engine inside the caller's
  process (``external_launcher``, TRL's colocate mode) sets when it starts;
- ``sleep(level=2)`` forgets the weights, and ``wake_up`` does not bring them back.

A setting that would change what is drawn, and that the stand-in does not know, is an error.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from vllm.engine import Engine
from vllm.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
__version__ = "0.24.0"


@dataclasses.dataclass
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[Any]


class LLM:
    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        max_model_len: int | None = None,
        enable_sleep_mode: bool = False,
        distributed_executor_backend: str | None = None,
        logprobs_mode: str = "raw_logprobs",
        **settings: Any,
    ) -> None:
        if logprobs_mode != "processed_logprobs" or settings.get("quantization") is not None:
            raise NotImplementedError(
                f"LLM: the stand-in has processed_logprobs and no quantization, got {logprobs_mode}"
                f" and {settings.get('quantization')}. Extend tests/helpers/vllm_stand_in."
            )
        self.engine = Engine(
            model, seed=seed, in_process=distributed_executor_backend == "external_launcher"
        )
        self.enable_sleep_mode = enable_sleep_mode
        length = max_model_len or self.engine.model.config.max_position_embeddings
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=self.engine))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=length),
            model_executor=SimpleNamespace(driver_worker=worker),
        )

    def generate(
        self, prompts: list[dict[str, Any]], sampling_params: SamplingParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """``n`` completions of each prompt."""
        prompt_ids = [list(prompt["prompt_token_ids"]) for prompt in prompts]
        n = sampling_params.n
        drawn = self.engine.draw([ids for ids in prompt_ids for _ in range(n)], sampling_params)
        return [RequestOutput(ids, drawn[k * n : (k + 1) * n]) for k, ids in enumerate(prompt_ids)]

    def reset_prefix_cache(self) -> bool:
        return True  # nothing is cached

    def sleep(self, level: int = 1) -> None:
        if not self.enable_sleep_mode:
            raise ValueError("LLM.sleep: sleep mode is off. Pass enable_sleep_mode=True.")
        self.engine.sleep(forget=level == 2)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.engine.asleep -= set(tags or ("weights", "kv_cache"))
