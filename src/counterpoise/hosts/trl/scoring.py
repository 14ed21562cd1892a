"""What TRL's own scoring forward sees: log-probs, entropies, and the hidden states that feed the LM
head.

TRL does not hand these out, and since 1.15 no logits exist. So its method is watched while it runs:
``record_calls`` puts a recorder in front of a bound method for the time of a block and takes it away
again; the method itself runs unchanged and nothing of it is copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SCORE = "_get_per_token_logps_and_entropies"
REWARDS = "_calculate_rewards"


class Scored(NamedTuple):
    """One scoring forward of the policy; columns that were not asked for are None."""

    logp_NT: Tensor
    entropy_NT: Tensor | None
    hidden_NTD: Tensor | None


@contextmanager
def record_calls(
    owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
) -> Iterator[list[Any]]:
    """Results of the calls of ``owner.name`` inside the block; ``wrap`` may put something around
    the method.
    """
    original, was_shadowed, results = getattr(owner, name), name in vars(owner), []
    method = wrap(original) if wrap else original

    def recorder(*args: Any, **kwargs: Any) -> Any:
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
def record_scores(trainer: Any, *, entropy: bool, hidden: bool) -> Iterator[list[Scored]]:
    """The scoring forwards of a block, with entropies and hidden states if asked for."""
    found: list[Scored] = []

    def wrap(score: Callable[..., Any]) -> Callable[..., Any]:
        def watched(
            model: Any,
            input_ids: Tensor,
            attention_mask: Tensor,
            logits_to_keep: int,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if model is not trainer.model:  # the reference
                return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            if entropy:
                kwargs["compute_entropy"] = True
            with (
                hidden_states(backbone_of(trainer), logits_to_keep) if hidden else nullcontext([])
            ) as parts:
                out = score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
            found.append(Scored(out[0], out[1], torch.cat(parts) if parts else None))
            return out

        return watched

    with record_calls(trainer, SCORE, wrap):
        yield found


@contextmanager
def hidden_states(backbone: nn.Module, num_tokens: int) -> Iterator[list[Tensor]]:
    """The hidden states behind the last ``num_tokens`` predictions, one tensor [B, T, D] a forward."""
    parts: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        parts.append(hidden[:, -num_tokens - 1 : -1].detach())

    handle = backbone.register_forward_hook(keep)
    try:
        yield parts
    finally:
        handle.remove()


def backbone_of(trainer: Any) -> nn.Module:
    """The decoder below the LM head; an error where there is none to reach."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(decoder, nn.Module) or decoder is model:
        raise ValueError(
            f"{type(model).__name__} shows no backbone (get_decoder() gives"
            f" {type(decoder).__name__}), so the hidden states that the method reads cannot be"
            " reached. Use a Hugging Face causal LM, or a method without hidden_NTD (`counterpoise"
            " methods`)."
        )
    return decoder


def score_again(trainer: Any, output: dict[str, Any], *, entropy: bool, hidden: bool) -> Scored:
    """Score the completions of a generation once more, in TRL's batches and by TRL's forward."""
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attended = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    width, rows = output["completion_ids"].shape[1], trainer.args.per_device_train_batch_size
    with torch.no_grad(), record_scores(trainer, entropy=entropy, hidden=hidden) as found:
        getattr(trainer, SCORE)(trainer.model, ids, attended, width, batch_size=rows)
    return found[-1]
