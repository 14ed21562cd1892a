"""The structure holds: every folder has its place, and the core needs torch alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "counterpoise"
ONLY_EXTRA = Path(__file__).parent / "helpers" / "only_extra.py"
FILES = sorted(SRC.rglob("*.py"))
AXES = ["advantages", "credit", "losses", "reductions", "plans", "controllers"]
# a file or folder imports from those before it, never from those after it
ORDER = [
    *["errors", "text", "stage", "types", "maths", *AXES, "catalogue"],
    *["tasks", "run", "policy", "sampling", "ledger", "trainer", "probes"],
    *["report", "viewer", "hosts", "cli", "__main__"],
]
CORE = ["errors", "stage", "types", "maths", *AXES, "catalogue"]


def top(file: Path) -> str:
    return file.relative_to(SRC).parts[0].removesuffix(".py")


def test_every_folder_has_its_place_in_the_order():
    assert {top(file) for file in FILES} - {"__init__"} == set(ORDER)


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
