"""The examples in the docstrings of the TRL host."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise.hosts.trl

pytestmark = pytest.mark.hosts
MODULES = [name for _, name, _ in pkgutil.iter_modules(counterpoise.hosts.trl.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    assert (
        doctest.testmod(
            importlib.import_module(f"counterpoise.hosts.trl.{name}"), optionflags=doctest.ELLIPSIS
        ).failed
        == 0
    )


def test_some_have_examples():
    finder = doctest.DocTestFinder()
    found = [
        case
        for name in MODULES
        for case in finder.find(importlib.import_module(f"counterpoise.hosts.trl.{name}"))
        if case.examples
    ]
    assert len(found) >= 5
