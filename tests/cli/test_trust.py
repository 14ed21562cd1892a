"""Run folders and models of somebody else run no code, whatever they try."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from counterpoise.cli import dispatch
from counterpoise.tasks import task
from helpers.probe_run import small_run

COMMANDS = {
    "eval": ["--prompts", "2"],
    "probe": ["--probe", "tax", "--batch", "0"],
    "replay": ["--batch", "0", "--method", "dapo"],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run whose task is a class of the tests."""
    return small_run(tmp_path_factory.mktemp("trust") / "run", num_batches=1, ledger_every=0)


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def edit(folder: Path, **sections: object) -> None:
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **sections}))


def call(command: str, folder: Path, *more: str) -> int:
    with pytest.raises(SystemExit) as end:
        dispatch([command, str(folder), *COMMANDS[command], *more])
    return int(end.value.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("task.name", {"task": {"name": "os:system", "command": "touch {mark}"}}),
        ("task.name", {"task": {"name": "planted:Task"}}),
        ("task.name", {"task": "planted:Task"}),
        ("task.name", {"task": "verifiers:planted"}),
        ("task.name", {"task": {"name": "openenv:http://planted:80"}}),
        ("task.reward", {"task": {"name": "arithmetic", "reward": "planted:reward"}}),
        ("ledger.categories", {"ledger": {"categories": "planted:names"}}),
        ("method.credit.0.name", {"method": {"name": "dapo", "credit": [{"name": "planted:x"}]}}),
        ("method.loss", {"method": {"name": "dapo", "loss": "planted:x"}}),
    ],
)
def test_a_run_folder_imports_nothing(
    command, key, sections, folder: Path, tmp_path: Path, monkeypatch, capsys
):
    mark = tmp_path / "mark"
    (tmp_path / "planted.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    edit(folder, **json.loads(json.dumps(sections).replace("{mark}", str(mark))))
    assert call(command, folder) == 2
    message = capsys.readouterr().err
    assert f"{key} names" in message and "--trust" in message and message.count("\n") == 1
    assert not mark.exists() and "planted" not in sys.modules


@pytest.mark.parametrize("command", COMMANDS)
def test_with_trust_the_folders_own_task_works(command, folder: Path, capsys):
    assert call(command, folder, "--trust") == 0, capsys.readouterr().err


def test_what_the_user_types_needs_no_trust(folder: Path, tmp_path: Path, capsys):
    edit(folder, task={"name": "os:system", "command": f"touch {tmp_path / 'mark'}"})
    own = ["--set", "task={name: 'helpers.probe_run:Coin'}"]
    assert call("eval", folder, *own) == 0, capsys.readouterr().err
    assert not (tmp_path / "mark").exists()


def test_even_with_trust_only_a_task_is_called(folder: Path, tmp_path: Path, capsys):
    edit(folder, task={"name": "os:system", "command": f"touch {tmp_path / 'mark'}"})
    assert call("eval", folder, "--trust") == 2
    assert "task 'os:system' is not a task" in capsys.readouterr().err
    assert not (tmp_path / "mark").exists()


def test_a_task_may_be_a_function_that_says_what_it_returns(tmp_path: Path, monkeypatch):
    (tmp_path / "makers.py").write_text(
        "from counterpoise.tasks.arithmetic import Arithmetic\n"
        "def easy(terms: int = 3) -> Arithmetic: return Arithmetic(terms=terms)\n"
        "def unsaid(): raise SystemExit('called')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert next(task("makers:easy", terms=3).prompts("train", 0)).text
    with pytest.raises(ValueError, match="task 'makers:unsaid' is not a task: expected a class"):
        task("makers:unsaid")


def plant_code(model: Path, mark: Path) -> None:
    """A model folder that asks to run its own Python."""
    source = (
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class Config(LlamaConfig): model_type = 'planted'\n"
        "class Model(LlamaForCausalLM): config_class = Config\n"
    )
    (model / "planted_model.py").write_text(source)
    settings = json.loads((model / "config.json").read_text())
    settings |= {
        "model_type": "planted",
        "auto_map": {
            "AutoConfig": "planted_model.Config",
            "AutoModelForCausalLM": "planted_model.Model",
        },
    }
    (model / "config.json").write_text(json.dumps(settings))


def test_a_model_folder_runs_no_code_even_if_stdin_says_yes(run: Path, tmp_path: Path):
    (saved,) = [p for p in (run / "checkpoints").iterdir() if p.name == "batch_000001"]
    model = Path(shutil.copytree(saved, tmp_path / "model"))
    plant_code(model, tmp_path / "mark")
    result = subprocess.run(
        [sys.executable, "-m", "counterpoise", "eval", str(model), "--prompts", "2"],
        input="y\ny\ny\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert not (tmp_path / "mark").exists()
    assert "runs no code" in result.stderr
