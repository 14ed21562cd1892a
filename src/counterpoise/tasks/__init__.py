"""Prompts and graders, one file per task.

A task has ``prompts(split, seed, start=0)``, an iterator whose item k depends on (split, seed, k)
alone, and ``reward(prompt, text)``.
``train`` streams are endless. A task may also have ``first_error(prompt, text)``, the offset of the
character at which an answer first goes wrong (see ``first_error``), and ``answer_start(prompt,
text)``, that at which the final answer begins (see ``answer_start``). ``grade`` (see ``graders``)
runs rewards so that a hanging or raising one cannot stop a run; a reward may bring a text with it
(``Reward``), which is kept with the rollout; a task whose reward is a few safe
lines says so with ``is_trusted = True`` and is graded in the caller's process."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from counterpoise.errors import check_number, import_path, nearest, own_code
from counterpoise.types import Prompt

__all__ = [
    "Grades",
    "Offset",
    "Reward",
    "Task",
    "WithReward",
    "answer_start",
    "first_error",
    "grade",
    "task",
]

# (prompt, text) -> character offset, or None where there is none or the place is not known
Offset = Callable[[Prompt, str], "int | None"]

# import paths, so that a task's own libraries are imported only when it is asked for
BUILT_IN = {
    "arithmetic": "counterpoise.tasks.arithmetic:Arithmetic",
    "jsonl": "counterpoise.tasks.jsonl:Jsonl",
    "code": "counterpoise.tasks.code:Code",
    "guess": "counterpoise.environments.guess:Guess",
    "mastermind": "counterpoise.environments.mastermind:Mastermind",
    "lookup": "counterpoise.environments.lookup:Lookup",
    "tools": "counterpoise.environments.tools:Tools",
}
GAMES = ("guess", "mastermind", "lookup")
# families of other packages: the name after the colon and all parameters are theirs
FAMILIES = {
    "gym": "counterpoise.tasks.gym:Gym",
    "gem": "counterpoise.environments.adapters.gem:Gem",
    "textarena": "counterpoise.environments.adapters.textarena:TextArena",
    "verifiers": "counterpoise.environments.adapters.verifiers:Verifiers",
    "openenv": "counterpoise.environments.adapters.openenv:OpenEnv",
}
NAMED_BY = {
    "gym": "the name of a reasoning-gym dataset, e.g. gym:basic_arithmetic",
    "gem": "the id of a gem environment, e.g. gem:game:Wordle-v0-easy",
    "textarena": "the id of a TextArena game for one player, e.g. textarena:Wordle-v0",
    "verifiers": "the id of a verifiers environment, e.g. verifiers:wordle",
    "openenv": "the address of an OpenEnv server, e.g. openenv:http://localhost:8000",
}
THEIRS = ("gym:<name>", "gem:<id>", "textarena:<id>", "verifiers:<id>", "openenv:<url>")
SHOWN = ("arithmetic", "jsonl", "code", *GAMES, "tools", *THEIRS, "your.module:Task")


@runtime_checkable
class Task(Protocol):
    """What the trainer asks of a task."""

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]: ...

    def reward(self, prompt: Prompt, text: str) -> float: ...


@dataclasses.dataclass(frozen=True)
class WithReward:
    """A task graded by a function of the user's own, ``fn(prompt, text) -> float``."""

    task: Task
    fn: Callable[[Prompt, str], float]

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        return self.task.prompts(split, seed, start)

    def reward(self, prompt: Prompt, text: str) -> float:
        return self.fn(prompt, text)

    @property
    def first_error(self) -> Offset:
        """The task's own, where it has one."""
        return self.task.first_error  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def answer_start(self) -> Offset:
        """The task's own, where it has one."""
        return self.task.answer_start  # pyright: ignore[reportAttributeAccessIssue]


def first_error(task: Task, prompt: Prompt, text: str) -> int | None:
    """The character at which an answer first goes wrong, as the task says it.

    ``len(text)`` means that everything is right so far and the answer ends too early. None: the
    answer is right, the place is not known, or the task does not tell.

    >>> sums = task("arithmetic")
    >>> prompt = Prompt("", "What is 7 - 3?", "4")
    >>> first_error(sums, prompt, "Start with 7. Then 7 less 3 makes 5. So the answer is 5.")
    34
    """
    return _offset(task, "first_error", prompt, text)


def answer_start(task: Task, prompt: Prompt, text: str) -> int | None:
    """The character at which the final answer begins, as the task says it; None: there is no
    answer, or the task does not tell.

    >>> sums = task("arithmetic")
    >>> text = "Start with 7. Then 7 less 3 makes 5. So the answer is 5."
    >>> text[answer_start(sums, Prompt("", "What is 7 - 3?", "4"), text) :]
    '5.'
    """
    return _offset(task, "answer_start", prompt, text)


def _offset(task: Task, name: str, prompt: Prompt, text: str) -> int | None:
    find: Offset | None = getattr(task, name, None)
    offset = find(prompt, text) if find else None
    is_offset = isinstance(offset, int) and not isinstance(offset, bool)
    if offset is not None and not (is_offset and 0 <= offset <= len(text)):
        raise ValueError(
            f"task {type(task).__name__}: {name} gave {offset!r} for a text of {len(text)}"
            " characters. Expected an offset from 0 to that length, or None."
        )
    return offset


def task(
    name: str | Mapping[str, Any],
    *,
    reward: str | Callable[[Prompt, str], float] | None = None,
    success: float | None = None,
    **params: Any,
) -> Task:
    """Build a task from its name and parameters.

    Args:
        name: one of ``SHOWN``, e.g. ``arithmetic``, ``gym:<name>`` or an import path
            ``your.module:Task``; or a mapping with ``name`` and parameters.
        reward: a function ``fn(prompt, text) -> float``, or its import path, in place of the task's
            own grader.
        success: what counts as solved, a reward of at least this much; the trainer reads it from
            the recipe (``task.success``), the task itself does not.
        params: the task's parameters.

    >>> task("arithmetic", difficulty="easy").terms
    4
    >>> task({"name": "arithmetic", "dificulty": "easy"})
    Traceback (most recent call last):
    ...
    ValueError: task 'arithmetic' has no parameter 'dificulty'. Did you mean 'difficulty'? Known:
        difficulty, grade_steps, max_number, max_total, style, terms.
    """
    if isinstance(name, Mapping):
        if "name" not in name:
            raise ValueError(
                f"task: expected a mapping with 'name', got {dict(name)!r}. Known names:"
                f" {', '.join(SHOWN)}."
            )
        return task(**{"reward": reward, **params, **name})
    check_number("task", or_none=True, success=success)
    built = _build(name, params)
    _check_stream(name, built)
    if reward is None:
        return built
    if not hasattr(built, "reward"):
        raise ValueError(
            f"task {name!r} pays its own rewards: it is an environment. Leave out 'reward'."
        )
    return WithReward(built, import_path(reward, "reward") if isinstance(reward, str) else reward)


def _build(name: str, params: dict[str, Any]) -> Task:
    maker = _maker(name)
    family, _, rest = name.partition(":")
    if family in FAMILIES:  # knows the parameters of its own tasks and checks them
        return maker(rest, **params)
    known = [key for key in inspect.signature(maker).parameters if key not in ("args", "kwargs")]
    for key in params:
        if key not in known:
            raise ValueError(f"task {name!r} has no parameter {key!r}. {nearest(key, known)}")
    missing = [
        key
        for key in known
        if inspect.signature(maker).parameters[key].default is inspect.Parameter.empty
        and key not in params
    ]
    if missing:
        raise ValueError(f"task {name!r} needs the parameter {missing[0]!r}.")
    with own_code(f"task {name!r}"):
        return maker(**params)


def _check_stream(name: str, built: Task) -> None:
    """``prompts`` takes what the trainer gives to it."""
    signature = inspect.signature(built.prompts)
    try:
        signature.bind("train", 0, start=0)
    except TypeError as error:
        raise ValueError(
            f"task {name!r}: prompts{signature} cannot be called as prompts('train', 0, start=0)"
            f" ({error}). Write def prompts(self, split, seed, start=0)."
        ) from None


def _maker(name: str) -> Any:
    family, _, rest = name.partition(":")
    if family in FAMILIES and not rest:
        raise ValueError(f"task {name!r} needs {NAMED_BY[family]}.")
    path = FAMILIES.get(family) or BUILT_IN.get(name, name)
    if ":" not in path:
        raise ValueError(f"unknown task {name!r}. {nearest(name, SHOWN)}")
    maker = import_path(path, "task")
    if not _is_task(_product(maker)):  # before it is called: os:system is an import path too
        raise ValueError(
            f"task {name!r} is not a task: expected a class with prompts(split, seed, start) and"
            " reward(prompt, text), or start(prompt, seed) for an environment, or a function that"
            " is annotated to return one."
        )
    return maker


def _product(maker: object) -> object:
    """The class that a maker gives: itself, or what a function says that it returns."""
    if isinstance(maker, type) or not inspect.isfunction(maker):
        return maker
    return typing.get_type_hints(maker).get("return")


def _is_task(kind: object) -> bool:
    has = {name: callable(getattr(kind, name, None)) for name in ("prompts", "reward", "start")}
    return isinstance(kind, type) and has["prompts"] and (has["reward"] or has["start"])


from counterpoise.tasks.graders import Grades, grade  # noqa: E402
from counterpoise.tasks.workers import Reward  # noqa: E402
