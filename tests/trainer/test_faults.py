"""Faults of the machine are one line, and the last good checkpoint stays: a full disk, no GPU,
files that were cut off or edited, weights that diverged, another sampler.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from counterpoise.policy import load_model
from counterpoise.run import checkpoint
from counterpoise.run.read import checkpoints
from counterpoise.trainer.config import ConfigError, parse_config
from counterpoise.trainer.loop import train
from counterpoise.trainer.update import adamw
from helpers.tiny_run import go, recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("faults") / "run"
    go(run_dir)
    return run_dir


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def small_disk(tmp_path: Path):
    """A real disk of 12 MB: a checkpoint of the bundled model with its optimizer takes about 6."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def command(recipe_file: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "counterpoise", "train", str(recipe_file), *args],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_full_disk_is_one_line_and_the_last_checkpoint_stays(small_disk: Path, tmp_path: Path):
    settings = recipe(small_disk / "run", num_batches=30, keep_checkpoints=30)
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    result = command(tmp_path / "recipe.yaml")
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert "could not be written (" in last and "The last good checkpoint is kept" in last
    saved = checkpoints(small_disk / "run")
    assert saved and not list((small_disk / "run" / "checkpoints").glob(".*"))
    policy = load_model("bundled")
    optimizer = adamw(policy.model, parse_config(settings).optimizer)
    checkpoint.restore(saved[-1], policy.model, optimizer)


def test_a_file_that_may_not_grow_is_one_line(tmp_path: Path):
    """The same without root: a limit on the size of files, which safetensors runs into."""
    config = parse_config(recipe(tmp_path / "run", num_batches=1))
    policy = load_model("bundled")
    optimizer = adamw(policy.model, config.optimizer)
    state = checkpoint.LoopState(batch_number=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match="last good checkpoint is kept"):
            checkpoint.save(tmp_path, policy, optimizer, state, keep=1, keep_every=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    "device", ["cuda:99", "tpu", "cuda" if not torch.cuda.is_available() else "x"]
)
def test_a_device_that_is_not_there_is_one_line(tmp_path: Path, device: str):
    with pytest.raises(ConfigError, match=f"device: '{device}' cannot be used here") as error:
        go(tmp_path / "run", device=device)
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("size", [0, 5, 1000])
def test_truncated_weights_are_one_line(run: Path, name: str, size: int):
    os.truncate(checkpoints(run)[-1] / name, size)
    with pytest.raises(ConfigError, match="the checkpoint cannot be read .*--fresh") as error:
        go(run, resume=True, num_batches=3)
    assert "\n" not in str(error.value)


def test_a_model_folder_that_was_cut_off_is_one_line(run: Path, tmp_path: Path):
    model = Path(shutil.copytree(checkpoints(run)[-1], tmp_path / "model"))
    os.truncate(model / "model.safetensors", 1000)
    with pytest.raises(ValueError, match="could not be loaded") as error:
        load_model(str(model))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_promts": 3}, "unknown key 'num_promts'. Did you mean 'num_prompts'"),
        ({"num_prompts": None}, "num_prompts must be a whole number from 0 on, got None"),
        ({"num_updates": 1.5}, "num_updates must be a whole number"),
        ({"batch_number": -1}, "batch_number must be a whole number"),
        ({"method": [1]}, "method must be a mapping or null"),
        ({"schema_version": 77}, "schema version 77, expected"),
    ],
)
def test_an_edited_state_is_one_line(run: Path, change: dict, message: str):
    file = checkpoints(run)[-1] / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=message):
        go(run, resume=True, num_batches=3)


def test_weights_that_diverged_never_replace_a_good_checkpoint(tmp_path: Path):
    policy = load_model("bundled")
    optimizer = adamw(policy.model, parse_config(recipe(tmp_path)).optimizer)
    how = {"keep": 1, "keep_every": 0}
    good = checkpoint.save(tmp_path, policy, optimizer, checkpoint.LoopState(1), **how)
    with torch.no_grad():
        next(policy.model.parameters())[0, 0] = float("nan")
    with pytest.raises(
        ValueError, match="the weights have diverged .* last good checkpoint is kept"
    ):
        checkpoint.save(tmp_path, policy, optimizer, checkpoint.LoopState(2), **how)
    assert checkpoints(tmp_path) == [good]


def test_a_resumed_run_says_when_another_sampler_works(run: Path, caplog):
    file = checkpoints(run)[-1] / "state.json"
    state = json.loads(file.read_text())
    assert state["sampler"]
    train(parse_config(recipe(run, num_batches=3)), resume=True)
    assert not caplog.records
    file = checkpoints(run)[-1] / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sampler": "kernels-of-old"}))
    train(parse_config(recipe(run, num_batches=4)), resume=True)
    assert "no longer bit for bit" in caplog.text and "kernels-of-old" in caplog.text
