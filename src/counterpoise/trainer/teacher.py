"""The teacher of a run: whose weights score, what is read before, and the columns that come of it.

A method has a teacher where a rule reads ``teacher_logp_NT``; the rule's parameters say which.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.catalogue.method import Method
from counterpoise.credit import teacher as teacher_rule
from counterpoise.credit.hindsight import OWN, Reading, check_teacher, readings, solution_of
from counterpoise.environments import is_environment
from counterpoise.policy import Policy, encode_prompts, load_model, measure
from counterpoise.policy.load import load_tokenizer
from counterpoise.policy.pack import response_lengths
from counterpoise.policy.precision import autocast
from counterpoise.rollouts import RolloutBatch
from counterpoise.tasks import Task, grade
from counterpoise.trainer.config import Config, ConfigError
from counterpoise.trainer.prompts import prompts_from

LOGP = "teacher_logp_NT"
SETTINGS = ("source", "template", "model", "rate")


class Teacher(NamedTuple):
    """Who scores the rollouts a second time, and after which prompts.

    Attributes:
        model: the policy's own, or another one.
        templates: what is read, by source, in order of preference.
        weights: parameter -> what stands in for the policy's while the teacher reads; empty for the
            policy as it is and for another model.
        rate: how far ``weights`` move towards the policy's after every batch; 0 never.
    """

    model: Any
    templates: dict[str, str]
    weights: dict[str, Tensor]
    rate: float


def teacher_settings(method: Method) -> dict[str, Any] | None:
    """The parameters of the rule that reads a teacher, None without one; two that differ are an
    error.
    """
    parts = [part for stage in method.stages for part in (stage, *stage.nested)]
    every = [
        {k: {**teacher_rule.settings, **part.settings}[k] for k in SETTINGS}
        for part in parts
        if LOGP in part.needs and not part.nested
    ]
    if not every:
        return None
    if any(one != every[0] for one in every):
        raise ConfigError(
            "method: two credit rules read teachers that differ in source, template, model or rate,"
            " and a batch has one teacher. Give both the same."
        )
    return every[0]


def sources_of(method: Method) -> list[str]:
    """What the method's teacher reads, in order of preference; empty without a teacher."""
    settings = teacher_settings(method)
    return [] if settings is None else list(check_teacher(f"method {method.name!r}", **settings))


def check_sources(method: Method, task: Task, config: Config) -> None:
    """Everything about the teacher that can be known before a model loads."""
    settings = teacher_settings(method)
    if settings is None:
        return
    model, where = settings["model"], f"method {method.name!r}"
    sources = check_teacher(where, **settings)
    if model not in OWN:
        check_vocabulary(config.model, load_tokenizer(config.model).get_vocab(), model)
    check_knows_more(where, model, sources)
    prompt = prompts_from(task, "train", config.seed, 0, 1)[0]
    if "solution" in sources and not solution_of(prompt):
        raise ConfigError(
            f"{where}: the teacher reads the solution, and prompt {prompt.id!r} has neither"
            ' meta["solution"] nor an answer. Take another source (credit: {source: sibling}), or a'
            " task that keeps solutions."
        )
    has_siblings = "sibling" in sources and config.rollouts.group_size > 1
    if has_siblings or {"solution", "prompt"} & set(sources):
        return
    if "feedback" not in sources or not gives_feedback(task, config):
        raise ConfigError(
            f"{where}: no rollout would have a teacher: its sources are {', '.join(sources)},"
            f" rollouts.group_size is {config.rollouts.group_size}, and the grader of this task"
            " gives no feedback (counterpoise.tasks.Reward). Sample two or more rollouts per prompt"
            " with the source sibling, or take the source solution."
        )


def check_knows_more(where: str, model: str, sources: Mapping[str, str]) -> None:
    """The policy itself, which reads nothing more, is no teacher."""
    if model in OWN and list(sources) == ["prompt"]:
        raise ConfigError(
            f"{where}: the teacher is the policy itself (model: {model}) and reads the prompt"
            " alone, so it has nothing to teach. Name another model (credit: {model: path}), or let"
            " it read more (credit: {source: solution})."
        )


def gives_feedback(task: Task, config: Config) -> bool:
    """Whether the grader says something of an empty answer."""
    if is_environment(task):
        return False
    prompt = prompts_from(task, "train", config.seed, 0, 1)[0]
    return bool(grade(task, [(prompt, "")], config.grader_time_limit_s).feedback)


def check_vocabulary(policy: str, own: Mapping[str, int], teacher: str) -> None:
    """A teacher reads the ids of the policy: every token of the policy has the same id there.

    Args:
        own: the policy's vocabulary, token -> id.
    """
    other = load_tokenizer(teacher).get_vocab()
    wrong = next((token for token, number in own.items() if other.get(token) != number), None)
    if wrong is not None:
        raise ConfigError(
            f"teacher {teacher!r}: its vocabulary is not that of {policy!r}: token {wrong!r} is"
            f" {own[wrong]} there and {other.get(wrong, 'missing')} here. Take a teacher with the"
            " same tokenizer."
        )


def load_teacher(method: Method, policy: Policy, initial: Policy | None = None) -> Teacher | None:
    """The teacher at the start of a run, None without one; ``policy`` still has its initial
    weights, or ``initial`` has them.
    """
    settings = teacher_settings(method)
    if settings is None:
        return None
    templates, name = check_teacher(f"method {method.name!r}", **settings), settings["model"]
    if name not in OWN:
        own = policy.model
        other = load_model(name, dtype=own.dtype, device=own.device).model.requires_grad_(False)
        return Teacher(other, templates, {}, 0.0)
    weights: dict[str, Tensor] = {}
    if name != "policy":
        weights = {
            key: weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
            for key, weight in (initial or policy).model.named_parameters()
            if weight.requires_grad
        }
    return Teacher(policy.model, templates, weights, settings["rate"] * (name == "average"))


@torch.no_grad()
def follow(teacher: Teacher | None, policy: Policy) -> None:
    """weights += rate * (policy - weights), in place."""
    if teacher is None or not teacher.rate:
        return
    for name, weight in policy.model.named_parameters():
        if name in teacher.weights:
            average = teacher.weights[name]
            average.lerp_(weight.to(average.device, average.dtype), teacher.rate)


def saved_weights(teacher: Teacher | None) -> dict[str, Tensor]:
    """What a checkpoint has to keep of a teacher: an average, nothing that can be loaded again."""
    return teacher.weights if teacher is not None and teacher.rate else {}


def measure_teacher(
    teacher: Teacher | None, policy: Policy, method: Method, config: Config, collected: RolloutBatch
) -> tuple[RolloutBatch, dict[str, float]]:
    """The batch with the teacher's columns, and numbers to log: how many rollouts were taught from
    which source, the length of what was read, and how many did not fit into the model.
    """
    if teacher is None:
        return collected, {}
    batch = collected.batch
    every = readings(collected, method.see(batch), teacher.templates)
    texts = iter(encode_prompts(policy, [o.text for o in every if o is not None], chat=config.chat))
    ids = [[] if one is None else next(texts) for one in every]
    kept = fitting(teacher.model, every, ids, response_lengths(batch.mask_NT))
    logp_NT, has_N = torch.zeros_like(batch.sampler_logp_NT), torch.zeros_like(batch.mask_NT[:, 0])
    if kept:
        row_R = torch.tensor(kept, device=logp_NT.device)
        with autocast(teacher.model), stand_in(teacher):
            columns = measure(
                teacher.model,
                [ids[row] for row in kept],
                batch.token_ids_NT[row_R],
                batch.mask_NT[row_R],
                {"trainer_logp_NT"},
                temperature=config.rollouts.temperature,
                token_budget=config.token_budget,
            )
        logp_NT[row_R] = columns["trainer_logp_NT"].to(logp_NT.dtype)
        has_N[row_R] = True
    taught = batch.replace(teacher_logp_NT=logp_NT, has_teacher_N=has_N)
    counts = count_readings(every, ids, kept, teacher.templates)
    return collected._replace(batch=taught), reading_numbers(counts)


def fitting(
    model: PreTrainedModel,
    every: Sequence[Reading | None],
    ids: Sequence[Sequence[int]],
    length: Sequence[int],
) -> list[int]:
    """The rollouts whose reading leaves room for them in the model's context."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None) or float("inf")
    rows = [row for row, one in enumerate(every) if one is not None]
    return [row for row in rows if len(ids[row]) + length[row] <= room]


def count_readings(
    every: Sequence[Reading | None],
    ids: Sequence[Sequence[int]],
    kept: Sequence[int],
    sources: Iterable[str],
) -> dict[str, float]:
    """Rollouts by source and those that did not fit, tokens read, rollouts: sums, which may be
    added up over processes.
    """
    used = [one.source for row in kept if (one := every[row]) is not None]
    by_source: dict[str, float] = {name: used.count(name) for name in sources}
    return by_source | {
        "too_long": sum(one is not None for one in every) - len(kept),
        "prompt_tokens": sum(len(ids[row]) for row in kept),
        "rollouts": len(every),
    }


def reading_numbers(counts: Mapping[str, float]) -> dict[str, float]:
    """What is logged of ``count_readings``.

    >>> reading_numbers({"sibling": 2, "too_long": 1, "prompt_tokens": 30, "rollouts": 4})
    {'teacher/sibling_frac': 0.5, 'teacher/too_long_frac': 0.25, 'teacher/prompt_tokens': 15.0}
    """
    by_row = {k: v for k, v in counts.items() if k not in ("prompt_tokens", "rollouts")}
    num_kept = sum(by_row.values()) - by_row["too_long"]
    numbers = {f"teacher/{name}_frac": num / counts["rollouts"] for name, num in by_row.items()}
    return numbers | {"teacher/prompt_tokens": counts["prompt_tokens"] / max(num_kept, 1)}


@contextmanager
def stand_in(teacher: Teacher) -> Iterator[None]:
    """The policy has the teacher's weights inside the block, and its own after it."""
    own = {
        name: weight.data
        for name, weight in teacher.model.named_parameters()
        if name in teacher.weights
    }
    try:
        for name, weight in teacher.model.named_parameters():
            if name in own:
                weight.data = teacher.weights[name].to(weight.device, weight.dtype)
        yield
    finally:
        for name, weight in teacher.model.named_parameters():
            if name in own:
                weight.data = own[name]
