"""What TRL's own scoring forward sees: log-probs, entropies, and the hidden states that feed the LM
head.

TRL does not hand these out, and since 1.15 no logits exist. So its method is watched while it runs:
``record_calls`` puts a recorder in front of a bound method for the time of a block, and takes it
away again. The method itself runs unchanged and nothing of it is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from counterpoise.hosts.trl.trainer import CreditMixin

SCORE = "_get_per_token_logps_and_entropies"
REWARDS = "_calculate_rewards"
# what names a column of TRL's output that token ids alone do not give
IMAGES = ("pixel", "image", "video", "audio", "tile", "token_type")


class Scores(NamedTuple):
    """One scoring forward of the policy; columns that were not asked for are None."""

    logp_NT: Tensor
    entropy_NT: Tensor | None
    hidden_NTD: Tensor | None


@contextmanager
def record_calls(
    owner: object, name: str, wrap: Callable[[Callable], Callable] | None = None
) -> Iterator[list[Any]]:
    """Results of the calls of ``owner.name`` inside the block; ``wrap`` may put something around
    the method.
    """
    original, was_shadowed, results = getattr(owner, name), name in vars(owner), []
    method = wrap(original) if wrap else original

    def recorder(*args: object, **kwargs: object) -> object:
        results.append(method(*args, **kwargs))
        return results[-1]

    setattr(owner, name, recorder)
    try:
        yield results
    finally:
        if was_shadowed:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def record_scores(trainer: CreditMixin, *, entropy: bool, hidden: bool) -> Iterator[list[Scores]]:
    """The scoring forwards of a block, with entropies and hidden states if asked for."""
    scores: list[Scores] = []

    def wrap(score: Callable) -> Callable:
        def watch(
            model: nn.Module,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            *args: object,
            **kwargs: object,
        ) -> tuple[Tensor, ...]:
            if model is not trainer.model:  # the reference
                return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            if entropy:
                kwargs["compute_entropy"] = True
            with (
                hidden_states(backbone_of(trainer), logits_to_keep) if hidden else nullcontext([])
            ) as parts:
                out = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            scores.append(Scores(out[0], out[1], torch.cat(parts) if parts else None))
            return out

        return watch

    with record_calls(trainer, SCORE, wrap):
        yield scores


@contextmanager
def hidden_states(backbone: nn.Module, num_tokens: int) -> Iterator[list[Tensor]]:
    """The hidden states behind the last ``num_tokens`` predictions, [B, T, D] per forward."""
    parts: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        parts.append(hidden[:, -num_tokens - 1 : -1].detach())

    handle = backbone.register_forward_hook(keep)
    try:
        yield parts
    finally:
        handle.remove()


def plain_model(trainer: CreditMixin) -> PreTrainedModel:
    """The model without what accelerate and PEFT put around it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone_of(trainer: CreditMixin) -> nn.Module:
    """The decoder below the LM head; an error where there is none to reach."""
    model = plain_model(trainer)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(decoder, nn.Module) or decoder is model:
        raise ValueError(
            f"{type(model).__name__} shows no backbone (get_decoder() gives"
            f" {type(decoder).__name__}), so the hidden states that the method reads cannot be"
            " reached. Use a Hugging Face causal LM, or a method without hidden_NTD (`counterpoise"
            " methods`)."
        )
    return decoder


def check_text_only(output: dict[str, Any], why: str) -> None:
    """What we would do with TRL's output needs no more than its token ids."""
    keys = [key for key in output if any(word in key for word in IMAGES)]
    if keys:
        raise ValueError(
            f"prompts with images ({', '.join(keys)} in TRL's output): {why} would leave them out."
            " With images, credit rules work on TRL's own order and log-probs, without plan or"
            " ledger: take steps_per_generation > gradient_accumulation_steps and a method whose"
            " loss TRL has."
        )


def score_policy(
    trainer: CreditMixin,
    rows: dict[str, Any],
    batch_size: int | None = None,
    model: nn.Module | None = None,
) -> tuple[Tensor, ...]:
    """TRL's forward over prompts and completions, without a gradient; ``model`` may be TRL's
    reference.
    """
    check_text_only(rows, "a forward of ours")
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    attended = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    width = rows["completion_ids"].shape[1]
    model = trainer.model if model is None else model
    with torch.no_grad():
        return getattr(trainer, SCORE)(model, ids, attended, width, batch_size=batch_size)


def score_again(
    trainer: CreditMixin, output: dict[str, Any], *, entropy: bool, hidden: bool
) -> Scores:
    """Score the completions of a batch once more, in TRL's micro-batches and by TRL's forward."""
    with record_scores(trainer, entropy=entropy, hidden=hidden) as scores:
        score_policy(trainer, output, trainer.args.per_device_train_batch_size)
    return scores[-1]
