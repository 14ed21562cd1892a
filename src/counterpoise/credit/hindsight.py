"""What a teacher reads before it scores a rollout: the prompt and something that the policy had not
seen, put together by a template.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from counterpoise.errors import check_choice, check_number, check_text, nearest
from counterpoise.rollouts import RolloutBatch
from counterpoise.types import Prompt, TokenBatch

# source -> the field of a template that holds it; "" is the prompt alone
FIELDS = {"sibling": "demonstration", "feedback": "feedback", "solution": "solution", "prompt": ""}
TEMPLATES = {
    "sibling": "{prompt}\n\nA correct answer:\n{demonstration}\n\nNow answer it yourself.",
    "feedback": "{prompt}\n\nAn earlier answer was wrong:\n{feedback}\n\nNow answer it correctly.",
    "solution": "{prompt}\n\nThe reference solution:\n{solution}\n\nNow answer it yourself.",
    "prompt": "{prompt}",
}
# weights of a teacher that come from the policy; anything else is another model
OWN = ("policy", "initial", "average")
THINKING = "<think>", "</think>"

Sources = str | Sequence[str]
Template = str | Mapping[str, str] | None


class Reading(NamedTuple):
    """What the teacher of one rollout reads, and where the additional part comes from."""

    source: str
    text: str


def check_teacher(
    stage: str, source: Sources, template: Template, model: str, rate: float
) -> dict[str, str]:
    """The template of each source, in the order in which they are tried; wrong parameters are an
    error.
    """
    names = [source] if isinstance(source, str) else source
    if not isinstance(names, (list, tuple)) or len(names) == 0:
        raise ValueError(
            f"{stage}: source must be one of {', '.join(FIELDS)}, or a list of them, got"
            f" {source!r}."
        )
    for name in names:
        check_choice(stage, tuple(FIELDS), source=name)
    check_text(stage, model=model)
    if not model:
        raise ValueError(f"{stage}: model is empty. Give one of {', '.join(OWN)}, or a model.")
    check_number(stage, above=0, most=1, rate=rate)
    if isinstance(template, str) and len(names) > 1:
        raise ValueError(
            f"{stage}: template is one text and there are {len(names)} sources. Give a mapping,"
            f" e.g. {{{names[0]}: ...}}."
        )
    own = {names[0]: template} if isinstance(template, str) else template or {}
    if not isinstance(own, Mapping):
        raise ValueError(f"{stage}: template must be a text or a mapping, got {template!r}.")
    for name in own:
        if name not in names:
            raise ValueError(
                f"{stage}: template of {name!r}, which is no source here. {nearest(name, names)}"
            )
    texts = {name: own.get(name, TEMPLATES[name]) for name in names}
    for name, text in texts.items():
        _check_template(stage, name, text)
    return texts


def _check_template(stage: str, source: str, text: str) -> None:
    """A template has the prompt, what its source gives, and no other field."""
    wanted = ["prompt", FIELDS[source]] if FIELDS[source] else ["prompt"]
    try:
        parts = list(string.Formatter().parse(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{stage}: template of {source!r}: {error}. Got {text!r}.") from None
    fields = [field for _, field, spec, how in parts if field is not None and not spec and not how]
    if sorted(fields) != sorted(wanted) or len(fields) != sum(
        part[1] is not None for part in parts
    ):
        raise ValueError(
            f"{stage}: the template of {source!r} must have each of"
            f" {', '.join('{' + name + '}' for name in wanted)} once and no other field, got"
            f" {text!r}. Write {{{{ and }}}} for braces."
        )


def readings(
    rollouts: RolloutBatch, batch: TokenBatch, templates: Mapping[str, str]
) -> list[Reading | None]:
    """What the teacher of each rollout reads: the first source that has something; None without a
    teacher.

    Args:
        rollouts: prompts, texts and feedback.
        batch: their tokens; says which rollouts are successes.
        templates: source -> template, as ``check_teacher`` gives them.
    """
    group = batch.group_N.tolist()
    prompts = [rollouts.prompts[number] for number in group]
    success = batch.is_success_N.tolist()
    return group_readings(prompts, rollouts.texts, group, success, rollouts.feedback, templates)


def group_readings(
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    group: Sequence[int],
    is_success: Sequence[bool],
    feedback: Sequence[str | None] | None,
    templates: Mapping[str, str],
) -> list[Reading | None]:
    """The same from lists with one entry per rollout; ``feedback`` may be missing.

    >>> ask = [Prompt("0", "2 + 3?", "5")] * 2
    >>> templates = {"sibling": "{prompt} {demonstration}"}
    >>> group_readings(ask, ["5", "6"], [0, 0], [True, False], None, templates)
    [None, Reading(source='sibling', text='2 + 3? 5')]
    """
    siblings = demonstrations(texts, group, is_success)
    out: list[Reading | None] = []
    for row, prompt in enumerate(prompts):
        parts = {
            "sibling": siblings[row],
            "feedback": feedback[row] if feedback else "",
            "solution": solution_of(prompt),
            "prompt": prompt.text,
        }
        source = next((name for name in templates if parts[name]), None)
        if source is None:
            out.append(None)
            continue
        fields = {"prompt": prompt.text, FIELDS[source] or "prompt": parts[source]}
        out.append(Reading(source, templates[source].format(**fields)))
    return out


def demonstrations(
    texts: Sequence[str], group: Sequence[int], is_success: Sequence[bool]
) -> list[str]:
    """For every rollout the answer of the first success of its group that is not itself, without
    its thinking; empty where there is none.

    >>> demonstrations(["a", "<think>so</think> b", "c"], [0, 0, 0], [False, True, True])
    ['b', 'c', 'b']
    """
    answers = [without_thinking(text) if right else "" for text, right in zip(texts, is_success)]
    by_group: dict[int, list[int]] = {}
    for row, number in enumerate(group):
        if answers[row]:
            by_group.setdefault(number, []).append(row)
    return [
        next((answers[other] for other in by_group.get(number, []) if other != row), "")
        for row, number in enumerate(group)
    ]


def without_thinking(text: str) -> str:
    """What comes after the last ``</think>``, and before a ``<think>`` that is never closed.

    >>> without_thinking("<think>7 and 8</think> 15"), without_thinking("15 <think>or 16")
    ('15', '15')
    """
    first, last = THINKING
    return text.rpartition(last)[2].partition(first)[0].strip()


def solution_of(prompt: Prompt) -> str:
    """The worked solution where the task keeps one (``meta["solution"]``), else the answer."""
    return str(prompt.meta.get("solution") or prompt.answer)
