"""What counterpoise cannot do inside TRL, said in one line before training starts."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import trl
from transformers import Trainer
from trl.trainer.grpo_trainer import GRPOTrainer

from counterpoise.catalogue.temperature import check_temperature
from counterpoise.errors import nearest
from counterpoise.hosts.trl.batch import TOPK, head_of
from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.plan import num_updates
from counterpoise.hosts.trl.scoring import backbone_of
from counterpoise.hosts.trl.teacher import check_taught
from counterpoise.hosts.trl.turns import tells_turns

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

SUPPORTED = ">= 1.9, != 1.15.0"
# columns that TRL cannot give, and why
UNMEASURED = {
    "ref_kl_NT": "the KL of whole distributions, and TRL has the reference's log-probs of sampled"
    " tokens alone",
    "importance_NT": "the influence of tokens on the answer, and TRL does not know where an answer"
    " begins",
}
HOOKS = ("_generate_and_score_completions", "_prepare_inputs", "_compute_loss")


def check_version(version: str) -> None:
    """TRL's version is one that the hooks were tested with."""
    numbers = _numbers(version)
    if numbers < (1, 9) or numbers == (1, 15, 0):
        raise ValueError(
            f"counterpoise.hosts.trl works with trl {SUPPORTED}, found {version}. pip install"
            " 'trl>=1.9,!=1.15.0'"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())


def check_class(cls: type) -> None:
    """The mixin stands before ``GRPOTrainer`` or a subclass that keeps its hooks."""
    works = (
        "CreditMixin works with trl.GRPOTrainer and subclasses of your own. Take CreditGRPOTrainer"
        " and a method (method='rloo', 'gmpo', 'tpo', ...; `counterpoise methods` lists them)."
    )
    others = [base for base in cls.__mro__ if issubclass(base, Trainer) and base is not cls]
    if not issubclass(cls, GRPOTrainer):
        raise ValueError(
            f"{cls.__name__}: {others[0].__name__ if others else 'no'} trainer. {works}"
        )
    for base in others:
        hooks = [name for name in HOOKS if name in vars(base)]
        if base.__module__.startswith("trl.experimental") and hooks:
            raise ValueError(
                f"{cls.__name__}: {base.__name__} has a {hooks[0]} of its own. {works}"
            )


def check_trainer(trainer: CreditMixin, setup: Setup) -> None:
    """Everything that can be known before the first batch."""
    args, named = trainer.args, trainer.args.success_reward
    if named is not None and named not in trainer.reward_func_names:
        raise ValueError(
            f"success_reward: no reward function {named!r}."
            f" {nearest(named, trainer.reward_func_names)}"
        )
    _check_columns(setup)
    _check_fields(trainer, setup)
    if not setup.is_uniform or setup.has_own_plan or args.ledger_every:
        _check_groups(trainer)
        _check_parallelism(trainer)
        _check_trl_options(trainer, setup)
        check_temperature(setup.method.stages, trainer.temperature, "temperature of TRL's config")
        check_taught(trainer, setup)
    if setup.has_own_plan:
        _check_windows(trainer, setup)
    if args.ledger_every:
        _check_ledger(trainer)
    if setup.method.needs & (TOPK | {"hidden_NTD"}):
        backbone_of(trainer)
    if setup.method.needs & (TOPK | {"head_VD"}):
        _check_head(trainer)


def _check_columns(setup: Setup) -> None:
    for name, why in UNMEASURED.items():
        if name in setup.method.needs:
            raise ValueError(
                f"the method {setup.method.name!r} reads {name}, {why}. Use counterpoise train."
            )


def _check_fields(trainer: CreditMixin, setup: Setup) -> None:
    """The config still has the settings that the method made of it."""
    for name, value in setup.trl_fields.items():
        if (got := getattr(trainer.args, name)) != value:
            raise ValueError(
                f"{name} is {got!r}, and method {setup.method.name!r} set it to {value!r}: the"
                " config was changed after it was made. Give all settings to CreditGRPOConfig(...);"
                " method_loss=False keeps TRL's loss, method_axes changes the method's."
            )


def _check_head(trainer: CreditMixin) -> None:
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "the method reads the LM head's weight, which FSDP and DeepSpeed shard. Use DelTA's"
            " proxy 'row', or DDP."
        )
    head_of(trainer)


def _check_groups(trainer: CreditMixin) -> None:
    args, size = trainer.args, trainer.num_generations
    rows = args.per_device_train_batch_size * args.steps_per_generation
    if trainer.accelerator.num_processes > 1 and rows % size:
        raise ValueError(
            f"a group of {size} rollouts would straddle processes: each holds {rows} rows of a"
            f" batch (per_device_train_batch_size {args.per_device_train_batch_size} x"
            f" steps_per_generation {args.steps_per_generation}). Make that product a multiple of"
            " num_generations."
        )


def _check_parallelism(trainer: CreditMixin) -> None:
    config = getattr(trainer.accelerator, "parallelism_config", None)
    for kind, name in (("cp", "context"), ("sp", "sequence"), ("tp", "tensor")):
        if config is not None and (getattr(config, f"{kind}_size", 1) or 1) > 1:
            raise ValueError(
                f"{name} parallelism ({kind}_size {getattr(config, f'{kind}_size')}) is not"
                " supported: credit is pooled over processes that hold different rollouts. Use"
                " data parallelism (DDP, FSDP, DeepSpeed) alone."
            )


def _check_trl_options(trainer: CreditMixin, setup: Setup) -> None:
    args, needs = trainer.args, setup.method.needs
    if getattr(trainer, "use_liger_kernel", False):
        raise ValueError(
            "use_liger_kernel=True computes the loss past the hook (trl < 1.15). Set it to False,"
            " or take a newer trl."
        )
    if "ref_logp_NT" in needs and trainer.beta == 0.0:
        raise ValueError(
            "the method reads ref_logp_NT, and TRL keeps a reference model only with beta > 0. Set"
            " beta."
        )
    if "turn_score_NU" in needs and not tells_turns(trainer):
        raise ValueError(
            f"the method {setup.method.name!r} reads turn_score_NU, a score of the state after each"
            " turn, which TRL does not have. Take turn_rloo, as_trl or a rollout_func that returns"
            " turn_scores."
        )
    is_lost = args.importance_sampling_level == "sequence" and not setup.has_own_loss
    if is_lost and not all(rule.has("reads_rewards_only") for rule in setup.method.rules):
        raise ValueError(
            "importance_sampling_level='sequence' in TRL's loss gives every token of a rollout the"
            " rollout's mean credit. Set it to 'token', or leave method_loss on with method_axes"
            " {'loss': 'sequence_ratio'}, which keeps the credit of each token."
        )
    is_read = not setup.has_own_loss or trainer.beta != 0.0
    if args.loss_type == "luspo" and is_read and _numbers(trl.__version__) < (1, 10):
        raise ValueError(
            f"luspo of trl {trl.__version__} averages token losses over padding. Take trl >= 1.10,"
            " or another loss_type."
        )
    if setup.has_own_loss and args.top_entropy_quantile < 1.0:
        raise ValueError(
            "top_entropy_quantile is part of TRL's loss. Use method_axes {'credit': [{'name':"
            " 'top_entropy', 'fraction': ...}]}."
        )
    if setup.has_own_loss and args.off_policy_mask_threshold is not None:
        raise ValueError(
            f"off_policy_mask_threshold is part of TRL's loss, which method {setup.method.name!r}"
            " replaces. Set it to None."
        )


def _check_ledger(trainer: CreditMixin) -> None:
    per, gas = trainer.args.steps_per_generation, trainer.args.gradient_accumulation_steps
    if per % gas:
        raise ValueError(
            f"ledger_every accounts for the updates of one generation, and here an update holds"
            f" parts of several: steps_per_generation is {per}, gradient_accumulation_steps {gas}."
            " Make the first a multiple of the second."
        )


def _check_windows(trainer: CreditMixin, setup: Setup) -> None:
    args = trainer.args
    per, gas = args.steps_per_generation, args.gradient_accumulation_steps
    if per % gas:
        raise ValueError(
            f"steps_per_generation ({per}) must be a multiple of gradient_accumulation_steps"
            f" ({gas}): the plan deals the rows of one batch to whole updates."
        )
    updates, prompts = num_updates(trainer), args.generation_batch_size // trainer.num_generations
    plan = setup.method.planner
    if plan.has("keeps_prompts_whole") and prompts % updates:
        raise ValueError(
            f"plan {plan.name!r} gives each update whole prompts: {prompts} prompts per generation"
            f" do not divide into {updates} updates. Change per_device_train_batch_size or"
            " steps_per_generation so that they do."
        )
    if updates == 1 and not plan.has("shuffles_rows"):
        warnings.warn(
            f"plan {plan.name!r} does nothing here: there is one update per generation"
            f" (steps_per_generation {per} = gradient_accumulation_steps). Raise"
            f" steps_per_generation to {4 * gas} for four.",
            stacklevel=4,
        )
