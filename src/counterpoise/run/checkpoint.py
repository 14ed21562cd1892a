"""Checkpoints: a plain Hugging Face folder with the optimizer (safetensors) and the loop's state
(JSON) beside it. Nothing is unpickled.

``checkpoints/batch_K`` is the state before batch K. It is complete or absent: a folder is filled
under another name, synced, renamed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from counterpoise.errors import ConfigError, nearest
from counterpoise.maths.adamw import AdamW, empty_state
from counterpoise.run.files import batch_file, batch_of, remove_folder, write_folder, write_json
from counterpoise.run.read import checkpoints, read_mapping
from counterpoise.run.schema import SAME_FILES, SCHEMA_VERSION
from counterpoise.text import visible

if TYPE_CHECKING:
    from counterpoise.policy import Policy

TEACHER = "teacher.safetensors"
COUNTS = ("batch_number", "num_prompts", "num_updates", "num_tokens", "num_grader_failures")


class LoopState(NamedTuple):
    """What the loop carries from one batch to the next, besides weights and optimizer; JSON."""

    batch_number: int = 0
    num_prompts: int = 0
    num_updates: int = 0
    num_tokens: int = 0
    num_grader_failures: int = 0
    method: dict[str, Any] | None = None
    ledger: dict[str, Any] | None = None
    sampler: str | None = None


def save(
    run_dir: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    state: LoopState,
    *,
    keep: int,
    keep_every: int,
    teacher: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``checkpoints/batch_K`` and drop older ones beyond ``keep`` (those at multiples of
    ``keep_every`` stay). ``teacher`` are weights of the run that are neither the policy's nor
    those of any other folder.
    """
    path = batch_file(run_dir, "checkpoints", state.batch_number, "")
    check_finite(path, policy.model)

    def fill(folder: Path) -> None:
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        save_file(
            optimizer_tensors(optimizer) | {"torch_rng": torch.get_rng_state()},
            folder / "optimizer.safetensors",
        )
        if teacher:
            save_file({k: v.contiguous() for k, v in teacher.items()}, folder / TEACHER)
        write_json(folder / "state.json", {"schema_version": SCHEMA_VERSION, **state._asdict()})

    try:
        write_folder(path, fill)
    except Exception as error:  # a full disk is another error in torch, safetensors, tokenizers
        raise OSError(
            f"checkpoint {path} could not be written ({_one_line(error)}). The last good checkpoint"
            " is kept; free some space and --resume."
        ) from error
    for stale in checkpoints(run_dir)[:-keep]:
        if not (keep_every and batch_of(stale) % keep_every == 0):
            remove_folder(stale)
    return path


def check_finite(path: Path, model: torch.nn.Module) -> None:
    """Weights that are not finite are an error, so that they never replace a good checkpoint."""
    for name, weight in model.named_parameters():
        if weight.requires_grad and not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"checkpoint {path}: the weights have diverged ({name} is not finite). It was not"
                " written and the last good checkpoint is kept. Train with a lower optimizer.lr."
            )


def restore(
    path: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    teacher: Mapping[str, Tensor] | None = None,
) -> LoopState:
    """Load weights, optimizer, RNG and the teacher's weights in place; returns the loop's state."""
    state = read_state(path / "state.json")
    try:
        load_weights(path, model)
        tensors = load_file(path / "optimizer.safetensors")
        torch.set_rng_state(tensors.pop("torch_rng"))
        load_optimizer(optimizer, tensors)
        saved = load_file(path / TEACHER) if teacher else {}
        for name, weight in (teacher or {}).items():
            weight.copy_(saved[name])
    except (OSError, KeyError, RuntimeError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"{path}: the checkpoint cannot be read ({_one_line(error)}). Remove it to go on from"
            " an earlier one, or start again with --fresh."
        ) from error
    return state


def read_state(file: Path) -> LoopState:
    """The loop's state of a checkpoint; unknown or missing keys and wrong types are an error."""
    state = read_mapping(file)
    version = state.pop("schema_version", None)
    if version not in SAME_FILES:
        raise ConfigError(
            f"{file}: schema version {version}, expected {SCHEMA_VERSION}. It is damaged, or of"
            " another version of counterpoise."
        )
    for key in state:
        if key not in LoopState._fields:
            raise ConfigError(f"{file}: unknown key {key!r}. {nearest(key, LoopState._fields)}")
    for key in COUNTS:
        value = state.get(key)
        if type(value) is not int or value < 0:
            raise ConfigError(f"{file}: {key} must be a whole number from 0 on, got {value!r}.")
    for key in ("method", "ledger"):
        if not isinstance(state.get(key), dict | None):
            raise ConfigError(f"{file}: {key} must be a mapping or null, got {state[key]!r}.")
    return LoopState(**state)


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Weights of a checkpoint into a model of the same shape; adapters alone where the model has
    adapters.
    """
    if (path / "adapter_model.safetensors").is_file():
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(model, load_file(path / "adapter_model.safetensors"))
        return
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        tensors |= load_file(file)
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise ConfigError(
            f"{path}: weights do not fit the model: missing {sorted(set(missing) - tied)[:3]},"
            f" unexpected {unexpected[:3]}."
        )


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Adam's state as named tensors, ``<index>.exp_avg`` and so on, in the parameters' order;
    moments of 8 bits are ``<index>.exp_avg_codes`` and ``<index>.exp_avg_scales``.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        f"{k}.{key}": value.contiguous()
        for k, p in enumerate(params)
        for key, value in optimizer.state.get(p, {}).items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """The reverse of ``optimizer_tensors``, in place and bit for bit."""
    is_ours = isinstance(optimizer, AdamW)
    is_8bit = isinstance(optimizer, AdamW) and optimizer.moments == "8bit"
    params = [(p, group.get("fused")) for group in optimizer.param_groups for p in group["params"]]
    for k, (p, is_fused) in enumerate(params):
        optimizer.state.pop(p, None)
        if f"{k}.step" not in tensors:
            continue
        state = {}
        for key, empty in empty_state(torch.empty_like(p, device="meta"), is_8bit).items():
            saved = tensors[f"{k}.{key}"]
            if saved.shape != empty.shape:
                raise KeyError(f"{k}.{key}: its shape is not that of the parameter")
            where = p.device if key != "step" or is_fused else "cpu"  # fused counts on the device
            state[key] = saved.to(where, empty.dtype if is_ours else saved.dtype, copy=True)
        optimizer.state[p] = state


def _one_line(error: Exception) -> str:
    return visible(" ".join(str(error).split()) or type(error).__name__)
