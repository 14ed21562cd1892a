"""A recipe: YAML, checked before a model loads.

Unknown keys are errors with the nearest known name; ``--set a.b=c`` overrides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from counterpoise.errors import nearest


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Rollouts(Section):
    """Sampling. ``max_rows`` bounds the rollouts in flight; None means all at once."""

    prompts: int = Field(default=32, ge=1)
    group_size: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(default=96, ge=1)
    max_prompt_tokens: int = Field(default=512, ge=1)
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    max_rows: int | None = Field(default=None, ge=1)


class Optimizer(Section):
    """AdamW.

    ``token_budget`` bounds padded tokens of a micro-batch and never changes a result beyond
    rounding (None: by the device).

    ``activation_checkpointing`` computes activations again in the backward (less memory, about a
    third more time); ``compile`` compiles the decoder layers of the update with torch.compile (on a
    GPU: a minute at the start, faster batches)."""

    lr: float = Field(default=3e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    updates_per_batch: int = Field(default=4, ge=1)
    clip_norm: float | None = Field(default=1.0, gt=0)
    warmup: int = Field(default=0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    token_budget: int | None = Field(default=None, ge=1)
    activation_checkpointing: bool = False
    compile: bool = False


class Eval(Section):
    """Held-out evaluation; ``every: 0`` switches it off.

    Sampled at ``temperature`` (0 is greedy), ``samples`` a prompt.
    """

    every: int = Field(default=20, ge=0)
    prompts: int = Field(default=200, ge=1)
    samples: int = Field(default=1, ge=1)
    temperature: float = Field(default=1.0, ge=0)


class Ledger(Section):
    """``every: 0`` switches the ledger off.

    ``decompose``: classes of tokens whose part in every change is told apart.

    ``bank``: prompts with two verified solutions or more among which solution drift is followed; 0
    follows none."""

    every: int = Field(default=10, ge=0)
    decompose: list[str] = ["sign"]
    categories: str | None = None
    bank: int = Field(default=16, ge=0)


class Lora(Section):
    r: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class Buffer(Section):
    """reward_balanced, mode buffer: sampling rounds with the policy frozen until the minority sign
    is large enough.
    """

    max_rounds: int = Field(default=10, ge=1)


class Corrections(Section):
    """IBPO's generate mode: the policy corrects its failed answers; ``samples`` corrections each,
    the best verified one is kept.
    """

    samples: int = Field(default=2, ge=1)
    edit_cost: float = Field(default=0.1, ge=0)
    template: str = (
        "{prompt}\n\nA wrong answer:\n{failed}\n\nA correct answer to learn"
        " from:\n{reference}\n\nCorrected answer:\n"
    )


class Config(Section):
    """One training run; the keys are public."""

    seed: int = 0
    run_dir: str = "runs/run"
    model: str = "bundled"
    chat: bool | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    device: str = "auto"
    task: dict[str, Any] = {"name": "arithmetic"}
    method: dict[str, Any] = {"name": "grpo"}
    num_batches: int = Field(default=60, ge=1)
    rollouts: Rollouts = Rollouts()
    optimizer: Optimizer = Optimizer()
    eval: Eval = Eval()
    ledger: Ledger = Ledger()
    lora: Lora | None = None
    buffer: Buffer = Buffer()
    corrections: Corrections | None = None
    grader_time_limit_s: float = Field(default=10.0, gt=0)
    checkpoint_every: int = Field(default=10, ge=0)
    keep_checkpoints: int = Field(default=1, ge=1)
    keep_every: int = Field(default=0, ge=0)
    save_rollouts_every: int = Field(default=1, ge=0)
    trackers: list[str] = ["tensorboard"]
    project: str = "counterpoise"

    @property
    def token_budget(self) -> int:
        """Padded tokens of a micro-batch: small on a CPU, whose caches are small; large on an
        accelerator, which idles otherwise.
        """
        device = (
            ("cuda" if torch.cuda.is_available() else "cpu")
            if self.device == "auto"
            else self.device
        )
        return self.optimizer.token_budget or (2048 if device == "cpu" else 32768)

    @field_validator("task", "method", mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("expected a name or a mapping with 'name'")
        return value

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, value: list[str]) -> list[str]:
        known = ("tensorboard", "wandb", "trackio")
        for name in value:
            if name not in known:
                raise ValueError(f"unknown tracker {name!r}. {nearest(name, known)}")
        return value


# keys of recipes written for schema version 1
RENAMED = {
    "num_steps": "num_batches",
    "optimizer.steps_per_batch": "optimizer.updates_per_batch",
}


class ConfigError(ValueError):
    """A recipe that cannot run; the message is one line a person can act on."""


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a recipe, apply ``a.b=c`` overrides (values are YAML), check it."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(
            f"config: no file {str(path)!r}. Recipes are in recipes/, for example"
            " recipes/demo.yaml."
        )
    try:
        raw = yaml.safe_load(file.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"config: {path} must be a mapping of keys, got {type(raw).__name__}.")
    for override in overrides or []:
        _override(raw, override)
    return parse_config(raw)


def parse_config(raw: dict[str, Any]) -> Config:
    """Check a mapping; the first fault is the message."""
    try:
        return Config(**raw)
    except ValidationError as error:
        raise ConfigError(_first_fault(error)) from None


def _override(raw: dict[str, Any], text: str) -> None:
    path, equals, value = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"--set {text!r}: expected a.b=c, for example --set optimizer.lr=1e-5.")
    *parents, last = path.split(".")
    node = raw
    for key in parents:
        if isinstance(node.get(key), str) and key in ("task", "method"):
            node[key] = {"name": node[key]}
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {text!r}: {key!r} is {child!r}, not a mapping.")
        node = child
    node[last] = _value(value)


def _value(text: str) -> Any:
    value = yaml.safe_load(text)
    if isinstance(value, str):
        try:  # YAML 1.1 reads 1e-5 as a string
            return float(value)
        except ValueError:
            return value
    return value


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    if where in RENAMED:
        return f"config: {where!r} is called {RENAMED[where]!r} now."
    if fault["type"] == "extra_forbidden":
        section: Any = Config
        for part in fault["loc"][:-1]:
            section = section.model_fields[str(part)].annotation
            section = next(
                (
                    s
                    for s in getattr(section, "__args__", ())
                    if isinstance(s, type) and issubclass(s, Section)
                ),
                section,
            )
        return (
            f"config: unknown key {where!r}. {nearest(str(fault['loc'][-1]), section.model_fields)}"
        )
    return (
        f"config: {where}: {fault['msg'].removeprefix('Value error, ')}, got"
        f" {fault.get('input')!r}."
    )
