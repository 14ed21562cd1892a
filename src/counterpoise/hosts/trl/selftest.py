"""A training of two updates on a model made in code, watched from inside: what ``check_trl`` and
``doctor`` look at. Needs no network.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer
from counterpoise.hosts.trl.scoring import SCORE, record_calls

if TYPE_CHECKING:
    from datasets import Dataset

WORDS = tuple(f"w{k}" for k in range(12))
CPU = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
}


class Micro(NamedTuple):
    """A micro-batch as the loss saw it; ``grad_NT`` is the derivative of the loss by each token's
    log-prob.
    """

    credit_NT: Tensor
    mask_NT: Tensor
    grad_NT: Tensor
    is_first_update: bool


class Probe(NamedTuple):
    """What a short training did; rows by update."""

    micros: list[Micro]
    trained_rows: list[list[int]]
    planned_rows: list[list[int]]


def probe() -> Probe:
    """Two updates on eight rollouts of two prompts; of failed rollouts one token keeps its
    credit.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), _offline():
        warnings.simplefilter("ignore")
        trainer = _Watch(
            model=tiny_model(),
            reward_funcs=_every_second,
            args=CreditGRPOConfig(
                output_dir=folder,
                method="dapo",
                method_axes={"credit": ["negative_token_filter"]},
                plan="query_preserved",
                num_generations=4,
                per_device_train_batch_size=4,
                steps_per_generation=2,
                max_steps=2,
                max_completion_length=6,
                logging_steps=10,
                **CPU,
            ),
            train_dataset=_prompts(),
            processing_class=tiny_tokenizer(),
        )
        trainer.train()
    assert trainer.credit_plan is not None
    return Probe(
        trainer.micros, trainer.rows, [sorted(update.tolist()) for update in trainer.credit_plan]
    )


class _Watch(CreditGRPOTrainer):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.micros: list[Micro] = []
        self.rows: list[list[int]] = []

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        with record_calls(self, SCORE) as results:
            loss = super()._compute_loss(model, inputs)
        (grad_NT,) = torch.autograd.grad(loss, results[-1][0], retain_graph=True)
        self.micros.append(
            Micro(
                inputs["advantages"],
                inputs["completion_mask"].bool(),
                grad_NT,
                is_first_update=self._step == 0,
            )
        )
        self.rows.append(sorted(inputs["cp_row"].tolist()))
        return loss


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Twelve words, a stop and a padding token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel(
            {word: k for k, word in enumerate(["<pad>", "<eos>", *WORDS])}, unk_token="<pad>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def tiny_model(seed: int = 0, **changes: float) -> LlamaForCausalLM:
    """A Llama of two layers and 16 dimensions whose distributions are neither flat nor certain."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "vocab_size": len(WORDS) + 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 1,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))


def _prompts() -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"w{k} w{k + 1}" for k in range(8)]})


def _every_second(completions: list[str], **kwargs: object) -> list[float]:
    return [float(k % 2) for k in range(len(completions))]


class _offline:
    """TRL and the hub stay off the network for the block."""

    def __enter__(self) -> None:
        self._was = os.environ.get("HF_HUB_OFFLINE")
        os.environ["HF_HUB_OFFLINE"] = "1"

    def __exit__(self, *error: object) -> None:
        if self._was is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = self._was
