"""Sandboxes for tests, and what runs in them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

IS_REQUIRED = bool(
    os.environ.get("REQUIRE_SANDBOX")
)  # then a machine without bubblewrap fails instead of passing by
NEEDS_BUBBLEWRAP = pytest.mark.skipif(
    shutil.which("bwrap") is None and not IS_REQUIRED,
    reason="no bwrap on the PATH: apt-get install -y bubblewrap",
)


def parents() -> dict[int, int]:
    """Process -> its parent."""
    out = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if fields[0] != "Z":
            out[int(stat.parent.name)] = int(fields[1])
    return out


def descendants(pid: int) -> set[int]:
    tree, out, new = parents(), set(), {pid}
    while new:
        out |= new
        new = {child for child, parent in tree.items() if parent in new} - out
    return out - {pid}
