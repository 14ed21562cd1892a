"""What a manifest says of the process that wrote it."""

from __future__ import annotations

import pytest

from counterpoise.run.environment import process_facts


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("/x/counterpoise/__main__.py", ["python", "-m", "counterpoise"]),
        ("/usr/bin/counterpoise", ["counterpoise"]),
        ("train_it.py", ["train_it.py"]),
    ],
)
def test_the_command_can_be_typed_again(script, words, monkeypatch):
    monkeypatch.setattr("sys.argv", [script, "train", "demo"])
    assert process_facts()["command"] == [*words, "train", "demo"]
