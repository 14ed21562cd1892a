"""Planted links: report, probe and replay write nothing outside the run folder."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from counterpoise.cli import dispatch
from counterpoise.probes import run_probe
from counterpoise.report.page import write_report
from counterpoise.run.files import write_folder, write_text
from helpers.probe_run import small_run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("links") / "run", num_batches=1)


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file and a folder of the user, outside the run."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "file").write_text("mine")
    return tmp_path / "home"


WRITERS = {
    "report": functools.partial(write_report),
    "probe": lambda runs: run_probe(runs[0], "flips", 0),
}
PLACES = {
    "report": ("report", "index.html"),
    "probe": ("probes/flips/batch_000000", "summary.json"),
}


@pytest.mark.parametrize("command", WRITERS)
def test_a_planted_temporary_or_target_is_not_followed(command, run: Path, mine: Path):
    folder, name = PLACES[command]
    (run / folder).mkdir(parents=True)
    for planted in (f".{name}.tmp", name):
        (run / folder / planted).symlink_to(mine / "file")
    WRITERS[command]([run])
    assert (mine / "file").read_text() == "mine"
    assert not (run / folder / name).is_symlink()


@pytest.mark.parametrize("command", WRITERS)
def test_a_linked_folder_is_refused(command, run: Path, mine: Path):
    folder = run / PLACES[command][0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(mine)
    with pytest.raises(ValueError, match="leads"):
        WRITERS[command]([run])
    assert [path.name for path in mine.iterdir()] == ["file"]


def test_replay_into_a_linked_folder_is_refused(run: Path, mine: Path, capsys):
    (run / "probes").symlink_to(mine)
    with pytest.raises(SystemExit) as end:
        dispatch(["replay", str(run), "--batch", "0", "--method", "dapo", "--trust"])
    assert end.value.code == 2 and "leads out of the run folder" in capsys.readouterr().err
    assert [path.name for path in mine.iterdir()] == ["file"]


def test_fresh_probe_keeps_what_it_did_not_write(run: Path):
    run_probe(run, "flips", 0)
    notes = run / "probes" / "flips" / "batch_000000" / "notes.txt"
    notes.write_text("mine")
    run_probe(run, "flips", 0, fresh=True)
    assert notes.read_text() == "mine"


def test_new_files_have_the_usual_mode_and_folders_replace_linked_ones(tmp_path: Path, mine: Path):
    write_text(tmp_path / "a.txt", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / ".b.tmp").symlink_to(mine)
    write_folder(tmp_path / "b", lambda folder: write_text(folder / "file", "new"))
    assert (mine / "file").read_text() == "mine"
