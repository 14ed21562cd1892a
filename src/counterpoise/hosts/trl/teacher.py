"""A teacher inside TRL: one who has read more than the policy did scores the same tokens.

Who teaches and what is read is the built-in trainer's code. Here is where TRL keeps the parts: the
solution is a column of the dataset, a sibling is a rollout of the same group, feedback is what a
reward function tells by ``log_extra``. The policy's weights, of now or of the start, score by TRL's
own forward, as the trainer's log-probs do; another model by ``counterpoise.policy.measure``.

Axes: N rollouts of this process, R those that are scored, T tokens, P tokens of a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from counterpoise.credit.hindsight import OWN, check_teacher, group_readings
from counterpoise.hosts.trl.live import FILLER, Live
from counterpoise.hosts.trl.method import Setup
from counterpoise.hosts.trl.readings import (
    Graded,
    completion_texts,
    feedback_of,
    prompts_of,
    teacher_ids,
    tokenizer_of,
)
from counterpoise.hosts.trl.scoring import check_text_only, score_policy
from counterpoise.hosts.trl.state import credit_state
from counterpoise.policy import Policy, measure
from counterpoise.policy.backbone import evaluating
from counterpoise.policy.pack import response_lengths
from counterpoise.run.checkpoint import TEACHER
from counterpoise.trainer.teacher import (
    Teacher,
    check_knows_more,
    check_vocabulary,
    count_readings,
    fitting,
    follow,
    load_teacher,
    reading_numbers,
    saved_weights,
    stand_in,
    teacher_settings,
)

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin


def check_taught(trainer: CreditMixin, setup: Setup) -> None:
    """Everything about the teacher that can be known before it is loaded."""
    settings, where = teacher_settings(setup.method), f"method {setup.method.name!r}"
    if settings is None:
        return
    sources, model = check_teacher(where, **settings), settings["model"]
    check_knows_more(where, model, sources)
    is_ready = model == "policy" or (model == "initial" and has_reference(trainer))
    if is_sharded(trainer) and not is_ready:
        raise ValueError(
            f"{where}: its teacher has weights of its own (model: {model}), which would have to be"
            " sharded beside the policy's. Under FSDP and DeepSpeed the teacher is the policy"
            ' (method_axes={"credit": {"model": "policy"}}), or "initial" with TRL\'s reference'
            " (beta > 0)."
        )
    if model not in OWN:
        check_vocabulary(_policy(trainer).name, tokenizer_of(trainer).get_vocab(), model)
    if "solution" in sources:
        _check_solutions(trainer, where)


def _check_solutions(trainer: CreditMixin, where: str) -> None:
    name, names = trainer.args.solution_column, getattr(trainer.train_dataset, "column_names", None)
    if names is not None and name not in names:
        raise ValueError(
            f"{where}: the teacher reads the solution, and the dataset has no column {name!r}. Its"
            f" columns: {', '.join(names)}. Set solution_column, or take another source"
            ' (method_axes={"credit": {"source": "sibling"}}).'
        )
    if trainer.args.remove_unused_columns:
        raise ValueError(
            f"{where}: the teacher reads the column {name!r}, which remove_unused_columns=True"
            " takes away. Set it to False."
        )


def teacher_of(trainer: CreditMixin, setup: Setup) -> Teacher | None:
    """The teacher at the start of a training, None without one: the model has its first weights."""
    settings = teacher_settings(setup.method)
    if settings is None:
        return None
    if settings["model"] == "initial" and has_reference(trainer):
        templates = check_teacher(f"method {setup.method.name!r}", **settings)
        return Teacher(trainer.ref_model, templates, {}, 0.0)
    return load_teacher(setup.method, _policy(trainer))


def has_reference(trainer: CreditMixin) -> bool:
    """Whether TRL keeps the first weights for its KL term."""
    return getattr(trainer, "ref_model", None) is not None and not trainer.args.sync_ref_model


def is_sharded(trainer: CreditMixin) -> bool:
    return bool(trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)


def _policy(trainer: CreditMixin) -> Policy:
    model = trainer.accelerator.unwrap_model(trainer.model)
    name = getattr(model.config, "_name_or_path", "") or "model"
    return Policy(model, tokenizer_of(trainer), (), name)


def measure_teacher(
    trainer: CreditMixin, output: dict[str, Any], graded: Graded, is_success_N: Tensor, live: Live
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The teacher's columns of this process's rollouts, and the numbers of all processes; both
    empty without a teacher. A rollout that does not count has no teacher and is none's example.
    """
    teacher = trainer.credit_teacher
    if teacher is None:
        return {}, {}
    check_text_only(output, "a teacher")
    if credit_state(trainer).num_batches:
        follow(teacher, _policy(trainer))
    is_live = (live.row_N != FILLER).tolist()
    is_example = [won and lives for won, lives in zip(is_success_N.tolist(), is_live)]
    every = group_readings(
        prompts_of(trainer, graded),
        completion_texts(trainer, output),
        live.group_N.tolist(),
        is_example,
        feedback_of(trainer, graded, teacher.templates),
        teacher.templates,
    )
    every = [one if lives else None for one, lives in zip(every, is_live)]
    ids = teacher_ids(trainer, output, graded.prompts, every)
    attended_NT = output["completion_mask"].bool()
    kept = fitting(teacher.model, every, ids, response_lengths(attended_NT))
    is_kept_N = torch.zeros(len(every), dtype=torch.bool, device=attended_NT.device)
    is_kept_N[kept] = True
    logp_NT = score_rows(trainer, teacher, output, ids, kept)
    columns = {
        "teacher_logp_NT": logp_NT.masked_fill(~(attended_NT & is_kept_N[:, None]), 0.0),
        "has_teacher_N": is_kept_N,
    }
    return columns, _over_processes(trainer, count_readings(every, ids, kept, teacher.templates))


def _over_processes(trainer: CreditMixin, counts: dict[str, float]) -> dict[str, float]:
    sums_WC = torch.tensor([list(counts.values())], device=trainer.accelerator.device)
    total_C = trainer.accelerator.gather(sums_WC).sum(0)
    return reading_numbers(dict(zip(counts, total_C.tolist())))


def score_rows(
    trainer: CreditMixin,
    teacher: Teacher,
    output: dict[str, Any],
    ids: Sequence[Sequence[int]],
    kept: Sequence[int],
) -> Tensor:
    """[N, T] log-probs of the completions after the teacher's prompts, 0 on rows that are not
    ``kept``; dropout off, no gradient. A sharded model scores all rows: its processes have to make
    the same number of forwards.
    """
    rows = range(len(ids)) if is_sharded(trainer) else kept
    logp_NT = torch.zeros_like(output["completion_ids"], dtype=torch.float32)
    if not rows:
        return logp_NT
    row_R = torch.tensor(list(rows), device=logp_NT.device)
    token_RT, mask_RT = output["completion_ids"][row_R], output["completion_mask"][row_R]
    prompts = [ids[row] for row in rows]
    if is_another(trainer):
        with trainer.accelerator.autocast():
            columns = measure(
                teacher.model,
                prompts,
                token_RT,
                mask_RT.bool(),
                {"trainer_logp_NT"},
                temperature=trainer.temperature,
            )
        logp_NT[row_R] = columns["trainer_logp_NT"].float()
        return logp_NT
    prompt_RP, prompt_mask_RP = left_padded(prompts, tokenizer_of(trainer).pad_token_id, token_RT)
    padded = {"prompt_ids": prompt_RP, "prompt_mask": prompt_mask_RP}
    padded |= {"completion_ids": token_RT, "completion_mask": mask_RT}
    # teacher.model is without what accelerate may have put around the policy since the start
    model = teacher.model if teacher.model is trainer.ref_model else trainer.model
    with evaluating(model), stand_in(teacher):
        size = trainer.args.per_device_train_batch_size
        logp_NT[row_R] = score_policy(trainer, padded, size, model)[0].float()
    return logp_NT


def is_another(trainer: CreditMixin) -> bool:
    """Whether the teacher is another model."""
    settings = teacher_settings(trainer.credit_setup.method)
    return settings is not None and settings["model"] not in OWN


def left_padded(ids: Sequence[Sequence[int]], pad: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and mask of prompts that end in one column.

    >>> left_padded([[5], [6, 7]], 0, torch.tensor([1]))[0].tolist()
    [[0, 5], [6, 7]]
    """
    width = max(len(row) for row in ids)
    padded = [[pad] * (width - len(row)) + list(row) for row in ids]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in ids]
    return like.new_tensor(padded), like.new_tensor(mask)


def save_teacher(teacher: Teacher | None, folder: Path) -> None:
    """The average into a checkpoint of TRL."""
    weights = {} if teacher is None else saved_weights(teacher)
    if weights:
        save_file({name: value.contiguous() for name, value in weights.items()}, folder / TEACHER)


def restore_teacher(teacher: Teacher | None, folder: Path) -> None:
    """The average as a checkpoint has it."""
    weights = {} if teacher is None else saved_weights(teacher)
    if not weights:
        return
    if not (folder / TEACHER).is_file():
        raise ValueError(
            f"{folder}: no {TEACHER}, so the teacher's average cannot go on. Resume from a"
            " checkpoint of the same method, or start anew."
        )
    saved = load_file(folder / TEACHER)
    for name, value in weights.items():
        value.copy_(saved[name])


class Clock:
    """Seconds of the teacher, and their share of the time since the generation before."""

    def __init__(self) -> None:
        self.last: float | None = None

    @contextmanager
    def time(self, trainer: CreditMixin) -> Iterator[None]:
        """Log them at the end of the block."""
        began = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, metrics = time.perf_counter(), trainer._metrics["train"]
        metrics["teacher_s"].append(now - began)
        if self.last is not None:
            metrics["teacher_share"].append((now - began) / (now - self.last))
        self.last = now
