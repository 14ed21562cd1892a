"""What counterpoise cannot do inside TRL, said in one line before training starts."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import trl

from counterpoise.hosts.trl.batch import TOPK, head_of
from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.plan import num_updates
from counterpoise.hosts.trl.scoring import backbone_of

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

SUPPORTED = ">= 1.9, != 1.15.0"


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


def check_trainer(trainer: CreditMixin, setup: Setup) -> None:
    """Everything that can be known before the first batch."""
    args = trainer.args
    if not setup.is_uniform or setup.has_own_plan or args.ledger_every:
        _check_groups(trainer)
        _check_parallelism(trainer)
        _check_trl_options(trainer, setup)
    if setup.has_own_plan:
        _check_windows(trainer, setup)
    if setup.method.needs & (TOPK | {"hidden_NTD"}):
        backbone_of(trainer)
    if setup.method.needs & (TOPK | {"head_VD"}):
        _check_head(trainer)


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
    if args.mask_truncated_completions:
        raise ValueError(
            "mask_truncated_completions=True empties rollouts, and a rollout without a token has no"
            " credit. Set it to False; give cut completions the reward of a failure instead."
        )
    images = {"image", "images"} & set(getattr(trainer.train_dataset, "column_names", None) or ())
    if images and (setup.has_own_plan or needs or args.ledger_every):
        raise ValueError(
            f"prompts with images ({', '.join(sorted(images))}) work with credit rules on TRL's own"
            " order and log-probs alone."
        )
    if "ref_logp_NT" in needs and trainer.beta == 0.0:
        raise ValueError(
            "the method reads ref_logp_NT, and TRL keeps a reference model only with beta > 0. Set"
            " beta."
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
