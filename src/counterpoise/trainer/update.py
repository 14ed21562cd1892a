"""One update: the update's rows -> loss -> gradient -> parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.catalogue.method import Method
from counterpoise.maths.adamw import AdamW
from counterpoise.policy import measure, token_logp
from counterpoise.policy.backbone import backbone
from counterpoise.policy.fused import fused_layers, why_not_fused
from counterpoise.policy.logp import reads_prompts_once
from counterpoise.policy.pack import (
    even_buckets,
    kernels_without_plans,
    response_lengths,
    row_buckets,
)
from counterpoise.policy.precision import autocast
from counterpoise.policy.prefix import same_attention
from counterpoise.rollouts import RolloutBatch
from counterpoise.trainer.config import Config, ConfigError, Optimizer
from counterpoise.trainer.threads import MOST_PARAMETERS, add_gradients
from counterpoise.types import Rows, TokenLoss

log = logging.getLogger("counterpoise.trainer")
_FITS: WeakKeyDictionary[Any, int] = (
    WeakKeyDictionary()
)  # token budgets that were found by running out of memory

_IS_FUSED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # whether kernels can be fused


class Update(NamedTuple):
    """An update as it was: the tensors the loss used and returned, for all rows of the
    update.
    """

    rows: Rows
    trainer_logp_NT: Tensor
    loss: TokenLoss
    grad_norm: float
    clip_factor: float
    lr: float


def apply_update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    method: Method,
    rows: Rows,
    collected: RolloutBatch,
    config: Config,
) -> Update:
    """Accumulate the gradient of the update's rows over micro-batches, clip it, update.

    The cut into micro-batches changes no result.
    """
    rows = prepare_rows(model, method, rows, collected, config)
    cuts, parts = accumulate_gradients(model, optimizer, method, rows, collected, config)
    order_R = torch.cat(cuts).argsort()
    logp_NT, *columns = (torch.cat(column)[order_R] for column in zip(*parts))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grad_norm = float(
        torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    )
    clip_factor = clip_(parameters, grad_norm, config.optimizer.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return Update(
        rows, logp_NT, TokenLoss(*columns), grad_norm, clip_factor, optimizer.param_groups[0]["lr"]
    )


def accumulate_gradients(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    method: Method,
    rows: Rows,
    collected: RolloutBatch,
    config: Config,
) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
    """The update's gradient in the parameters; its micro-batches and their columns.

    Out of memory, it begins again with half the budget.
    """
    while True:
        budget = budget_that_fits(model, config)
        cuts = micro_batches(model, rows, collected, budget, config.optimizer)
        try:
            return cuts, micro_gradients(
                model, method, [rows.select(pick_R) for pick_R in cuts], collected, config
            )
        except torch.OutOfMemoryError as error:
            if len(cuts) == len(rows.row_R):
                raise ValueError(
                    "update: no memory for a single rollout. Set"
                    " optimizer.activation_checkpointing to true, or lower rollouts.max_new_tokens"
                    f" (now {config.rollouts.max_new_tokens})."
                ) from error
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        _FITS[model] = budget // 2
        log.warning(
            "update: no memory for micro-batches of %d tokens; set optimizer.token_budget to %d.",
            budget,
            budget // 2,
        )


def budget_that_fits(model: PreTrainedModel, config: Config) -> int:
    """The recipe's token budget, or what was left of it after running out of memory."""
    return min(config.token_budget, _FITS.get(model, config.token_budget))


def micro_gradients(
    model: PreTrainedModel,
    method: Method,
    micros: list[Rows],
    collected: RolloutBatch,
    config: Config,
) -> list[tuple[Tensor, ...]]:
    """Add the gradients of micro-batches; the columns the loss used and returned."""
    settings = config.optimizer

    def loss_of(micro: Rows) -> tuple[Tensor, tuple[Tensor, ...]]:
        with autocast(model), recomputing(model, settings):
            trainer_logp_NT = token_logp(
                model,
                [collected.prompt_ids[r] for r in micro.row_R.tolist()],
                collected.batch.token_ids_NT[micro.row_R],
                micro.mask_NT,
                temperature=config.rollouts.temperature,
            )
        loss = method.loss(trainer_logp_NT, micro)
        columns = tuple(column.detach() for column in (trainer_logp_NT, *loss))
        return (loss.loss_NT * micro.scale_NT).sum(), columns

    # the backward too: it may compute layers again, and must do so in the same way
    with kernels_without_plans(), chosen_kernels(model, settings):
        if works_in_threads(model, settings):
            parameters = [p for p in model.parameters() if p.requires_grad]
            return add_gradients(parameters, micros, loss_of)
        return [_backward(model, partial(loss_of, micro)) for micro in micros]


def _backward(
    model: PreTrainedModel, loss_of: Callable[[], tuple[Tensor, tuple[Tensor, ...]]]
) -> tuple[Tensor, ...]:
    with same_attention(model):
        loss, columns = loss_of()
        loss.backward()
    return columns


def works_in_threads(model: PreTrainedModel, settings: Optimizer) -> bool:
    """Whether each of torch's threads takes micro-batches of its own: a small model on a CPU, with
    fused kernels (others share what they write to) and without dropout.
    """
    return (
        model.device.type == "cpu"
        and has_fused_kernels(model, settings)
        and not settings.activation_checkpointing
        and not model.training
        and model.num_parameters() <= MOST_PARAMETERS
    )


def prepare_rows(
    model: PreTrainedModel, method: Method, rows: Rows, collected: RolloutBatch, config: Config
) -> Rows:
    """Rows with what the loss must know of the whole update; one no-grad forward where the method
    asks for it.
    """
    if not method.needs_update_logp:
        return rows
    prompt_ids = [collected.prompt_ids[r] for r in rows.row_R.tolist()]
    with autocast(model), chosen_kernels(model, config.optimizer):
        columns = measure(
            model,
            prompt_ids,
            collected.batch.token_ids_NT[rows.row_R],
            rows.mask_NT,
            {"trainer_logp_NT"},
            temperature=config.rollouts.temperature,
            token_budget=config.token_budget,
        )
    return method.prepare(columns["trainer_logp_NT"], rows)


def micro_batches(
    model: PreTrainedModel,
    rows: Rows,
    collected: RolloutBatch,
    token_budget: int,
    settings: Optimizer,
) -> list[Tensor]:
    """Micro-batches by the tokens of their forward, the longest first; indices into ``rows``."""
    prompt_ids = [collected.prompt_ids[r] for r in rows.row_R.tolist()]
    lengths, share = response_lengths(rows.mask_NT), reads_prompts_once(backbone(model))
    if works_in_threads(model, settings) and torch.get_num_threads() > 1:
        multiple = torch.get_num_threads()
        cuts = even_buckets(prompt_ids, lengths, token_budget, multiple, share=share)
    else:
        cuts = row_buckets(prompt_ids, lengths, token_budget, share=share)
    return [torch.tensor(cut, device=rows.mask_NT.device) for cut in reversed(cuts)]


def prepare_update(model: PreTrainedModel, settings: Optimizer) -> Any:
    """The model with its decoder layers compiled or able to compute activations again, as the
    recipe says.
    """
    check_kernels(model, settings)
    if settings.activation_checkpointing:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(
                f"optimizer.activation_checkpointing: {type(model).__name__} does not support it."
                " Set it to false."
            )
        decoder_layers(model, "activation_checkpointing")
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if settings.compile:
        for layer in decoder_layers(model, "compile"):
            layer.compile(dynamic=True)
    return model


def check_kernels(model: PreTrainedModel, settings: Optimizer) -> None:
    """An error where the recipe asks for fused kernels that the update could not use."""
    if settings.kernels != "fused":
        return
    reason = "optimizer.compile fuses them already" if settings.compile else why_not_fused(model)
    if reason:
        raise ConfigError(
            f"optimizer.kernels: the layers cannot have fused kernels: {reason}. Set it to auto or"
            " torch."
        )


def chosen_kernels(model: PreTrainedModel, settings: Optimizer) -> AbstractContextManager[None]:
    """The decoder layers with the recipe's kernels for the block."""
    return fused_layers(model) if has_fused_kernels(model, settings) else nullcontext()


def has_fused_kernels(model: PreTrainedModel, settings: Optimizer) -> bool:
    """Whether the update's layers have fused kernels; the layers are looked at once per model."""
    if settings.kernels == "torch" or settings.compile:
        return False
    if model not in _IS_FUSED:
        _IS_FUSED[model] = why_not_fused(model) is None
    return _IS_FUSED[model]


def decoder_layers(model: PreTrainedModel, setting: str) -> list[Any]:
    layers = getattr(model.get_decoder(), "layers", None)
    if layers is None:
        raise ConfigError(
            f"optimizer.{setting}: {type(model).__name__} has no list of decoder layers. Set it to"
            " false."
        )
    return list(layers)


@contextmanager
def recomputing(model: PreTrainedModel, settings: Optimizer) -> Iterator[None]:
    """Decoder layers recompute their activations for the block.

    Only they enter training mode: dropout stays as it was.
    """
    layers = (
        decoder_layers(model, "activation_checkpointing")
        if settings.activation_checkpointing
        else []
    )
    modes = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes):
            layer.training = mode


def clip_(parameters: list[Tensor], grad_norm: float, clip_norm: float | None) -> float:
    """Scale gradients in place so that their norm is at most ``clip_norm``; returns the factor."""
    if not math.isfinite(grad_norm):
        raise ValueError(
            f"the gradient's norm is {grad_norm}. Lower optimizer.lr, or look at the last rollouts"
            " in the run folder."
        )
    factor = 1.0 if clip_norm is None else min(1.0, clip_norm / (grad_norm + 1e-6))
    if factor < 1.0:
        grads = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]
    return factor


def adamw(model: torch.nn.Module, settings: Optimizer, seed: int = 0) -> torch.optim.AdamW | AdamW:
    """AdamW over the trainable parameters: torch's, or ours for weights in bfloat16 and moments of
    8 bits; ``seed`` is that of its rounding.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    options = {
        "lr": settings.lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.moments == "8bit" or any(p.dtype == torch.bfloat16 for p in parameters):
        return AdamW(parameters, **options, moments=settings.moments, seed=seed)
    is_fused = parameters[0].is_cuda or parameters[0].dtype == torch.float32
    return torch.optim.AdamW(parameters, **options, fused=is_fused)


def learning_rate(settings: Optimizer, update: int, num_updates: int) -> float:
    """The rate of one update (counted from 0): linear warm-up, then constant, linear to 0
    or a half cosine.

    >>> learning_rate(Optimizer(lr=1.0, warmup=4), update=1, num_updates=100)
    0.5
    """
    if update < settings.warmup:
        return settings.lr * (update + 1) / settings.warmup
    progress = (update - settings.warmup) / max(1, num_updates - settings.warmup)
    shape = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }
    return settings.lr * shape[settings.schedule]
