"""What a newcomer does first: init, train by name, wrong paths, piped output."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from counterpoise.cli import dispatch
from helpers.make_run import make_run

TINY = {
    "num_batches": 3,
    "rollouts.prompts": 2,
    "rollouts.group_size": 2,
    "rollouts.max_new_tokens": 48,
    "optimizer.updates_per_batch": 1,
    "eval.prompts": 4,
    "eval.every": 2,
    "ledger.every": 0,
}


# several commands in one process: most of its time is the import of torch
CONSOLE = """
import json, os, sys
sys.path.remove("")  # unlike `python -m`, the console script does not import from the folder
from counterpoise.cli import main
for folder, *words in json.loads(sys.argv[1]):
    os.chdir(folder)
    before, path = set(sys.modules), list(sys.path)
    sys.argv = ["counterpoise", *words]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    for name in {"my_task"} & sys.modules.keys() - before:
        del sys.modules[name]
    sys.path[:] = path
"""


def counterpoise(*commands: list[object]) -> subprocess.CompletedProcess[str]:
    """The console script, once per command: a folder and the words."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    words = json.dumps([list(map(str, command)) for command in commands])
    return subprocess.run(
        [sys.executable, "-c", CONSOLE, words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )


def settings() -> list[str]:
    return [word for key, value in TINY.items() for word in ("--set", f"{key}={value}")]


def test_init_writes_a_recipe_and_a_task_that_train_from_any_folder(tmp_path):
    result = counterpoise([tmp_path, "init", "mine"])
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].endswith(" train mine/recipe.yaml")
    result = counterpoise(
        [tmp_path, "train", "mine/recipe.yaml", *settings()],
        [tmp_path / "mine", "eval", "../runs/mine", "--trust", "--prompts", 2],
        [tmp_path, "init", "mine"],
    )
    assert result.returncode == 2 and "mine/recipe.yaml exists" in result.stderr, result.stderr
    assert (tmp_path / "runs" / "mine" / "metrics.jsonl").is_file()
    assert "accuracy" in result.stdout


def test_a_recipe_of_the_package_by_name_and_lines_that_do_not_wrap_or_repeat(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        dispatch(["train", "demo", *settings()])
    lines = capfd.readouterr().err.splitlines()
    assert not end.value.code, lines
    assert lines[0].startswith("dapo, plan query_preserved on arithmetic")
    batches = [line for line in lines if line.startswith("batch ")]
    assert len(batches) == 3 and all(line.endswith(" s per batch") for line in batches)
    assert ["held-out" in line for line in batches] == [False, True, True]
    assert [line.partition(":")[0] for line in batches] == [
        "batch 0 (1 of 3)",
        "batch 1 (2 of 3)",
        "batch 2 (3 of 3)",
    ]
    with pytest.raises(SystemExit) as end:
        dispatch(["train", "demo", *settings(), "--resume"])
    assert not end.value.code
    assert "nothing was left to do: the run has its 3 batches already" in capfd.readouterr().out


def test_a_wrong_recipe_names_the_nearest(capsys):
    with pytest.raises(SystemExit) as end:
        dispatch(["train", "dmeo"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "no file 'dmeo', and no such recipe. Did you mean 'demo'?" in said


def test_a_run_folder_in_place_of_a_recipe_names_its_recipe(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(SystemExit) as end:
        dispatch(["train", str(tmp_path), "--resume"])
    assert end.value.code == 2
    assert f"{tmp_path} is a run folder. Its recipe, for --resume too: {tmp_path}/config.yaml" in (
        capsys.readouterr().err
    )


def test_json_holds_no_number_that_json_does_not_know(capsys):
    with pytest.raises(SystemExit):
        dispatch(["methods", "--json"])
    known = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert known["cispo"]["parameters"]["loss"]


def test_the_table_of_a_comparison_is_no_wider_for_a_long_baseline(tmp_path, capsys):
    for name, seed in (("grpo", 0), ("delta", 1)):
        make_run(tmp_path / name, method=name, seed=seed)
    with pytest.raises(SystemExit):
        dispatch(["compare", str(tmp_path / "grpo"), str(tmp_path / "delta"), "--no-page"])
    out = capsys.readouterr().out
    assert "difference, points" in out.splitlines()[0]
    assert "differences are against grpo" in out


@pytest.mark.parametrize(
    "args",
    [
        ["eval", "runs/dmeo"],
        ["eval", "/no/where"],
        ["probe", "runs/dmeo", "--probe", "tax"],
        ["replay", "runs/dmeo", "--batch", "0", "--method", "dapo"],
        ["report", "runs/dmeo"],
        ["compare", "runs/dmeo", "runs/demo"],
        ["view", "runs/dmeo"],
        ["audit", "runs/dmeo"],
        ["report", "dmeo"],
    ],
)
def test_a_run_that_is_not_there_is_said_at_once(tmp_path, monkeypatch, capsys, args):
    make_run(tmp_path / "runs" / "demo", num_batches=1, prompts=2, group_size=2)
    monkeypatch.chdir(tmp_path)
    heavy = {"transformers", "pandas", "plotly", "counterpoise.trainer.config"}
    heavy |= {"counterpoise.probes.runner", "counterpoise.report.page"}
    heavy |= {"counterpoise.viewer.server"}
    for name in heavy:
        monkeypatch.setitem(sys.modules, name, None)  # importing it would be an error
    with pytest.raises(SystemExit) as end:
        dispatch(args)
    said = capsys.readouterr().err
    assert end.value.code == 2 and f"no such run: {args[1]}." in said
    assert ("Did you mean 'runs/demo'?" in said) == ("dmeo" in args[1])
    assert len(said.splitlines()) == 1


BATCH = {
    "report RUN --batch 99": "no run has tokens or rollouts of batch 99. There are: 0-2.",
    "audit RUN --batch 99": "no rollouts of batch 99. There are: 0-2.",
    "replay RUN --batch 99 --method dapo": "no rollouts of batch 99. There are: 0-2.",
    "probe RUN --batch 99 --probe tax": "no rollouts or tokens of batch 99. There are: 0-2.",
    "view RUN --batch 99 --export OUT": "no tokens or rollouts of batch 99. There are: 0-2.",
}


@pytest.mark.parametrize("words", BATCH)
def test_a_batch_that_is_not_there_is_answered_with_those_that_are(words, tmp_path, capsys):
    make_run(tmp_path / "run", num_batches=3, prompts=2, group_size=2)
    names = {"RUN": str(tmp_path / "run"), "OUT": str(tmp_path / "out")}
    with pytest.raises(SystemExit) as end:
        dispatch([names.get(word, word) for word in words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and BATCH[words] in line


@pytest.mark.parametrize("text", ["", "# nothing yet\n\n", "---\n"])
@pytest.mark.parametrize("command", ["train", "eval bundled --config"])
def test_an_empty_recipe_is_said_to_be_empty(text, command, tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        dispatch([*command.split(), str(file)])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and f"config: {file} is empty" in line
    assert "recipe 'demo'" in line and "counterpoise init" in line


def test_a_folder_of_runs_and_a_file_are_told_apart_from_a_run(tmp_path, capsys):
    make_run(tmp_path / "runs" / "demo", num_batches=1, prompts=2, group_size=2)
    (tmp_path / "out" / "counterpoise").mkdir(parents=True)
    (tmp_path / "out" / "counterpoise" / "metrics.jsonl").write_text("")
    expected = {
        "runs": f"Give one in it: {tmp_path / 'runs' / 'demo'}.",
        "out": f"Give one in it: {tmp_path / 'out' / 'counterpoise'}.",
        "runs/demo/config.yaml": "is a file, expected a run folder.",
    }
    for name, words in expected.items():
        with pytest.raises(SystemExit) as end:
            dispatch(["report", str(tmp_path / name)])
        assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    "args", [["train", "demo", "--set", "model=nosuch/model"], ["eval", "nos"]]
)
def test_a_model_that_is_nowhere_is_said_before_anything_slow(tmp_path, monkeypatch, capsys, args):
    """The hub is asked once, not in five rounds."""
    asked = []

    def refuse(self, name, timeout):
        asked.append(name)
        raise OSError("no network")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    for name in ("counterpoise.trainer.loop", "counterpoise.trainer.evaluate"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as end:
        dispatch(args)
    said = capsys.readouterr().err
    assert end.value.code == 2 and len(asked) == 1 and len(said.splitlines()) == 1
    assert f"model {asked[0]!r}: no such folder, and the hub cannot be asked (no network)" in said
    assert not (tmp_path / "runs").exists()


def test_slips_of_a_first_hour_are_answered_before_anything_slow(tmp_path, monkeypatch, capsys):
    """A recipe's path outside the clone, a method's name, a run given twice, ``help``."""
    make_run(tmp_path / "runs" / "a", num_batches=1, prompts=2, group_size=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "counterpoise.trainer.loop", None)
    said = {
        "train recipes/demo.yaml": "Did you mean 'demo'?",
        "train demo --set method=detla": "unknown method 'detla'. Did you mean 'delta'?",
        "report runs/a ./runs/a": "runs/a is given twice. Give each run once.",
        "compare runs/a runs/a/": "runs/a is given twice. Give each run once.",
    }
    for words, expected in said.items():
        with pytest.raises(SystemExit) as end:
            dispatch(words.split())
        assert end.value.code == 2 and expected in capsys.readouterr().err
    dispatch(["help"])
    assert "Usage: counterpoise COMMAND" in capsys.readouterr().out


def test_a_folder_that_is_taken_is_said_before_anything_slow(tmp_path, monkeypatch, capsys):
    make_run(tmp_path / "runs" / "demo", num_batches=1, prompts=2, group_size=2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "counterpoise.trainer.loop", None)
    with pytest.raises(SystemExit) as end:
        dispatch(["train", "demo"])
    assert end.value.code == 2 and "holds a run" in capsys.readouterr().err


def test_a_piped_table_does_not_wrap(tmp_path):
    runs = [make_run(tmp_path / f"{'long' * 12}{k}", num_batches=2, seed=k) for k in (0, 1)]
    result = counterpoise([tmp_path, "compare", *runs, "--no-page"])
    assert result.returncode == 0, result.stderr
    assert all(len(line.split()) > 1 for line in result.stdout.splitlines()[:3] if line)
