"""--resume and --fresh: they never erase what they did not write, never change the experiment
unsaid, and one process at a time has the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from counterpoise.cli import dispatch
from counterpoise.report.page import write_report
from counterpoise.run.files import append_json
from counterpoise.run.own import lock_run
from counterpoise.run.read import checkpoints, open_run, read_jsonl
from counterpoise.trainer.config import ConfigError
from helpers.tiny_run import TINY, go, recipe


@pytest.fixture(scope="module")
def two_batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("resume") / "run"
    go(run_dir)
    return run_dir


@pytest.fixture
def run(two_batches: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_batches, tmp_path / "run"))


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# what is there is not erased


def test_resume_without_a_checkpoint_is_an_error_and_erases_nothing(run: Path):
    shutil.rmtree(run / "checkpoints")
    (run / "notes.txt").write_text("mine")
    before = contents(run)
    with pytest.raises(ConfigError, match="--resume: .* has no complete checkpoint.*--fresh"):
        go(run, resume=True, num_batches=3)
    assert contents(run) == before


def test_a_run_that_failed_before_its_first_checkpoint_is_offered_only_to_be_replaced(
    tmp_path: Path, monkeypatch
):
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("no reward")

    with monkeypatch.context() as patch:
        patch.setattr("counterpoise.trainer.loop.collect", fail)
        with pytest.raises(RuntimeError, match="no reward"):
            go(tmp_path / "run", num_batches=1)
    with pytest.raises(ConfigError, match="without a checkpoint.* Replace it with --fresh") as told:
        go(tmp_path / "run", num_batches=1)
    assert "--resume" not in str(told.value)
    go(tmp_path / "run", num_batches=1, fresh=True)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("manifest", ['{"name": "my web app"}', "[1]", "not json", ""])
@pytest.mark.parametrize("how", [{"fresh": True}, {"resume": True}, {}])
def test_a_foreign_manifest_is_not_a_run(tmp_path: Path, manifest: str, how):
    folder = tmp_path / "app"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "manifest.json").write_text(manifest)
    (folder / "rollouts" / "batch_000001.parquet").write_text("mine")
    before = contents(folder)
    with pytest.raises(ConfigError, match="holds no run"):
        go(folder, **how)
    assert contents(folder) == before


def test_fresh_removes_what_a_run_wrote_and_keeps_the_rest(run: Path):
    kept = {
        "notes.txt",
        "rollouts/notes.csv",
        "checkpoints/best.txt",
        "checkpoints/mine/model.bin",
        "probes/mine.ipynb",
        "report/photo.png",
        "data/train.jsonl",
    }
    ours = {"rollouts/batch_000050.parquet", "plan/batch_000050.json", "report/index.html"}
    ours |= {"probes/tax/batch_000050/summary.json", "checkpoints/batch_000050/state.json"}
    for name in kept | ours:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("x")
    go(run, fresh=True, num_batches=1)
    there = set(contents(run))
    assert kept <= there and not ours & there
    assert len(read_jsonl(run / "metrics.jsonl")) == 1
    assert [path.name for path in checkpoints(run)] == ["batch_000001"]


@pytest.mark.parametrize("version", [1, 99])
def test_fresh_leaves_folders_of_another_schema_alone(run: Path, version: int):
    file = run / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "schema_version": version}))
    before = contents(run)
    with pytest.raises(ConfigError, match=f"schema version {version}"):
        go(run, fresh=True)
    assert contents(run) == before


@pytest.mark.parametrize("how", [{"fresh": True}, {}])
def test_a_kill_between_config_and_manifest_leaves_a_folder_that_trains(
    run: Path, tmp_path: Path, how
):
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "config.yaml", begun)
    (begun / "notes.txt").write_text("mine")
    go(begun, **how, num_batches=1)
    assert (begun / "notes.txt").exists() and len(read_jsonl(begun / "metrics.jsonl")) == 1


@pytest.mark.parametrize("name", ["rollouts", "plan", "checkpoints"])
@pytest.mark.parametrize("how", [{"fresh": True}, {"resume": True, "num_batches": 3}])
def test_a_linked_folder_is_not_followed(run: Path, tmp_path: Path, name: str, how):
    """What lies behind the link is neither deleted nor written to."""
    shutil.move(run / name, tmp_path / "outside")
    (tmp_path / "outside" / "batch_000007.parquet").write_text("mine")
    (run / name).symlink_to(tmp_path / "outside")
    before = contents(tmp_path / "outside")
    with pytest.raises(ValueError, match=f"{name}.* leads out of"):
        go(run, **how)
    assert contents(tmp_path / "outside") == before


def test_a_linked_file_is_not_appended_to(run: Path, tmp_path: Path):
    (tmp_path / "mine.txt").write_text("mine\n")
    (run / "timing.jsonl").unlink()
    (run / "timing.jsonl").symlink_to(tmp_path / "mine.txt")
    with pytest.raises((OSError, ValueError)):
        append_json(run / "timing.jsonl", {"batch": 0})
    assert (tmp_path / "mine.txt").read_text() == "mine\n"


# the experiment is not changed


def test_resume_refuses_what_changes_the_experiment(run: Path):
    before = contents(run)
    other = {"method": {"name": "dapo"}, "optimizer": {"lr": 0.5, "updates_per_batch": 1}}
    with pytest.raises(ConfigError) as error:
        go(run, resume=True, num_batches=3, **other)
    assert "method.name (got 'dapo', the run has 'grpo')" in str(error.value)
    assert "optimizer.lr (got 0.5, the run has 0.001)" in str(error.value)
    assert "num_batches" not in str(error.value) and "\n" not in str(error.value)
    assert contents(run) == before


def test_the_command_line_refuses_in_one_line(run: Path, capsys):
    (run.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe(run)))
    with pytest.raises(SystemExit) as end:
        dispatch(
            ["train", str(run.parent / "recipe.yaml"), "--resume", "--set", "method.name=dapo"]
        )
    message = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2
    assert "counterpoise: --resume: method.name (got 'dapo', the run has 'grpo')" in message


def test_allowed_changes_are_written_with_their_batch(run: Path, tmp_path: Path):
    more = {"num_batches": 4, "eval": {"every": 2, "prompts": 2}, "keep_checkpoints": 2}
    go(run, resume=True, **more)
    changes = json.loads((run / "manifest.json").read_text())["changes"]
    assert {(c["batch"], c["key"], c["before"], c["now"]) for c in changes} == {
        (2, "num_batches", 2, 4),
        (2, "eval.every", 0, 2),
        (2, "eval.prompts", 200, 2),
        (2, "keep_checkpoints", 1, 2),
    }
    assert yaml.safe_load((run / "config.yaml").read_text())["num_batches"] == 4
    assert open_run(run).problems == []
    page, _ = write_report([run])
    assert "num_batches 2 → 4 from batch 2" in page.read_text()
    go(tmp_path / "whole", **{**more, "eval": {"every": 0}})
    ours, whole = (read_jsonl(path / "metrics.jsonl") for path in (run, tmp_path / "whole"))
    keys = ("loss/total", "loss/grad_norm", "reward/mean", "entropy/mean")
    assert [[row[k] for k in keys] for row in ours] == [[row[k] for k in keys] for row in whole]


def test_the_number_of_batches_is_part_of_a_falling_learning_rate(tmp_path: Path):
    falling = {"optimizer": {**TINY["optimizer"], "schedule": "linear"}}
    go(tmp_path / "run", num_batches=1, **falling)
    with pytest.raises(ConfigError, match="num_batches .*optimizer.schedule is 'linear'"):
        go(tmp_path / "run", resume=True, num_batches=2, **falling)


def test_fewer_batches_than_there_are_is_an_error(run: Path):
    with pytest.raises(ConfigError, match="num_batches is 1, and the run has 2 already"):
        go(run, resume=True, num_batches=1)


# one process


def test_a_second_process_is_told_who_has_the_folder(run: Path):
    before = contents(run)
    with lock_run(run):
        for how in ({"resume": True}, {"fresh": True}):
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on ") as error:
                go(run, **how)
            assert "\n" not in str(error.value)
    assert contents(run) == before


def test_the_lock_of_a_dead_process_holds_nobody_back(run: Path):
    (run / ".lock").write_text('{"pid": 1, "host": "elsewhere"}')
    go(run, resume=True, num_batches=3)
    assert not (run / ".lock").exists()


# broken lines


def test_a_broken_line_stays_and_so_do_the_later_ones(run: Path, caplog):
    first, second = (run / "metrics.jsonl").read_text().splitlines()
    broken = ["{broken \x1b[31m", "[1, 2]", '{"batch": "two"}', '{"no": "batch"}']
    torn = '{"batch": 2, "rew'
    (run / "metrics.jsonl").write_text("\n".join([first, *broken, second, torn]))
    go(run, resume=True, num_batches=3)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert lines[:6] == [first, *broken, second] and json.loads(lines[6])["batch"] == 2
    said = [record.getMessage() for record in caplog.records if "metrics.jsonl" in record.message]
    assert said and "4 lines" in said[0] and "line 2" in said[0] and "\x1b" not in said[0]


def test_lines_that_are_not_utf8_stay_byte_for_byte(run: Path):
    whole = (run / "evals.jsonl", run / "metrics.jsonl")
    whole[0].write_bytes(b"\xff\xfe\n")
    before = whole[0].read_bytes()
    go(run, resume=True, num_batches=3)
    assert whole[0].read_bytes() == before
