"""Runs tests on programs: reads one JSON line per program, writes one with an error per test.

The tests run here and the program in a process of its own (see ``nursery``, ``nest``): a name that
a test does not define itself, and that is no builtin, is the program's, and what the program gives
comes back as plain data (``peer``). So a program cannot see what a test expects."""

from __future__ import annotations

import ast
import builtins
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from . import nest
from .nursery import Nursery, limits_from
from .peer import Foreign, Gone, Peer, Proxy

MAX_ERROR = 300


def main() -> None:
    is_nested, limits = sys.argv[1] == "nested", limits_from(sys.argv[2])
    os.chdir("/tmp" if is_nested else sys.argv[3])
    nursery = Nursery(limits, is_nested=is_nested)  # before this process reads anything
    nest.hide()
    questions, answers, null = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"), open_null()
    for line in questions:
        errors = judge(nursery, json.loads(line), limits["result_bytes"])
        answers.write(json.dumps(errors) + "\n")
        answers.flush()
        os.dup2(null, 2)  # the first program shows that programs run; what failed then is heard


def open_null() -> int:
    """Tests have nothing to read, and nobody reads what they print."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return null


def judge(nursery: Nursery, job: dict[str, Any], max_bytes: int) -> list[str | None]:
    """One entry per test: None, or what went wrong."""
    channel = nursery.begin()
    peer = Peer(channel, is_judge=True, max_bytes=max_bytes)
    peer.deadline = time.monotonic() + job["time_limit_s"]
    try:
        fault = attempt(lambda: load(peer, job))
        tests: list[str] = job["tests"]
        return [
            fault or attempt(lambda test=test: hold(peer, job, test), f"{test.strip()}: ")
            for test in tests
        ]
    finally:
        channel.close()
        nursery.end()


def attempt(run: Callable[[], None], where: str = "") -> str | None:
    """None, or what went wrong, in words."""
    try:
        run()
    except Gone as gone:
        return f"the program {gone}"
    except BaseException as error:
        return cut(f"{where}{in_words(error)}")
    return None


def in_words(error: BaseException) -> str:
    if isinstance(error, (Failure, Foreign)):
        return str(error)
    kind = "does not hold" if type(error) is AssertionError else type(error).__name__
    return f"{kind}: {error}" if str(error) else kind


def load(peer: Peer, job: dict[str, Any]) -> None:
    peer.ask("run", None, job["answer"])
    if job["setup"]:
        peer.ask("run", None, job["setup"])


class Failure(Exception):
    """A test that does not hold."""


def hold(peer: Peer, job: dict[str, Any], test: str) -> None:
    tree = ast.parse(test.strip())
    names = namespace(peer, job, tree)
    sides = equation(tree)
    if sides is None:
        exec(compile(tree, "<test>", "exec"), names)
        return
    values = [value_of(side, names) for side in sides]
    if not values[0] == values[1]:  # noqa: SIM201 (as the test says it)
        got, expected = values if mentions(sides[0], job) else values[::-1]
        raise Failure(f"got {show(got)}, expected {show(expected)}")


def value_of(side: ast.expr, names: dict[str, Any]) -> Any:
    return eval(compile(ast.Expression(side), "<test>", "eval"), names)


def equation(tree: ast.Module) -> tuple[ast.expr, ast.expr] | None:
    """The sides of ``assert left == right``; None for any other test."""
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Assert):
        return None
    test = tree.body[0].test
    if not isinstance(test, ast.Compare) or [type(op) for op in test.ops] != [ast.Eq]:
        return None
    return test.left, test.comparators[0]


def namespace(peer: Peer, job: dict[str, Any], tree: ast.Module) -> dict[str, Any]:
    """The names that a test reads: imports of the setup, and the program's."""
    names: dict[str, Any] = {"__builtins__": builtins, "__name__": "test"}
    for node in imports(job["setup"]):
        exec(compile(ast.Module([node], []), "<setup>", "exec"), names)
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {node.id for node in functions if isinstance(node, ast.Name)}
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and n not in functions}
    for name in sorted((called | read) - bound(tree) - set(names)):
        if name in job["shadows"] or not hasattr(builtins, name):
            is_called = name in called and name not in read
            names[name] = Proxy(peer, name) if is_called else peer.ask("name", name)
    return names


def imports(setup: str) -> list[ast.stmt]:
    try:
        body = ast.parse(setup).body
    except SyntaxError:
        return []
    return [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]


def loaded(tree: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and type(n.ctx) is ast.Load}


def bound(tree: ast.AST) -> set[str]:
    """Names that the test itself gives a value."""
    out: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and type(node.ctx) is not ast.Load:
            out.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            out.add(node.name)
        elif isinstance(node, ast.arg):
            out.add(node.arg)
        elif isinstance(node, ast.alias):
            out.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            out.add(node.name)
    return out


def mentions(side: ast.expr, job: dict[str, Any]) -> bool:
    """Whether a side has a name of the program's."""
    return any(n in job["shadows"] or not hasattr(builtins, n) for n in loaded(side))


def show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_ERROR // 3 else text[: MAX_ERROR // 3] + "..."


def cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_ERROR else text[: MAX_ERROR - 3] + "..."


if __name__ == "__main__":
    main()
