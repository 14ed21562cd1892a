"""What recipe, task and method must have of each other, checked before anything is sampled."""

from __future__ import annotations

from counterpoise.catalogue.method import Method
from counterpoise.environments import is_environment
from counterpoise.maths.adamw import check_8bit
from counterpoise.policy import Policy, encode_prompts
from counterpoise.tasks import Task
from counterpoise.trainer.config import Config, ConfigError
from counterpoise.trainer.prompts import prompts_from, stream
from counterpoise.types import Prompt

SCORE = "turn_score_NU"  # what neither the sampler nor a forward can measure
VALUE = "value_NT"  # what completions measure


def check_start(task: Task, seed: int, prompts: list[Prompt]) -> None:
    """A stream starts where it is told to; otherwise every batch would have the same prompts."""
    after = stream(task, "train", seed, 1, 1)
    if after and len(prompts) > 1 and after[0].id != prompts[1].id:
        raise ConfigError(
            f"task: prompts('train', {seed}, start=1) begins with {after[0].id!r}, and the second"
            f" prompt from start=0 is {prompts[1].id!r}. Prompt k must depend on split, seed and k"
            " alone."
        )


def check_forks(config: Config, has_turns: bool) -> None:
    """Openings that a group shares end before the response does, and belong to one turn."""
    num, most = config.rollouts.fork_tokens, config.rollouts.max_new_tokens
    if num >= most:
        raise ConfigError(
            f"rollouts: fork_tokens must be below max_new_tokens ({most}), got {num}. The rollouts"
            " of a prompt would all be the same."
        )
    if num and has_turns:
        raise ConfigError(
            f"rollouts: fork_tokens is {num}, and the task is an environment, whose turns are"
            " drawn apart. Set it to 0."
        )


def check_one_turn(task: object, method: Method | None = None) -> None:
    """Fresh ends of responses are sampled and graded without an environment."""
    if is_environment(task) and (method is None or VALUE in method.needs):
        raise ConfigError(
            "task: the method completes responses from where their steps begin, and an environment"
            " cannot be set back there. Take turn_rloo, or a task with one turn."
        )


def check_scores(method: Method, has_scores: bool) -> None:
    """A rule that reads scores of turns, and nothing that gives any."""
    names = ", ".join(stage.name for stage in method.stages if SCORE in stage.needs)
    if names and not has_scores:
        raise ConfigError(
            f"method: {names} reads a score of the state after each turn, which an environment"
            " gives (Reply.score), and this task does not. Take turn_rloo, or another task."
        )


def check_grader(task: Task, config: Config) -> None:
    """A task that says how long it may grade (``grading_s``) fits into the recipe's limit."""
    needs_s = getattr(task, "grading_s", 0.0)
    if needs_s > config.grader_time_limit_s:
        raise ConfigError(
            f"grader_time_limit_s is {config.grader_time_limit_s:g}, and the task may take"
            f" {needs_s:g} s to grade one answer: slow ones would count as failures of the grader."
            " Raise grader_time_limit_s or lower task.time_limit_s."
        )


def check_moments(config: Config) -> None:
    """The library of 8-bit moments is there where the recipe asks for them."""
    if config.optimizer.moments == "8bit":
        check_8bit()


def check_prompts(policy: Policy, task: Task, config: Config) -> None:
    """Prompts of the first batch and of the evaluation can be read by the model: a chat template,
    the length limit, a test split.
    """
    taken = prompts_from(task, "train", config.seed, 0, config.rollouts.prompts)
    check_start(task, config.seed, taken)
    if config.eval.every:
        taken += prompts_from(task, "test", 0, 0, config.eval.prompts)
    encode_prompts(
        policy,
        [p.text for p in taken],
        chat=config.chat,
        max_prompt_tokens=config.rollouts.max_prompt_tokens,
    )
