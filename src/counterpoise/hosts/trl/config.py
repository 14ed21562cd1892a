"""``CreditGRPOConfig``: GRPOConfig with a method.

Works with TrlParser, YAML files and the command line.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from dataclasses import dataclass, field
from typing import Any

from trl.trainer.grpo_config import GRPOConfig

from counterpoise.hosts.trl.method import Setup, setup
from counterpoise.ledger.book import OWN_TOKENS
from counterpoise.ledger.measures.classes import check_axes
from counterpoise.text import load_yaml
from counterpoise.trainer.teacher import sources_of

# settings of TRL that speak of the loss, and of the advantage: a method brings its own
LOSS_FIELDS = (
    "loss_type",
    "epsilon",
    "epsilon_high",
    "delta",
    "importance_sampling_level",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
)
ADVANTAGE_FIELDS = ("scale_rewards", "multi_objective_aggregation")


@dataclass
class CreditGRPOConfig(GRPOConfig):
    """GRPOConfig plus the method.

    All fields of ``GRPOConfig`` stay; ``docs/hosts/trl.md`` says which a method sets for you.

    >>> CreditGRPOConfig("out", method="delta", bf16=False, use_cpu=True, report_to=[]).delta
    10.0
    """

    method: str = field(
        default="uniform",
        metadata={
            "help": (
                "A counterpoise preset, for example 'delta' (`counterpoise methods` lists them)."
                " 'uniform' is plain TRL."
            )
        },
    )
    method_axes: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": (
                'Axes of the method to change, as a mapping or a JSON/YAML string: \'{"credit":'
                ' [{"name": "top_entropy", "fraction": 0.2}]}\'. Axes: advantage, credit, loss,'
                " reduction, plan, controller."
            )
        },
    )
    plan: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": (
                "Which rollouts share an update: 'query_preserved', 'reward_balanced', ..."
                " or a JSON/YAML mapping. The default is the method's own; 'random_rows' is TRL's"
                " shuffle. Needs steps_per_generation > gradient_accumulation_steps."
            )
        },
    )
    method_advantage: bool = field(
        default=True,
        metadata={
            "help": (
                "False keeps TRL's advantages (scale_rewards, several objectives) and takes the"
                " token weights from the method."
            )
        },
    )
    method_loss: bool = field(
        default=True,
        metadata={
            "help": (
                "False keeps TRL's loss (loss_type, epsilon, ...) and takes only advantage and"
                " credit from the method."
            )
        },
    )
    success: float | None = field(
        default=None,
        metadata={
            "help": (
                "A reward of at least this much is a success, for methods and plans that tell"
                " successes from failures. The default is 0.5."
            )
        },
    )
    success_reward: str | None = field(
        default=None,
        metadata={
            "help": (
                "Name of the reward function that decides success, for example 'accuracy_reward';"
                " `success` is then a threshold of its reward."
            )
        },
    )
    solution_column: str = field(
        default="solution",
        metadata={
            "help": (
                "Column of the dataset with the solution, for methods whose teacher reads it"
                " ('opsd')."
            )
        },
    )
    feedback_column: str = field(
        default="feedback",
        metadata={
            "help": (
                "What a reward function says of each completion, by log_extra(feedback_column,"
                " texts), for methods whose teacher reads it ('sdpo')."
            )
        },
    )
    ledger_every: int = field(
        default=0,
        metadata={
            "help": (
                "Account for the updates of every n-th batch (generation), token by token, in"
                " output_dir/counterpoise. 0 is never."
            )
        },
    )
    ledger_decompose: list[str] = field(
        default_factory=lambda: ["sign"],
        metadata={"help": "What the ledger tells apart: sign, category, sharing, confidence."},
    )
    ledger_own_tokens: int = field(
        default=OWN_TOKENS,
        metadata={
            "help": (
                "Tokens of each update whose own part the ledger computes (a gradient each). 0 is"
                " none."
            )
        },
    )

    def __post_init__(self) -> None:
        self.method_axes = _mapping("method_axes", self.method_axes) or {}
        self.plan = _mapping("plan", self.plan, may_be_name=True)
        check_axes(self.ledger_decompose)
        if self.ledger_every < 0:
            raise ValueError(
                f"ledger_every: expected 0 (never) or a number of batches, got {self.ledger_every}."
            )
        if self.ledger_own_tokens < 0:
            raise ValueError(
                "ledger_own_tokens: expected 0 (none) or a number of tokens, got"
                f" {self.ledger_own_tokens}."
            )
        for name, value in self.setup().trl_fields.items():
            self._set(name, value)
        self._warn_unused()
        self._trl_post_init()

    def setup(self) -> Setup:
        """The method as TRL runs it."""
        assert not isinstance(self.method_axes, str)
        axes = {**(self.method_axes or {}), **({} if self.plan is None else {"plan": self.plan})}
        how = {"own_advantage": self.method_advantage, "own_loss": self.method_loss}
        # a threshold of one reward function becomes a column of the batch
        success = self.success if self.success_reward is None else None
        return setup(self.method, axes, **how, loss_type=self.loss_type, success=success)

    def _set(self, name: str, value: object) -> None:
        if getattr(self, name) not in (value, _default(name)):
            warnings.warn(
                f"{name}={getattr(self, name)!r} is not used: method {self.method!r} sets it to"
                f" {value!r}. method_loss=False keeps TRL's loss; method_axes changes the"
                " method's.",
                stacklevel=4,
            )
        setattr(self, name, value)

    def _warn_unused(self) -> None:
        """Settings of TRL that the method replaces, where no other of TRL's says the same."""
        setup = self.setup()
        if not setup.method.reads_success:
            for name in ("success", "success_reward"):
                if getattr(self, name) is not None:
                    warnings.warn(
                        f"{name}={getattr(self, name)!r} is not read: method {self.method!r} with"
                        f" plan {setup.method.planner.name!r} takes rewards as numbers.",
                        stacklevel=4,
                    )
        for name, source in (("solution_column", "solution"), ("feedback_column", "feedback")):
            if getattr(self, name) != source and source not in sources_of(setup.method):
                warnings.warn(
                    f"{name}={getattr(self, name)!r} is not read: method {self.method!r} has no"
                    f" teacher with the source {source!r}.",
                    stacklevel=4,
                )
        has_loss = self.method_loss and not setup.is_uniform
        theirs = {
            "method_loss": () if self.method_loss else ("loss", "reduction"),
            "method_advantage": () if self.method_advantage else ("advantage",),
        }
        for switch, axes in theirs.items():
            for axis in set(axes) & set(self.method_axes or {}):
                warnings.warn(
                    f"method_axes: the axis {axis!r} is not used: {switch}=False keeps TRL's.",
                    stacklevel=4,
                )
        names = [
            *(name for name in LOSS_FIELDS if has_loss and name not in setup.trl_fields),
            *(ADVANTAGE_FIELDS if setup.has_own_advantage else ()),
        ]
        for name in names:
            if getattr(self, name) != _default(name):
                keep = "method_loss" if name in LOSS_FIELDS else "method_advantage"
                message = (
                    f"{name}={getattr(self, name)!r} is not used: method {self.method!r} brings its"
                    f" own. {keep}=False keeps TRL's."
                )
                warnings.warn(message, stacklevel=4)

    def _trl_post_init(self) -> None:
        """TRL wants two rollouts per prompt; methods that do not compare the rollouts of a prompt
        work with one.
        """
        if self.num_generations != 1 or self.method == "uniform" or not self.method_advantage:
            return super().__post_init__()
        self.setup().method.check_group_size(1, "num_generations is 1.")
        updates = self.steps_per_generation or self.gradient_accumulation_steps
        sizes = (
            self.per_device_train_batch_size,
            updates,
            self.generation_batch_size or 1,
            int(os.environ.get("WORLD_SIZE", 1)),
        )
        # any divisor of the generation batch passes TRL's check of groups; the trainer reads the 1
        # that is put back
        self.num_generations = next((size for size in sizes if size > 1), 1)
        self.num_generations_eval = self.num_generations_eval or 1
        super().__post_init__()
        self.num_generations = 1
        return None


def _mapping(name: str, value: dict[str, Any] | str | None, may_be_name: bool = False) -> Any:
    """A mapping from the command line's string; for a plan also a bare name."""
    if not isinstance(value, str):
        return value
    parsed = load_yaml(value, f"{name}: {value!r}")
    if isinstance(parsed, dict) or (may_be_name and isinstance(parsed, str)):
        return parsed
    raise ValueError(
        f"{name}: expected a mapping{' or a name' if may_be_name else ''}, got {value!r}."
    )


def _default(name: str) -> Any:
    return {f.name: f.default for f in dataclasses.fields(GRPOConfig)}[name]
