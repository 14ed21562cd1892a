"""Any maths set in a JSON-lines file, graded by math-verify.

GSM8K     {path: gsm8k_train.jsonl, test_path: gsm8k_test.jsonl, answer_after: "####"}
ASDiv     {path: asdiv.jsonl, question: [body, question], answer_regex: "[^(]+"}
MATH-500  {path: math500.jsonl, question: problem}
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from counterpoise.errors import check_number, check_text, nearest, no_file
from counterpoise.tasks.equations import false_equation
from counterpoise.tasks.stream import shuffled_passes
from counterpoise.types import Prompt

SPLITS = ("train", "test")

# where an answer stands, best first, as math-verify looks for it: boxed, announced, the last number
_PLACES = [
    re.compile(pattern)
    for pattern in (
        r"\\boxed\s*\{\s*()",
        r"(?i)(?:answer\s*(?:is|:)|####)[\s:$]*()\S",
        r"()-?\$?\d[\d,]*(?:[./]\d+)?",
    )
]


@dataclasses.dataclass(frozen=True)
class Jsonl:
    r"""Questions and final answers from a file with one JSON object a line.

    Args:
        path: the file.
        question: the field of the question, or several fields joined by a space.
        answer: the field of the answer.
        answer_after: keep of the answer what follows the last of these marks, e.g. ``####``.
        answer_regex: keep of the answer the first match (its first group if it has one), e.g.
            ``[^(]+`` for ``9 (apples)``.
        instruction: what the model reads; ``{question}`` stands for the question.
        test_path: a second file for the test split; without it a hash of the question puts
            ``test_frac`` of the rows aside.

    ``train`` runs over the rows again and again, each time in a new order; ``test`` ends after one
    pass."""

    path: str
    question: str | Sequence[str] = "question"
    answer: str = "answer"
    answer_after: str | None = None
    answer_regex: str | None = None
    instruction: str = "{question}"
    test_path: str | None = None
    test_frac: float = 0.1

    def __post_init__(self) -> None:
        fields = [self.question] if isinstance(self.question, str) else self.question
        if not isinstance(fields, (list, tuple)) or not fields:
            raise ValueError(f"jsonl: question must be a field or several, got {fields!r}.")
        check_text("jsonl", path=self.path, answer=self.answer, instruction=self.instruction)
        for name in fields:
            check_text("jsonl", question=name)
        check_text(
            "jsonl",
            or_none=True,
            answer_after=self.answer_after,
            answer_regex=self.answer_regex,
            test_path=self.test_path,
        )
        check_number("jsonl", least=0, below=1, test_frac=self.test_frac)
        _check_regex(self.answer_regex)
        if "{question}" not in self.instruction:
            raise ValueError(
                f"jsonl: instruction must contain {{question}}, got {self.instruction!r}."
            )
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                "task jsonl is graded by math-verify: pip install 'counterpoise[math]'."
            )
        object.__setattr__(self, "_rows", {split: self._split_rows(split) for split in SPLITS})

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The stream of a split from position ``start``: every pass is a permutation drawn from
        (split, seed, pass).
        """
        if split not in SPLITS:
            raise ValueError(f"jsonl: unknown split {split!r}. {nearest(split, SPLITS)}")
        rows = self._rows[split]  # pyright: ignore[reportAttributeAccessIssue]
        if not rows:
            raise ValueError(
                f"jsonl: the {split} split of {self.path} has no rows. Change test_frac or give"
                " test_path."
            )
        return shuffled_passes(rows, "jsonl", split, seed, start)

    def reward(self, prompt: Prompt, text: str) -> float:
        """1.0 if math-verify finds an answer in the text that equals the file's, else 0.0."""
        return float(equal_answers(prompt.answer, text))

    def first_error(self, prompt: Prompt, text: str) -> int | None:
        """The first wrong digit of the first equation that does not hold; None where all that can
        be read do. A step that is the wrong one to take is not seen.
        """
        return false_equation(text)

    def answer_start(self, prompt: Prompt, text: str) -> int | None:
        """Where the last boxed answer begins, else the last announced one (``answer is``,
        ``####``), else the last number; None without any.
        """
        for place in _PLACES:
            if matches := list(place.finditer(text)):
                return matches[-1].start(1)
        return None

    def _split_rows(self, split: str) -> list[Prompt]:
        if self.test_path is not None:
            is_test = split == "test"
            return self._read(self.test_path, "test_path") if is_test else self._read(self.path)
        return [
            row
            for row in self._read(self.path)
            if _is_test(row.id, self.test_frac) == (split == "test")
        ]

    def _read(self, path: str, setting: str = "path") -> list[Prompt]:
        if "\0" in path or not Path(path).is_file():
            raise ValueError(no_file("jsonl", path, f"task.{setting}"))
        with open(path, "rb") as lines:
            rows = [
                self._prompt(f"{path} line {number}", line)
                for number, line in enumerate(lines, 1)
                if line.strip()
            ]
        if not rows:
            raise ValueError(f"jsonl: {path} is empty, expected one JSON object a line.")
        return rows

    def _prompt(self, where: str, line: bytes) -> Prompt:
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"jsonl: {where} is not JSON ({error}).") from error
        if not isinstance(row, dict):
            raise ValueError(
                f"jsonl: {where} is a {type(row).__name__}, expected an object with fields."
            )
        fields = [self.question] if isinstance(self.question, str) else self.question
        question = " ".join(_field(row, name, "question", where).strip() for name in fields)
        solution = _field(row, self.answer, "answer", where)
        answer = self._final(solution, where)
        return Prompt(
            hashlib.sha256(question.encode()).hexdigest()[:16],
            self.instruction.replace("{question}", question),
            answer,
            {"solution": solution.strip()},
        )

    def _final(self, answer: str, where: str) -> str:
        if self.answer_after is not None:
            if self.answer_after not in answer:
                raise ValueError(
                    f"jsonl: {where}: the answer has no {self.answer_after!r} (answer_after):"
                    f" {answer[-60:]!r}."
                )
            answer = answer.rsplit(self.answer_after, 1)[1]
        if self.answer_regex is not None:
            match = re.search(self.answer_regex, answer)
            if match is None:
                raise ValueError(
                    f"jsonl: {where}: answer_regex {self.answer_regex!r} finds nothing in"
                    f" {answer[:60]!r}."
                )
            answer = (match[1] if match.re.groups else match[0]) or ""
        return answer.strip()


def equal_answers(answer: str, text: str) -> bool:
    r"""Whether math-verify finds in ``text`` (boxed, announced or last) an answer equal to
    ``answer``.

    >>> equal_answers(r"\frac{1}{2}", "Half of it, so the answer is 0.5.")
    True
    """
    from math_verify import parse, verify

    # its own limits use signal.alarm, which only works in a main thread; graders are timed from
    # outside
    _silence_warnings()
    parsed = parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
    return verify(list(_parsed_answer(answer)), parsed, timeout_seconds=None)


@functools.cache
def _silence_warnings() -> None:
    """math-verify warns at every call that its own limits are off."""
    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)


@functools.lru_cache(maxsize=65536)
def _parsed_answer(answer: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(f"\\boxed{{{answer}}}", parsing_timeout=None))  # pyright: ignore[reportArgumentType]


def _check_regex(pattern: str | None) -> None:
    try:
        re.compile(pattern or "")
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"jsonl: answer_regex {pattern!r} is no regular expression: {error}."
        ) from None


def _field(row: dict[str, Any], name: str, setting: str, where: str) -> str:
    if name not in row:
        raise ValueError(
            f"jsonl: {where} has no field {name!r} (task.{setting}). {nearest(name, row)}"
        )
    return str(row[name])


def _is_test(question_id: str, test_frac: float) -> bool:
    return int(question_id, 16) < test_frac * 16 ** len(question_id)
