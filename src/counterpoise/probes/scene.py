"""A saved moment of a run: the checkpoint before batch N, the batch itself, and everything
that trained on it.

Axes as in ``types``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.catalogue.method import Method
from counterpoise.catalogue.registry import method as make_method
from counterpoise.ledger.calculus.logprobs import Texts
from counterpoise.ledger.measures.categories import load_categories
from counterpoise.maths.transfer import fetch
from counterpoise.policy import Policy
from counterpoise.rollouts import RolloutBatch
from counterpoise.run import checkpoint
from counterpoise.run.checkpoint import LoopState
from counterpoise.run.files import batch_of
from counterpoise.run.read import batch_files, check_current, checkpoints, read_mapping
from counterpoise.run.rollouts import read_rollouts
from counterpoise.stage import success_of
from counterpoise.tasks import task as make_task
from counterpoise.trainer.collect import measure_columns
from counterpoise.trainer.config import Config, load_config
from counterpoise.trainer.importance import score_tokens
from counterpoise.trainer.loop import load_policy, set_rate
from counterpoise.trainer.prompts import prompts_from
from counterpoise.trainer.teacher import Teacher, load_teacher, measure_teacher, saved_weights
from counterpoise.trainer.update import adamw
from counterpoise.types import Credit, Plan, Rows


class Scene(NamedTuple):
    """Model and optimizer as they were before batch ``batch``; the batch with its credit and plan
    under the run's method.
    """

    run_dir: Path
    batch_number: int
    config: Config
    method: Method
    policy: Policy
    reference: Any
    teacher: Teacher | None
    optimizer: torch.optim.Optimizer
    state: LoopState
    task: Any
    collected: RolloutBatch
    credit: Credit
    plan: Plan

    @property
    def updates(self) -> tuple[Tensor, ...]:
        """The rows of every update of the batch, those of later epochs too."""
        return self.plan.updates * self.config.optimizer.epochs

    @property
    def rows(self) -> Rows:
        """The rows of the batch's first update: on-policy, so nothing is clipped yet."""
        return self.method.rows(self.collected.batch, self.credit, self.plan.updates[0])

    def texts(self, row_R: Tensor) -> Texts:
        """Rollouts as the model reads them."""
        batch, config = self.collected.batch, self.config
        ids_NT, mask_NT = fetch([batch.token_ids_NT, batch.mask_NT])
        return Texts(
            self.collected.prompt_ids,
            ids_NT,
            mask_NT,
            config.rollouts.temperature,
            config.token_budget,
        ).select(row_R)

    def categories(self, row_R: Tensor) -> list[list[str]]:
        """The category of every token of some rollouts, padding left out."""
        batch, label = self.collected.batch, load_categories(self.config.ledger.categories)
        distinct = batch.token_ids_NT[batch.mask_NT].unique().tolist()
        texts = self.policy.tokenizer.batch_decode(
            [[token] for token in distinct], skip_special_tokens=False
        )
        name_of = dict(zip(distinct, label(texts)))
        rows = row_R.tolist()
        return [
            [name_of[token] for token in batch.token_ids_NT[r, batch.mask_NT[r]].tolist()]
            for r in rows
        ]


def open_scene(run_dir: Path, batch_number: int, *, trust: bool = False) -> Scene:
    """Load the checkpoint of ``batch``, the rollouts that were trained on there, and give them
    credit and plan again.

    Args:
        trust: import the code that the folder's recipe names (a task of its own); without it such a
            folder is an error.
    """
    path, config = checkpoint_of(run_dir, batch_number), read_config(run_dir, trust=trust)
    method = make_method(**config.method)
    policy, reference = load_policy(config, method)
    teacher = load_teacher(method, policy)
    optimizer = adamw(policy.model, config.optimizer, config.seed)
    state = checkpoint.restore(path, policy.model, optimizer, saved_weights(teacher))
    set_rate(optimizer, config, state.num_updates)
    task = make_task(**config.task)
    collected = with_prompts(
        saved_batch(run_dir, batch_number, config, policy), task, config, state
    )
    collected = measure_columns(policy, method, config, collected, reference)
    collected, _ = measure_teacher(teacher, policy, method, config, collected)
    collected, _ = score_tokens(policy, method, task, config, collected, batch_number)
    credit = method.assign(
        collected.batch, state.method, seed=config.seed, batch_number=batch_number
    )
    plan = method.plan(
        collected.batch,
        config.optimizer.updates_per_batch,
        seed=config.seed,
        batch_number=batch_number,
    )
    return Scene(
        run_dir,
        batch_number,
        config,
        method,
        policy,
        reference,
        teacher,
        optimizer,
        state,
        task,
        collected,
        credit,
        plan,
    )


def read_config(run_dir: Path, *, trust: bool = True) -> Config:
    """The recipe of a run folder; ``trust`` as in ``load_config``: whoever builds from it asks."""
    if not (run_dir / "config.yaml").is_file():
        raise ValueError(
            f"{run_dir}: no run here (config.yaml is missing). Give the folder that `counterpoise"
            " train` wrote."
        )
    check_current(run_dir)
    host = read_mapping(run_dir / "manifest.json").get("host")
    if host:
        raise ValueError(
            f"{run_dir} is the account of a training inside {host}, which keeps no recipe and no"
            " checkpoints of ours. Probes work on the runs of `counterpoise train`, and replay on"
            " saved rollouts where its methods read no more."
        )
    return load_config(run_dir / "config.yaml", trust=trust)


def checkpoint_of(run_dir: Path, batch_number: int) -> Path:
    """The checkpoint before batch ``batch``; a missing one is an error that names those that are
    there.
    """
    read_config(run_dir)
    saved = {batch_of(path): path for path in checkpoints(run_dir)}
    usable = [k for k in saved if k in batch_files(run_dir, "rollouts")]
    if batch_number in usable:
        return saved[batch_number]
    have = f"batches with both: {', '.join(map(str, usable))}" if usable else "no batch has both"
    missing = "saved rollouts" if batch_number in saved else "checkpoint"
    raise ValueError(
        f"{run_dir}: no {missing} of batch {batch_number} ({have}). Train with keep_every and"
        " save_rollouts_every to keep checkpoints and rollouts."
    )


def saved_batch(run_dir: Path, batch_number: int, config: Config, policy: Policy) -> RolloutBatch:
    """The batch of a batch on the policy's device."""
    collected = read_rollouts(
        batch_files(run_dir, "rollouts")[batch_number], max_length=config.rollouts.max_new_tokens
    )
    device = policy.model.device
    columns = {
        name: value.to(device)
        for name, value in vars(collected.batch).items()
        if isinstance(value, Tensor)
    }
    success = success_of(config.task)
    return collected._replace(batch=collected.batch.replace(**columns, success=success))


def with_prompts(
    collected: RolloutBatch, task: Any, config: Config, state: LoopState
) -> RolloutBatch:
    """Prompts as the task gives them (files keep no ``meta``); the saved ones where the stream has
    others by now.
    """
    stream = prompts_from(task, "train", config.seed, state.num_prompts, len(collected.prompts))
    by_id = {prompt.id: prompt for prompt in stream}
    return collected._replace(
        prompts=[by_id.get(prompt.id, prompt) for prompt in collected.prompts]
    )
