"""What a teacher reads inside TRL, from what TRL's grading sees.

The solution is a column of the dataset; feedback is what a reward function tells by ``log_extra``,
or a field of a ``rollout_func``; the rest stands in the rollouts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from counterpoise.credit.hindsight import Reading
from counterpoise.hosts.trl.scoring import record_calls
from counterpoise.types import Prompt

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

TELL = "_log_completion_extra"  # TRL's log_extra
Chat = str | Sequence[Mapping[str, Any]]  # a prompt of a dataset: plain text, or messages


class Graded(NamedTuple):
    """What TRL's grading saw: rows of the dataset and prompts, one per rollout, and what reward
    functions said of the rollouts.
    """

    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[Chat]
    heard: Sequence[Sequence[str | None]]


def tokenizer_of(trainer: CreditMixin) -> Any:
    """The tokenizer, of a processor its part."""
    return getattr(trainer.processing_class, "tokenizer", trainer.processing_class)


@contextmanager
def hear_feedback(trainer: CreditMixin) -> Iterator[list[Sequence[str | None]]]:
    """What reward functions say of the rollouts inside the block: ``log_extra(feedback_column,
    texts)``.
    """
    heard: list[Sequence[str | None]] = []
    if trainer.credit_teacher is None:
        yield heard
        return

    def wrap(log: Callable[[str, list], None]) -> Callable:
        def watch(column: str, values: list) -> None:
            if column == trainer.args.feedback_column:
                heard.append(list(values))
            log(column, values)

        return watch

    with record_calls(trainer, TELL, wrap):
        yield heard


def prompts_of(trainer: CreditMixin, graded: Graded) -> list[Prompt]:
    """The prompt of every rollout; its answer is the solution, "" where the row has none."""
    solutions = [row.get(trainer.args.solution_column) for row in graded.rows]
    return [
        Prompt("", question(prompt), "" if solution is None else str(solution))
        for prompt, solution in zip(graded.prompts, solutions)
    ]


def question(prompt: Chat) -> str:
    """What a prompt asks: the text itself, of messages the last one of the user.

    >>> question([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}])
    'Why?'
    """
    return prompt if isinstance(prompt, str) else str(prompt[_asked(prompt)]["content"])


def with_question(prompt: Chat, text: str) -> Chat:
    """The prompt with other words in place of its question; the other messages stay.

    >>> with_question([{"role": "user", "content": "Why?"}], "Why? A hint: no.")
    [{'role': 'user', 'content': 'Why? A hint: no.'}]
    """
    if isinstance(prompt, str):
        return text
    at = _asked(prompt)
    return [*prompt[:at], {**prompt[at], "content": text}, *prompt[at + 1 :]]


def _asked(prompt: Sequence[Mapping[str, Any]]) -> int:
    for at in reversed(range(len(prompt))):
        if prompt[at]["role"] == "user" and isinstance(prompt[at]["content"], str):
            return at
    raise ValueError(
        f"prompt {str(prompt)[:80]!r}: a teacher reads more in place of the last message of the"
        " user, and there is none whose content is a text. Give such a message."
    )


def feedback_of(trainer: CreditMixin, graded: Graded, sources: Iterable[str]) -> list[str]:
    """What was said of each rollout; an error where a teacher reads nothing else and nobody says
    anything.
    """
    name, num = trainer.args.feedback_column, len(graded.rows)
    for values in graded.heard:
        if len(values) != num:
            raise ValueError(
                f"log_extra({name!r}, ...): {len(values)} texts for {num} rollouts. Give one per"
                ' rollout, "" where there is nothing to say.'
            )
    has_siblings = "sibling" in sources and trainer.num_generations > 1
    is_alone = not has_siblings and not {"solution", "prompt"} & set(sources)
    if is_alone and not graded.heard and name not in graded.rows[0]:
        raise ValueError(
            "no rollout has a teacher: it reads the grader's feedback, and no reward function gives"
            f" any. Call log_extra({name!r}, texts) in one (TRL passes log_extra to it), with a"
            ' text per rollout, or take method_axes={"credit": {"source": "solution"}}.'
        )
    columns = [*graded.heard, [row.get(name) for row in graded.rows]]
    return ["\n".join(dict.fromkeys(str(one) for one in said if one)) for said in zip(*columns)]


def completion_texts(trainer: CreditMixin, output: dict[str, Any]) -> list[str]:
    """What each rollout says, replies of tools among it."""
    kept = zip(output["completion_ids"], output["completion_mask"].bool())
    ids = [row[mask].tolist() for row, mask in kept]
    return tokenizer_of(trainer).batch_decode(ids, skip_special_tokens=True)


def teacher_ids(
    trainer: CreditMixin,
    output: dict[str, Any],
    prompts: Sequence[Chat],
    every: Sequence[Reading | None],
) -> list[list[int]]:
    """Token ids of what the teacher reads, of a rollout without a teacher those of its prompt;
    rendered as the prompts themselves are.
    """
    play = getattr(trainer, "rollout_func", None)
    own = getattr(play, "encode_prompts", None)

    def encode(prompts: list[Chat]) -> list[list[int]]:
        ids = own(prompts, trainer) if own else trainer._tokenize_prompts(prompts)[0]
        return [list(row) for row in ids]

    if play is not None and own is None:
        _check_encoding(output, encode(list(prompts)))
    return encode(
        [p if one is None else with_question(p, one.text) for p, one in zip(prompts, every)]
    )


def _check_encoding(output: dict[str, Any], ids: Sequence[Sequence[int]]) -> None:
    """A ``rollout_func`` renders prompts itself, and the teacher's have to look alike."""
    rows = zip(output["prompt_ids"], output["prompt_mask"].bool())
    for row, (used, mask) in enumerate(rows):
        if used[mask].tolist() != list(ids[row]):
            raise ValueError(
                f"rollout_func: prompt_ids of rollout {row} are not what TRL makes of its prompt,"
                " so the teacher's prompt would look unlike the policy's. Give rollout_func an"
                " attribute encode_prompts(prompts, trainer) that returns lists of token ids."
            )
