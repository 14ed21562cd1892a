"""The log-probs of an update's tokens as a function of the parameters: what the engine
differentiates.

``LogProbs`` knows nothing of models: any function of named tensors will do. ``of_model`` makes one
from a Hugging Face causal LM.

Axes: N rollouts of the update, T response tokens, R rows of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.ledger.calculus.places import at
from counterpoise.ledger.calculus.tangents import can_walk, logp_change
from counterpoise.maths.head import CHUNK_LOGITS
from counterpoise.maths.many import copies
from counterpoise.maths.transfer import send
from counterpoise.policy import length_buckets, logp_function, token_logp
from counterpoise.policy.backbone import backbone, evaluating
from counterpoise.policy.fused import has_triton_layers
from counterpoise.policy.logp import reads_prompts_once
from counterpoise.policy.pack import (
    pack_rows,
    place_tokens,
    response_lengths,
    row_buckets,
    shares_prompts,
)

Params = dict[str, Tensor]
Cut = Callable[[Sequence[int], int], list[list[int]]]
# tokens of a forward-mode pass, directions included: below it calls cost more than arithmetic
LEAST_BUDGET = 4096
MATHS_PATHS = (
    "eager",
    "sdpa",
)  # attention implementations of Hugging Face that can take the maths path


class Texts(NamedTuple):
    """Rollouts as a model reads them.

    Args:
        prompt_ids: the prompt's token ids of every row.
        token_ids_NT, mask_NT: the responses, right-padded; on the CPU, since the host cuts the rows
            by them and lays them out.
        temperature: log-probs are of ``softmax(z / temperature)``.
        token_budget: prompt + response tokens of one forward, padding included.
    """

    prompt_ids: Sequence[Sequence[int]]
    token_ids_NT: Tensor
    mask_NT: Tensor
    temperature: float = 1.0
    token_budget: int = 16384

    def select(self, row_R: Tensor) -> Texts:
        row_R = row_R.cpu()
        rows = row_R.tolist()
        return self._replace(
            prompt_ids=[self.prompt_ids[r] for r in rows],
            token_ids_NT=self.token_ids_NT[row_R],
            mask_NT=self.mask_NT[row_R],
        )

    @property
    def lengths(self) -> list[int]:
        """Tokens of prompt and response of every row."""
        return [
            len(prompt) + own
            for prompt, own in zip(self.prompt_ids, response_lengths(self.mask_NT))
        ]

    def cut(self, share: bool) -> Cut:
        """How rows are cut for a forward that reads a prompt once, or once a row."""
        lengths = response_lengths(self.mask_NT)

        def cut(rows: Sequence[int], budget: int) -> list[list[int]]:
            buckets = row_buckets(
                [self.prompt_ids[r] for r in rows], [lengths[r] for r in rows], budget, share=share
            )
            return [[rows[k] for k in bucket] for bucket in buckets]

        return cut


class LogProbs(NamedTuple):
    """Two ways to the same log-probs, both ``f(params, row_R) -> logp_RT`` with row numbers on the
    CPU, and how to cut the rows.

    Args:
        mask_NT: True on response tokens; where the log-probs are.
        lengths: what a row costs, in tokens.
        reverse: differentiable by a backward.
        forward: differentiable in forward mode.
        token_budget: tokens of one pass.
        forward_cost: what a token costs in forward mode, for the values and for each direction, as
            a share of one of the budget.
        reverse_cut, forward_cut: rows and a budget in tokens -> rows of each pass; of similar
            length by default.
        along: the changes of ``forward`` along stacked directions, ``f(params, direction_C, row_R)
            -> [C, R, T]``, where they are written
            out; without it ``forward`` is differentiated.
    """

    mask_NT: Tensor
    lengths: Sequence[int]
    reverse: Callable[[Params, Tensor], Tensor]
    forward: Callable[[Params, Tensor], Tensor]
    token_budget: int = 16384
    forward_cost: float = 1.0
    reverse_cut: Cut | None = None
    forward_cut: Cut | None = None
    along: Callable[[Params, Params, Tensor], Tensor] | None = None

    def chunks(self, rows: Sequence[int]) -> Iterator[Tensor]:
        """Row numbers in chunks, for a backward."""
        return self._tensors((self.reverse_cut or self._by_length)(rows, self.token_budget))

    def forward_chunks(self, num_directions: int) -> Iterator[Tensor]:
        """All row numbers in chunks, for a forward-mode pass: values and directions share the
        budget.
        """
        budget = max(LEAST_BUDGET, self.token_budget) / (1 + num_directions) / self.forward_cost
        return self._tensors(
            (self.forward_cut or self._by_length)(range(len(self.lengths)), max(1, int(budget)))
        )

    def _by_length(self, rows: Sequence[int], budget: int) -> list[list[int]]:
        return [
            [rows[k] for k in bucket]
            for bucket in length_buckets([self.lengths[r] for r in rows], budget)
        ]

    def _tensors(self, buckets: list[list[int]]) -> Iterator[Tensor]:
        return (torch.tensor(bucket) for bucket in buckets)


def trainable(model: nn.Module) -> Params:
    """The trainable parameters by name, detached; a tied weight comes once."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def copy_params(params: Params) -> Params:
    """A bit-exact copy."""
    return dict(zip(params, copies(params.values())))


def of_model(
    model: PreTrainedModel,
    texts: Texts,
    autocast: Callable[[], AbstractContextManager] = nullcontext,
    kernels: Callable[[], AbstractContextManager] = nullcontext,
) -> LogProbs:
    """The log-probs of a Hugging Face causal LM, dropout off.

    Args:
        autocast: makes the precision context of the training forward; gradients and forward-mode
            passes run under it.
        kernels: the layers of the training forward; gradients go through them.
    """

    def reverse(params: Params, row_R: Tensor) -> Tensor:
        some = texts.select(row_R)
        with evaluating(model), autocast(), kernels():
            return at(
                model,
                params,
                lambda m: token_logp(
                    m,
                    some.prompt_ids,
                    some.token_ids_NT,
                    some.mask_NT,
                    temperature=some.temperature,
                ),
            )

    def forward(params: Params, row_R: Tensor) -> Tensor:
        some = texts.select(row_R)
        with evaluating(model), maths_attention(model), autocast():
            columns = (some.prompt_ids, some.token_ids_NT, some.mask_NT)
            return logp_function(model, *columns, temperature=some.temperature, chunk=chunk)(params)

    def along(params: Params, direction_C: Params, row_R: Tensor) -> Tensor:
        assert parts.head is not None
        some = texts.select(row_R)
        rows = pack_rows(
            some.prompt_ids, some.token_ids_NT, some.mask_NT, model.device, share=share
        )
        with autocast(), kernels():
            change_CM = logp_change(
                model,
                params,
                direction_C,
                rows,
                parts.head,
                temperature=some.temperature,
                fused=has_triton_layers(model),
            )
        return torch.stack([place_tokens(change_M, rows, some.mask_NT) for change_M in change_CM])

    parts = backbone(model)
    with evaluating(model):
        share_reverse = reads_prompts_once(parts)
        with maths_attention(model), autocast():
            is_walked = can_walk(model)
            share = shares_prompts(parts) if is_walked else reads_prompts_once(parts, fused=False)
    lengths, chunk = texts.lengths, _head_chunk(model)
    return LogProbs(
        send(texts.mask_NT, model.device),
        lengths,
        reverse,
        forward,
        texts.token_budget,
        forward_cost(model.config, max(lengths, default=1)),
        texts.cut(share_reverse),
        texts.cut(share),
        along if is_walked else None,
    )


def forward_cost(config: Any, length: int) -> float:
    """Memory that one direction of forward mode takes for a token, as a share of what a backward
    keeps for it.

    A backward keeps the activations of every layer, about 16 D numbers a layer; forward mode holds
    one layer at a time, about 24 D, and the maths path of attention some 6 rows of L scores a head.

    >>> from transformers import LlamaConfig
    >>> round(
    ...     forward_cost(
    ...         LlamaConfig(hidden_size=576, num_hidden_layers=30, num_attention_heads=9), 180
    ...     ),
    ...     3,
    ... )
    0.085
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width, layers, heads = (
        getattr(text, name, None)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    return (
        (24 * width + 6 * heads * length) / (16 * width * layers)
        if width and layers and heads
        else 1.0
    )


def _head_chunk(model: PreTrainedModel) -> int | None:
    """Tokens whose logits are alive at once: on an accelerator four times the default, for fewer
    and larger kernels.
    """
    head = backbone(model).head
    return (
        max(1, 4 * CHUNK_LOGITS // len(head.weight_VD))
        if head is not None and head.weight_VD.is_cuda
        else None
    )


@contextmanager
def maths_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attention that can take the maths path for the block; what the model had comes back."""
    current = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    if current in MATHS_PATHS:
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(current)
