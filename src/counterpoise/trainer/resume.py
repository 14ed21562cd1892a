"""A run goes on from its last checkpoint; nothing that changes the experiment may be other then."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from counterpoise.errors import ConfigError
from counterpoise.policy import Policy
from counterpoise.policy.load import quiet
from counterpoise.run import checkpoint, write
from counterpoise.run.checkpoint import LoopState
from counterpoise.run.files import batch_of
from counterpoise.run.later import Later
from counterpoise.run.read import checkpoints
from counterpoise.sampling import sampler_of
from counterpoise.trainer.config import Config, load_config
from counterpoise.trainer.teacher import Teacher, saved_weights

log = logging.getLogger("counterpoise.trainer")
Changes = dict[str, tuple[Any, Any]]  # key -> (what the run has, what was asked for)
# how long the run is, what is observed and what is kept; all other keys are the experiment
FREE = frozenset(
    {
        *("run_dir", "num_batches", "eval", "ledger", "trackers", "project"),
        *("checkpoint_every", "keep_checkpoints", "keep_every", "save_rollouts_every"),
    }
)


def changed_settings(run_dir: Path, config: Config) -> Changes:
    """Settings in which a recipe differs from the run that it is to continue; a difference that
    changes the experiment is an error.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"--resume: {run_dir} has no config.yaml to compare the recipe with.")
    changes = differences(
        load_config(run_dir / "config.yaml").model_dump(mode="json"), config.model_dump(mode="json")
    )
    _check_length(run_dir, config, changes)
    others = {key: pair for key, pair in changes.items() if key.partition(".")[0] not in FREE}
    if others:
        told = ", ".join(
            f"{key} (got {now!r}, the run has {was!r})" for key, (was, now) in others.items()
        )
        raise ConfigError(
            f"--resume: {told} would change the experiment. Leave that as it was, or start another"
            " run with --set run_dir=..."
        )
    return {key: pair for key, pair in changes.items() if key != "run_dir"}


def continue_run(
    run_dir: Path,
    config: Config,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    changes: Changes,
    teacher: Mapping[str, torch.Tensor],
) -> LoopState:
    """The state of the last checkpoint, everything after it forgotten, changes written down."""
    state = checkpoint.restore(checkpoints(run_dir)[-1], policy.model, optimizer, teacher)
    write.rewind(run_dir, state.batch_number)
    if changes:
        write.write_changes(run_dir, state.batch_number, changes, config.model_dump(mode="json"))
    return state


def save(
    files: Later,
    run_dir: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    state: LoopState,
    config: Config,
    teacher: Teacher | None,
    *,
    always: bool,
) -> None:
    """A checkpoint where one is due: ``always``, or at a multiple of ``keep_every``; after the
    files of its batches.
    """
    is_kept = bool(config.keep_every) and state.batch_number % config.keep_every == 0
    if always or is_kept:
        files.wait()
        keep, keep_every = config.keep_checkpoints, config.keep_every
        with quiet():
            checkpoint.save(
                *(run_dir, policy, optimizer, state),
                keep=keep,
                keep_every=keep_every,
                teacher=saved_weights(teacher),
            )


def with_sampler(state: LoopState, policy: Policy) -> LoopState:
    """The state with the sampler of its last batch, on a CPU with the number of threads; another
    one than before is said, since the bits of a run depend on both.
    """
    sampler = sampler_of(policy.model)
    if policy.model.device.type == "cpu":
        sampler += f", {torch.get_num_threads()} threads"
    if state.sampler not in (None, sampler):
        log.warning(
            "--resume: batch %d was computed by %r, the batches before by %r: the same up to"
            " rounding, no longer bit for bit.",
            state.batch_number - 1,
            sampler,
            state.sampler,
        )
    return state._replace(sampler=sampler)


def differences(stored: Mapping[str, Any], given: Mapping[str, Any], under: str = "") -> Changes:
    """Dotted keys whose values differ; a key that one side lacks is None there.

    >>> differences({"a": {"b": 1, "c": 2}, "d": 0}, {"a": {"b": 1, "c": 3}, "d": 0})
    {'a.c': (2, 3)}
    """
    out: Changes = {}
    for key in dict.fromkeys([*stored, *given]):
        was, now = stored.get(key), given.get(key)
        if isinstance(was, dict) and isinstance(now, dict):
            out |= differences(was, now, f"{under}{key}.")
        elif was != now:
            out[f"{under}{key}"] = (was, now)
    return out


def _check_length(run_dir: Path, config: Config, changes: Changes) -> None:
    num_batches, schedule = batch_of(checkpoints(run_dir)[-1]), config.optimizer.schedule
    if config.num_batches < num_batches:
        raise ConfigError(
            f"--resume: num_batches is {config.num_batches}, and the run has {num_batches} already."
        )
    if "num_batches" in changes and schedule != "constant":
        was, now = changes["num_batches"]
        raise ConfigError(
            f"--resume: num_batches (got {now}, the run has {was}) would change the learning rate,"
            f" since optimizer.schedule is {schedule!r}. Leave it as it was."
        )
