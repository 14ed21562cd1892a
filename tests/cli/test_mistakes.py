"""Mistakes in options: one line, exit code 2, the nearest option."""

from __future__ import annotations

import pytest

from counterpoise.cli import dispatch

MISTAKES = {
    "report runs/demo --batch x": "report: --batch: expected a whole number, got 'x'.",
    "report runs/demo --batch=x": "report: --batch: expected a whole number, got 'x'.",
    "report runs/demo --batch -3": "report: --batch: must be greater than or equal to 0, got '-3'.",
    "report runs/demo --batch": "--batch",
    "report runs/demo --btach 1": "report: unknown option '--btach'. Did you mean '--batch'? K",
    "report runs/demo -batch 1": "report: unknown option '-batch'. Did you mean '--batch'? K",
    "report": "report: RUNS is missing. Expected: Run folders",
    "replay runs/demo --method dapo": "replay: --batch is missing. Expected: A batch with saved",
    "eval bundled --temperature hot": "eval: --temperature: expected a number, got 'hot'.",
    "sweep demo --methods grpo --seeds a b": "sweep: --seeds: expected a whole number, got 'a'.",
    "train demo --set optimizer.lr 1e-5": "(1e-5)",
    "report runs/demo --json=3": "--json",
    "--verison": "unknown option '--verison'. Did you mean '--version'?",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_in_the_options_is_one_line(words, capsys):
    with pytest.raises(SystemExit) as end:
        dispatch(words.split())
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert end.value.code == 2 and said.out == ""
    assert line.startswith("counterpoise: ") and MISTAKES[words] in line
    if not words.startswith("--"):
        assert line.endswith(f"See: counterpoise {words.split()[0]} --help")


def test_an_error_of_ours_is_no_mistake_of_the_user(monkeypatch):
    """It keeps its traceback."""

    def fail(**options):
        raise AssertionError("ours")

    monkeypatch.setattr("counterpoise.cli.methods.methods", fail)
    with pytest.raises(AssertionError, match="ours"):
        dispatch(["methods", "dapo"])
