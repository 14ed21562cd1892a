"""Every script of benchmarks/ can be loaded: what it imports is still there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "benchmarks"
LOAD = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
failed = []
for path in sys.argv[2:]:
    try:
        runpy.run_path(path, run_name="loaded")
    except ImportError as error:
        failed.append(f"{path}: {error}")
sys.exit("; ".join(failed) or 0)
"""


def test_every_script_of_benchmarks_loads():
    paths = sorted(str(path) for path in FOLDER.glob("*.py"))
    assert len(paths) > 10
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(FOLDER), *paths], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
