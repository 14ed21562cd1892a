"""The structure holds: what each folder may import, how long a file may be, how much is typed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "counterpoise"
TESTS = Path(__file__).parent
ONLY_EXTRA = TESTS / "helpers" / "only_extra.py"
FILES = sorted(SRC.rglob("*.py"))
AXES = ["advantages", "credit", "losses", "reductions", "plans", "controllers"]
# a file or folder imports from those before it, never from those after it
ORDER = [
    *["errors", "text", "stage", "checks", "types", "rollouts", "maths", *AXES, "catalogue"],
    *[
        "tasks",
        "environments",
        "run",
        "models",
        "policy",
        "sampling",
        "ledger",
        "trainer",
        "probes",
    ],
    *["report", "viewer", "arena", "hosts", "cli", "__main__"],
]
CORE = ["errors", "stage", "checks", "types", "rollouts", "maths", *AXES, "catalogue"]


def top(file: Path) -> str:
    return file.relative_to(SRC).parts[0].removesuffix(".py")


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: the imports under ``if TYPE_CHECKING`` do not."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from nodes(child)


def imports(file: Path) -> set[str]:
    """Top-level files and folders of the package that a file imports, at once or later."""
    names = set()
    for node in nodes(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in names if name.startswith("counterpoise.")]
    return {part[1] for part in parts} & set(ORDER)


def test_every_folder_has_its_place_in_the_order():
    assert {top(file) for file in FILES} - {"__init__"} == set(ORDER)


def test_imports_point_one_way():
    wrong = [
        f"{file.relative_to(SRC)} imports {name}"
        for file in FILES
        if top(file) != "__init__"
        for name in imports(file)
        if ORDER.index(name) > ORDER.index(top(file))
    ]
    assert wrong == []


def test_the_core_imports_torch_and_the_standard_library_alone():
    """Intervals are the exception: numpy, and read by pages and probes alone."""
    modules = [
        ".".join(["counterpoise", *file.relative_to(SRC).with_suffix("").parts])
        for file in FILES
        if top(file) in CORE and file.name != "intervals.py"
    ]
    code = f"import importlib; [importlib.import_module(name) for name in {modules}]"
    result = subprocess.run(
        [sys.executable, str(ONLY_EXTRA), "", code], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr


def test_no_file_is_over_400_lines():
    files = [*FILES, *SRC.rglob("*.js"), *SRC.rglob("*.css")]
    lengths = {str(file.relative_to(SRC)): len(file.read_text().splitlines()) for file in files}
    assert {name for name, length in lengths.items() if length > 400} == set()


def test_at_most_2_5_percent_of_arguments_are_any():
    arguments = [
        argument
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in every_argument(node.args)
        if argument.arg not in ("self", "cls")
    ]
    untyped = [
        one
        for one in arguments
        if isinstance(one.annotation, ast.Name) and one.annotation.id == "Any"
    ]
    assert len(untyped) / len(arguments) <= 0.025


def every_argument(args: ast.arguments) -> list[ast.arg]:
    rest = [one for one in (args.vararg, args.kwarg) if one]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *rest]


def test_variables_say_what_they_are():
    """Not that they were found, made or done."""
    vague = [
        f"{file.relative_to(SRC)}:{node.lineno} {node.id}"
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if node.id.partition("_")[0] in ("found", "made", "done")
    ]
    assert vague == []


def test_every_test_asserts():
    """By an assert, a helper whose name says so, or warnings that are errors."""
    silent = [
        f"{file.name}::{node.name}"
        for file in sorted(TESTS.rglob("test_*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if not any(map(is_assertion, ast.walk(node)))
    ]
    assert silent == []


def is_assertion(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Assert)
    words = ast.unparse(node.func).rpartition(".")[2]
    is_strict = words in ("simplefilter", "filterwarnings") and "error" in ast.unparse(node)
    return is_strict or words.startswith(("assert_", "check", "raises", "warns", "fail"))


def test_no_property_has_a_time_limit():
    """A deadline of an example fails on a busy machine."""
    from hypothesis import settings

    assert settings().deadline is None
