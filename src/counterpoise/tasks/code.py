"""Python functions to write, graded by tests in a sandbox.

MBPP  {path: mbpp.jsonl, train: 601-974, test: 11-510}
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import hashlib
import json
import os
import re
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from counterpoise.errors import (
    ConfigError,
    check_choice,
    check_number,
    check_text,
    check_whole,
    nearest,
    no_file,
)
from counterpoise.tasks.sandbox import KINDS, SPARE_S, Limits, Program, Sandbox, why_not
from counterpoise.tasks.stream import shuffled_passes
from counterpoise.tasks.workers import Reward
from counterpoise.types import Prompt

SPLITS = ("train", "test")
SCORES = ("share", "all")
INSTRUCTION = "{prompt}\nYour code should pass these tests:\n{tests}\nAnswer with one Python block."
MAX_ANSWER = 100_000  # characters
NUM_CHECKED = 4  # reference solutions that run before a model loads
OPTIONAL = {"setup": "test_setup_code", "solution": "code"}
NO_SANDBOX = (
    "task code: sandbox is none: programs that the model writes run as you, with your files and"
    " your network. Use a machine on which nothing is at stake."
)

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_RANGE = re.compile(r"\s*(\d+)\s*-\s*(\d+)\s*")


class Row(NamedTuple):
    """A line of the file; ``program`` has the tests and no answer."""

    prompt: Prompt
    program: Program
    split: str


@dataclasses.dataclass(frozen=True)
class Code:
    """Prompts with tests from a file with one JSON object per line.

    Args:
        path: the file.
        prompt, tests, setup, solution, id: the fields of the text, the list of tests, code that
            runs before the tests, a right answer, and the name of the row; rows may lack ``setup``
            and ``solution``.
        train, test: rows of a split as a range of ``id``, e.g. ``601-974``; both or none.
        split: the field that says ``train`` or ``test``, in place of ranges; other rows are not
            used. Without any of these a hash of the id puts ``test_frac`` of the rows aside.
        score: ``share`` of the tests that hold, or ``all``: 1 if all hold, else 0.
        shown: so many tests are in the prompt; the others are hidden.
        instruction: what the model reads; ``{prompt}`` stands for the text, ``{tests}`` for the
            shown tests.
        sandbox: ``bubblewrap``, or ``none`` to run programs without.
        time_limit_s, memory_mb, disk_mb, result_kb: of one program with all its tests; the time
            must fit into ``grader_time_limit_s``.

    The answer is the last Python block of a text, or all of it where there is none."""

    path: str
    prompt: str = "text"
    tests: str = "test_list"
    setup: str = OPTIONAL["setup"]
    solution: str = OPTIONAL["solution"]
    id: str = "task_id"
    train: str | None = None
    test: str | None = None
    split: str | None = None
    test_frac: float = 0.1
    score: str = "share"
    shown: int = 1
    instruction: str = INSTRUCTION
    sandbox: str = KINDS[0]
    time_limit_s: float = 2.0
    memory_mb: int = 512
    disk_mb: int = 16
    result_kb: int = 1024

    def __post_init__(self) -> None:
        self._check()
        rows = self._read()
        by_split = {name: [row for row in rows if row.split == name] for name in SPLITS}
        object.__setattr__(self, "_rows", by_split)
        programs = {row.prompt.id: row.program for row in rows}
        object.__setattr__(self, "_programs", programs)
        if len(programs) < len(rows):
            raise ConfigError(f"task code: {self.path}: two rows have the same {self.id!r}.")
        if reason := why_not(self.sandbox):
            raise ConfigError(f"task code: {reason}")
        if self.sandbox == "none":
            warnings.warn(NO_SANDBOX, stacklevel=2)
        self._check_solutions(rows)

    @property
    def limits(self) -> Limits:
        return Limits(self.time_limit_s, self.memory_mb, self.disk_mb, self.result_kb)

    @property
    def grading_s(self) -> float:
        """Seconds that the grading of one answer may take."""
        return self.time_limit_s + SPARE_S

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The stream of a split from position ``start``: every pass is a permutation drawn from
        (split, seed, pass); ``test`` ends after one.
        """
        if split not in SPLITS:
            raise ValueError(f"code: unknown split {split!r}. {nearest(split, SPLITS)}")
        rows: list[Row] = self._rows[split]  # pyright: ignore[reportAttributeAccessIssue]
        if not rows:
            raise ConfigError(
                f"task code: the {split} split of {self.path} has no rows. Change task.{split},"
                " task.split or task.test_frac."
            )
        return (row.prompt for row in shuffled_passes(rows, "code", split, seed, start))

    def reward(self, prompt: Prompt, text: str) -> float:
        """The score of the answer; its ``feedback`` has a line for each test that fails."""
        program: Program = self._programs[prompt.id]  # pyright: ignore[reportAttributeAccessIssue]
        return score(self._errors(program, last_block(text)), self.score)

    def _errors(self, program: Program, answer: str) -> list[str | None]:
        if len(answer) > MAX_ANSWER:
            reason = f"the answer has {len(answer)} characters, at most {MAX_ANSWER} are run"
            return [reason] * len(program.tests)
        sandbox = _sandbox(os.getpid(), self.limits, self.sandbox)
        return sandbox.run(program._replace(answer=answer))

    def _check(self) -> None:
        names = ("path", "prompt", "tests", "setup", "solution", "id", "instruction")
        check_text("task code", **{name: getattr(self, name) for name in names})
        check_text("task code", or_none=True, train=self.train, test=self.test, split=self.split)
        check_choice("task code", SCORES, score=self.score)
        check_choice("task code", KINDS, sandbox=self.sandbox)
        check_whole("task code", least=0, shown=self.shown)
        check_number("task code", above=0, time_limit_s=self.time_limit_s)
        check_number("task code", least=0, below=1, test_frac=self.test_frac)
        check_whole("task code", least=64, memory_mb=self.memory_mb)
        check_whole("task code", least=1, disk_mb=self.disk_mb, result_kb=self.result_kb)
        for name in ["{prompt}"] + ["{tests}"] * (self.shown > 0):
            if name not in self.instruction:
                raise ConfigError(
                    f"task code: instruction must contain {name}, got {self.instruction!r}."
                )
        if (self.train is None) != (self.test is None) or (self.train and self.split):
            raise ConfigError(
                "task code: give both task.train and task.test as ranges, or task.split alone, got"
                f" train={self.train!r}, test={self.test!r}, split={self.split!r}."
            )

    def _read(self) -> list[Row]:
        if "\0" in self.path or not Path(self.path).is_file():
            raise ConfigError(no_file("task code", self.path, "task.path"))
        lines = Path(self.path).read_bytes().splitlines()
        objects = {
            f"{self.path} line {number}": line
            for number, line in enumerate(lines, 1)
            if line.strip()
        }
        if not objects:
            raise ConfigError(f"task code: {self.path} is empty, expected one JSON object a line.")
        values = {where: _object(where, line) for where, line in objects.items()}
        for setting, usual in OPTIONAL.items():
            name = getattr(self, setting)
            if name != usual and not any(name in value for value in values.values()):
                known = next(iter(values.values()))
                raise ConfigError(
                    f"task code: {self.path} has no field {name!r} (task.{setting})."
                    f" {nearest(name, known)}"
                )
        rows = [self._row(where, value) for where, value in values.items()]
        return [row for row in rows if row.split in SPLITS]

    def _row(self, where: str, value: dict[str, Any]) -> Row:
        text = str(_field(value, self.prompt, "prompt", where)).strip()
        tests = _tests(_field(value, self.tests, "tests", where), where, self.tests)
        name = str(_field(value, self.id, "id", where))
        solution = str(value.get(self.solution) or "")
        program = Program(
            "", tuple(tests), str(value.get(self.setup) or ""), redefined_builtins(solution)
        )
        words = {"{prompt}": text, "{tests}": "\n".join(tests[: self.shown])}
        shown = re.sub(r"\{prompt\}|\{tests\}", lambda match: words[match[0]], self.instruction)
        return Row(Prompt(name, shown, solution), program, self._split_of(where, name, value))

    def _split_of(self, where: str, name: str, value: dict[str, Any]) -> str:
        if self.split is not None:
            return str(_field(value, self.split, "split", where))
        if self.train is None or self.test is None:
            part = int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) / 16**16
            return "test" if part < self.test_frac else "train"
        if not name.isdecimal():
            raise ConfigError(
                f"task code: {where}: {self.id!r} is {name!r}, a range needs numbers."
            )
        inside = [k for k in SPLITS if int(name) in _range(k, getattr(self, k))]
        if len(inside) == 2:
            raise ConfigError(f"task code: {where} is in task.train and in task.test.")
        return inside[0] if inside else ""

    def _check_solutions(self, rows: list[Row]) -> None:
        """Right answers pass under these limits; one row may be wrong, not all of them."""
        own = [row for row in rows if row.prompt.answer][:NUM_CHECKED]
        with Sandbox(self.limits, self.sandbox) as sandbox:
            errors = [sandbox.run(row.program._replace(answer=row.prompt.answer)) for row in own]
        if errors and all(any(one) for one in errors):
            first = next(error for error in errors[0] if error)
            raise ConfigError(
                f"task code: {self.path}: the first {len(own)} reference solutions fail their"
                f" tests. Row {own[0].prompt.id}: {first}. Mend task.setup, or raise"
                " task.time_limit_s or task.memory_mb."
            )


def score(errors: list[str | None], how: str) -> Reward:
    """The share of tests without an error, or 1 if no test has one; the feedback lists errors.

    >>> score([None, "assert f(1) == 2: got 1, expected 2"], "share")
    0.5
    """
    share = errors.count(None) / len(errors)
    feedback = "\n".join(dict.fromkeys(error for error in errors if error))
    return Reward(share if how == "share" else float(share == 1), feedback)


def last_block(text: str) -> str:
    """The last fenced block of Python, or of no named language; the whole text without one.

    >>> last_block("So:\\n```python\\nx = 1\\n```\\nor\\n```py\\nx = 2\\n```\\n```text\\nno\\n```")
    'x = 2\\n'
    """
    blocks = [code for name, code in _BLOCK.findall(text) if name.lower() in _PYTHON]
    return textwrap.dedent(blocks[-1]) if blocks else text.strip()


_PYTHON = ("", "python", "python3", "py")


def redefined_builtins(solution: str) -> tuple[str, ...]:
    """Builtin names that a right answer defines: tests that call them mean the answer's.

    >>> redefined_builtins("def sum(a, b): return a + b")
    ('sum',)
    """
    try:
        body = _parsed(solution).body
    except (SyntaxError, ValueError):
        return ()
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in body if isinstance(node, kinds)]
    return tuple(name for name in names if hasattr(builtins, name))


@functools.lru_cache(maxsize=1)
def _sandbox(pid: int, limits: Limits, kind: str) -> Sandbox:
    """The sandbox of this process."""
    return Sandbox(limits, kind)


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"task code: {where} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"task code: {where} is a {type(value).__name__}, expected an object with fields."
        )
    return value


def _field(value: dict[str, Any], name: str, setting: str, where: str) -> Any:
    if name not in value:
        raise ConfigError(
            f"task code: {where} has no field {name!r} (task.{setting}). {nearest(name, value)}"
        )
    return value[name]


def _tests(tests: list[str], where: str, field: str) -> list[str]:
    """The tests of a row, if they are some and Python."""
    is_list = isinstance(tests, list) and all(isinstance(test, str) for test in tests)
    if not is_list or not tests:
        raise ConfigError(
            f"task code: {where}: {field!r} must be a list of tests, Python code each, got"
            f" {str(tests)[:60]!r}."
        )
    for test in tests:
        try:
            _parsed(test.strip())
        except (SyntaxError, ValueError) as error:
            raise ConfigError(
                f"task code: {where}: a test is no Python ({error}): {test[:60]!r}."
            ) from error
    return tests


def _parsed(source: str) -> ast.Module:
    """Somebody's program, without Python's remarks on its style."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(source)


def _range(setting: str, text: str) -> range:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"task code: task.{setting} must be a range of numbers like 601-974, got {text!r}."
        )
    return range(int(match[1]), int(match[2]) + 1)
