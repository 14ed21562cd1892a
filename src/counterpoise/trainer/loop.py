"""The loop: prompts -> rollouts -> rewards -> advantages -> token credit -> plan -> loss -> update
-> ledger, as one straight line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from counterpoise.catalogue.method import Method
from counterpoise.catalogue.registry import method as make_method
from counterpoise.catalogue.temperature import check_temperature
from counterpoise.environments import is_environment
from counterpoise.ledger.book import Settings
from counterpoise.ledger.measures.categories import load_categories
from counterpoise.ledger.measures.classes import check_axes
from counterpoise.ledger.recorder import Recording, columns_at, observe
from counterpoise.maths.intervals import Interval
from counterpoise.maths.reduce import derived_seed
from counterpoise.policy import REFERENCE, Policy, add_lora, load_model
from counterpoise.policy.precision import autocast
from counterpoise.rollouts import RolloutBatch
from counterpoise.run import own, write
from counterpoise.run.checkpoint import LoopState
from counterpoise.run.later import Later
from counterpoise.run.read import read_jsonl
from counterpoise.run.rollouts import rollout_columns
from counterpoise.tasks import Task
from counterpoise.tasks import task as make_task
from counterpoise.trainer.checks import (
    check_forks,
    check_grader,
    check_moments,
    check_one_turn,
    check_prompts,
    check_scores,
)
from counterpoise.trainer.collect import RolloutSampler, collect, measure_columns
from counterpoise.trainer.config import Config, ConfigError
from counterpoise.trainer.evaluate import eval_metrics, evaluate, held_out
from counterpoise.trainer.importance import check_answers, score_tokens
from counterpoise.trainer.interrupt import stop_requests
from counterpoise.trainer.metrics import batch_metrics, sampling_metrics
from counterpoise.trainer.progress import Clock, Progress
from counterpoise.trainer.resume import Changes, changed_settings, continue_run, save, with_sampler
from counterpoise.trainer.teacher import (
    check_sources,
    follow,
    load_teacher,
    measure_teacher,
    saved_weights,
)
from counterpoise.trainer.trackers import check_trackers, open_trackers
from counterpoise.trainer.update import (
    Update,
    adamw,
    apply_update,
    budget_that_fits,
    chosen_kernels,
    learning_rate,
    prepare_update,
)
from counterpoise.trainer.warn import (
    batch_warnings,
    flat_batches,
    grader_warning,
    listed,
    said_by_us,
)


class Result(NamedTuple):
    """How a run ended, and the policy it ended with; ``first``, ``last`` and ``gain`` as in
    ``HeldOut``, ``num_trained`` are the batches of this call.
    """

    run_dir: Path
    batch_number: int
    is_finished: bool
    policy: Policy
    first: Interval | None
    last: Interval | None
    gain: Interval | None
    num_trained: int


def train(
    config: Config,
    *,
    resume: bool = False,
    fresh: bool = False,
    until: int | None = None,
    save_last: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Train a policy by the recipe; everything that happened is in the run folder.

    Args:
        config: a checked recipe (``load_config``).
        resume: continue the run in ``config.run_dir`` from its last checkpoint, bit-identically on
            CPU.
        fresh: replace a run that is there.
        until: stop after this many batches, with a checkpoint; the learning rate stays that of the
            whole recipe.
        save_last: whether the last batch has a checkpoint where none is due.
    """
    run_dir = Path(config.run_dir)
    own.check_free(run_dir, fresh=fresh, resume=resume)
    changes = changed_settings(run_dir, config) if resume else {}
    method, task = make_method(**config.method), make_task(**config.task)
    method.check_group_size(config.rollouts.group_size, "rollouts.group_size is 1.")
    check_temperature(method.stages, config.rollouts.temperature, "rollouts.temperature")
    check_scores(method, is_environment(task))
    check_one_turn(task, method)
    check_forks(config, is_environment(task))
    check_grader(task, config)
    check_sources(method, task, config)
    check_answers(method, task, config.task["name"])
    rollouts = config.rollouts
    method.check_plan(rollouts.prompts, rollouts.group_size, config.optimizer.updates_per_batch)
    check_trackers(config)
    check_moments(config)
    check_axes(config.ledger.decompose)
    with own.lock_run(run_dir):
        own.check_free(run_dir, fresh=fresh, resume=resume)
        progress = progress or Progress(quiet=True)
        return train_policy(config, method, task, progress, changes, resume, until, save_last)


def train_policy(
    config: Config,
    method: Method,
    task: Task,
    progress: Progress,
    changes: Changes,
    resume: bool,
    until: int | None,
    save_last: bool,
) -> Result:
    """The loop, in a run folder that is this process's own."""
    run_dir = Path(config.run_dir)
    num_batches = config.num_batches if until is None else min(until, config.num_batches)
    policy, reference = load_policy(config, method)
    teacher = load_teacher(method, policy)
    check_prompts(policy, task, config)
    optimizer = adamw(policy.model, config.optimizer, config.seed)
    state = (
        continue_run(run_dir, config, policy, optimizer, changes, saved_weights(teacher))
        if resume
        else start_run(run_dir, config, method, policy)
    )
    start = state.batch_number
    trackers = open_trackers(config, run_dir, start)
    num_flat = last_number(run_dir, "reward/flat_batches")

    with (
        stop_requests(progress.note) as stop,
        progress.open(config, state.batch_number),
        Later() as files,
    ):
        if not resume:
            evaluate_policy(run_dir, 0, policy, task, config, progress)
            is_kept = bool(config.keep_every)
            save(files, run_dir, policy, optimizer, state, config, teacher, always=is_kept)
        while state.batch_number < num_batches and not stop:
            batch_number, clock = state.batch_number, Clock()

            sampler = RolloutSampler(
                policy,
                task,
                config,
                batch_number,
                start=state.num_prompts,
                needs=method.needs,
                success=method.success,
            )
            collected = collect(method, sampler)
            clock.mark("sample_s")

            also = columns_at(config.ledger.every, batch_number)
            collected = measure_columns(policy, method, config, collected, reference, also=also)
            clock.mark("measure_s")
            collected, taught = measure_teacher(teacher, policy, method, config, collected)
            if teacher:
                clock.mark("teacher_s")
            collected, scored = score_tokens(policy, method, task, config, collected, batch_number)
            if scored:
                clock.mark("importance_s")

            with said_by_us():
                credit = method.assign(
                    collected.batch, state.method, seed=config.seed, batch_number=batch_number
                )
            plan = method.plan(
                collected.batch,
                config.optimizer.updates_per_batch,
                seed=config.seed,
                batch_number=batch_number,
            )
            clock.mark("credit_s")

            updates: list[Update] = []
            recording = ledger_recording(config, policy, batch_number)
            with observe(
                *(policy, optimizer, collected, credit),
                *(recording, batch_number, state.ledger, len(plan)),
            ) as ledger:
                for row_R in plan.updates * config.optimizer.epochs:
                    set_rate(optimizer, config, state.num_updates + len(updates))
                    rows = method.rows(collected.batch, credit, row_R)
                    ledger.before()
                    update = apply_update(policy.model, optimizer, method, rows, collected, config)
                    ledger.after(update.rows, update.loss, update.clip_factor, update.grad_norm)
                    updates.append(update)
            follow(teacher, policy)
            clock.mark("update_s")

            state = advance(
                state, collected, sampler.num_prompts, credit.state, updates, ledger.state
            )
            state = with_sampler(state, policy)
            num_flat = flat_batches(num_flat, method, collected, credit)
            metrics = {
                "batch": batch_number,
                **batch_metrics(collected, credit, plan, updates, config.success),
                "reward/flat_batches": num_flat,
                **sampling_metrics(method, sampler, collected.batch, plan),
                **taught,
                **scored,
                **ledger.metrics,
            }
            warnings = batch_warnings(collected, credit, metrics, config.success)
            progress.warn(f"batch {batch_number}", warnings)
            if config.eval.every and (
                state.batch_number % config.eval.every == 0
                or state.batch_number == config.num_batches
            ):
                metrics |= evaluate_policy(
                    run_dir, state.batch_number, policy, task, config, progress
                )
            clock.mark("eval_s")

            rows = (
                rollout_columns(batch_number, collected, credit)
                if config.save_rollouts_every and batch_number % config.save_rollouts_every == 0
                else None
            )
            timing = clock.row(metrics["rollouts/num_tokens"], sampler.more_s)
            numbers = {**metrics, **listed(warnings)}
            tables = {"rollouts": rows, "tokens": ledger.tokens}
            files.call(
                write.write_batch, run_dir, batch_number, tables, plan.manifest, timing, numbers
            )
            is_due = (
                bool(config.checkpoint_every) and state.batch_number % config.checkpoint_every == 0
            )
            save(
                files,
                run_dir,
                policy,
                optimizer,
                state,
                config,
                teacher,
                always=is_due or bool(stop) or (save_last and state.batch_number == num_batches),
            )
            for tracker in trackers:
                tracker.log(batch_number, {**metrics, **clock.seconds})
            progress.show(batch_number, metrics, clock.seconds)
    for tracker in trackers:
        tracker.close()
    is_finished = state.batch_number == config.num_batches
    accuracies = held_out(read_jsonl(run_dir / "evals.jsonl"), config.success)
    num_trained = state.batch_number - start
    return Result(run_dir, state.batch_number, is_finished, policy, *accuracies, num_trained)


def load_policy(config: Config, method: Method) -> tuple[Policy, Any]:
    """The policy, and a frozen copy of it where the method needs a reference."""
    device, dtype = (
        device_of(config),
        torch.bfloat16 if config.dtype == "bfloat16" else torch.float32,
    )
    policy = load_model(config.model, dtype=dtype, device=device)
    reference = (
        load_model(config.model, dtype=dtype, device=device).model
        if method.needs & REFERENCE
        else None
    )
    if reference is not None:
        reference.requires_grad_(False)
    if config.lora:
        policy = policy._replace(model=add_lora(policy.model, **config.lora.model_dump()))
    return policy._replace(model=prepare_update(policy.model, config.optimizer)), reference


def device_of(config: Config) -> torch.device:
    """The device of the recipe; ``auto`` takes CUDA where there is one."""
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    name = automatic if config.device == "auto" else config.device
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["unknown"])[0]
        raise ConfigError(
            f"device: {name!r} cannot be used here ({reason}). Set device to auto or cpu."
        ) from None


def start_run(run_dir: Path, config: Config, method: Method, policy: Policy) -> LoopState:
    """A new run folder."""
    torch.manual_seed(config.seed)
    device = policy.model.device
    facts = {
        "method": method.describe(),
        "seed": config.seed,
        "device": str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        "num_threads": torch.get_num_threads(),
    }
    write.create_run(run_dir, config.model_dump(mode="json"), facts)
    return LoopState()


def last_number(run_dir: Path, key: str) -> int:
    """A whole number of the last batch in ``metrics.jsonl``; 0 in a new run."""
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return int(rows[-1].get(key, 0)) if rows else 0


def ledger_recording(config: Config, policy: Policy, batch_number: int) -> Recording:
    """What the ledger records of a batch, and how."""
    how = Settings(
        axes=config.ledger.decompose,
        categories=load_categories(config.ledger.categories if config.ledger.every else None),
        temperature=config.rollouts.temperature,
        token_budget=budget_that_fits(policy.model, config),
        autocast=lambda: autocast(policy.model),
        kernels=lambda: chosen_kernels(policy.model, config.optimizer),
        own_tokens=config.ledger.own_tokens,
        seed=derived_seed(config.seed, batch_number, "ledger"),
    )
    return Recording(config.ledger.every, config.ledger.bank, config.success, how)


def set_rate(optimizer: torch.optim.Optimizer, config: Config, update: int) -> None:
    rate = learning_rate(config.optimizer, update, config.num_updates)
    for group in optimizer.param_groups:
        group["lr"] = rate


def advance(
    state: LoopState,
    collected: RolloutBatch,
    num_prompts: int,
    method_state: Any,
    updates: list[Update],
    ledger_state: Any,
) -> LoopState:
    """The state after one batch."""
    return LoopState(
        batch_number=state.batch_number + 1,
        num_prompts=state.num_prompts + num_prompts,
        num_updates=state.num_updates + len(updates),
        num_tokens=state.num_tokens + int(collected.batch.mask_NT.sum()),
        num_grader_failures=state.num_grader_failures + collected.num_grader_failures,
        method=method_state,
        ledger=ledger_state,
        sampler=state.sampler,
    )


def evaluate_policy(
    run_dir: Path, batch_number: int, policy: Policy, task: Task, config: Config, progress: Progress
) -> dict[str, float]:
    """Held-out numbers after ``batch`` batches; rewards of every prompt go to
    ``evals.jsonl``. Empty if evaluation is off.
    """
    if not config.eval.every:
        return {}
    settings = config.eval
    out = evaluate(
        policy,
        task,
        config,
        prompts=settings.prompts,
        samples=settings.samples,
        temperature=settings.temperature,
    )
    numbers = eval_metrics(out)
    warnings = grader_warning(out.grader_messages, out.num_grader_failures, out.reward_PK.size)
    progress.warn("evaluation", warnings)
    row = {**numbers, "reward_PK": out.reward_PK.tolist(), **listed(warnings)}
    write.append_row(run_dir, "evals", batch_number, row)
    write.write_samples(run_dir, batch_number, out.samples)
    return numbers
