"""A Hugging Face model that samples, with weights that can be sent and forgotten.

Axes: N rows, T tokens, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import torch
from transformers import AutoModelForCausalLM, set_seed

from vllm.sampling_params import SamplingParams


class Engine:
    """vLLM's engine, worker and model in one."""

    def __init__(self, folder: str, *, seed: int, in_process: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.weights = {name: p.data for name, p in self.model.named_parameters()}
        self.random = np.random if in_process else np.random.RandomState(seed)
        if in_process:
            set_seed(seed)
        self.asleep: set[str] = set()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy tensors by their Hugging Face names; the names."""
        names = set()
        for name, value in weights:
            if "weights" in self.asleep:
                raise RuntimeError(f"load_weights of {name}: the memory is given back. Wake first.")
            if name not in self.weights or self.weights[name].shape != value.shape:
                known = {name: tuple(value.shape) for name, value in self.weights.items()}
                raise ValueError(f"load_weights: {name} {tuple(value.shape)} is none of {known}.")
            self.weights[name].copy_(value.detach())
            names.add(name)
        return names

    def sleep(self, *, forget: bool) -> None:
        self.asleep = {"weights", "kv_cache"}
        if forget:
            for value in self.weights.values():
                value.fill_(torch.nan)

    @torch.no_grad()
    def draw(self, prompts_N: list[list[int]], params: SamplingParams) -> list[SimpleNamespace]:
        """A completion of every row, up to a stop or ``max_tokens``; log-probs of its tokens."""
        if self.asleep or any(value.isnan().any() for value in self.weights.values()):
            raise RuntimeError(
                f"generate: asleep are {sorted(self.asleep)}, or weights were forgotten. Wake the"
                " engine and send the weights first."
            )
        stops = {self.model.config.eos_token_id}
        random_N = [np.random.RandomState(self._seed(params)) for _ in prompts_N]
        rows = [SimpleNamespace(token_ids=[], logprobs=[]) for _ in prompts_N]
        for _ in range(params.max_tokens):
            open_N = [k for k, row in enumerate(rows) if not stops & set(row.token_ids)]
            if not open_N:
                break
            logits_NV = self._next_logits([prompts_N[k] + rows[k].token_ids for k in open_N])
            logp_NV = (logits_NV / params.temperature).log_softmax(-1)
            for k, logp_V in zip(open_N, logp_NV):
                below_V = logp_V.double().exp().cumsum(0)
                token = int(torch.searchsorted(below_V, random_N[k].random_sample() * below_V[-1]))
                rows[k].token_ids.append(token)
                rank = int((logp_V > logp_V[token]).sum()) + 1
                logprob = SimpleNamespace(logprob=float(logp_V[token]), rank=rank)
                rows[k].logprobs.append({token: logprob})
        return rows

    def _seed(self, params: SamplingParams) -> int:
        return self.random.randint(2**31) if params.seed is None else params.seed

    def _next_logits(self, ids_N: list[list[int]]) -> torch.Tensor:
        """[N, V] logits after each row; padding on the right is seen by no token of a row."""
        ids_NT = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(ids) for ids in ids_N], batch_first=True
        )
        last_N = torch.tensor([len(ids) - 1 for ids in ids_N])
        logits_NV = self.model(ids_NT, use_cache=False).logits[torch.arange(len(ids_N)), last_N]
        return logits_NV.bfloat16().float()
