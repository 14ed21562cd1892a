"""The command line: what a newcomer types first answers at once and fits a terminal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from counterpoise.cli import COMMANDS, dispatch, overview
from counterpoise.cli.method_list import method_list, summaries
from helpers.make_run import make_run

SLOW = {"torch", "transformers", "pandas", "numpy", "pyarrow", "typer", "rich", "pydantic"}


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300)


def modules_after(code: str) -> set[str]:
    """Top-level names of what is imported once ``code`` has run in a fresh process."""
    show = "; import sys; print('|', *{name.partition('.')[0] for name in sys.modules})"
    result = run_python("-c", code + show)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.rpartition("|")[2].split())


@pytest.mark.parametrize("args", [["--help"], ["--version"], [], ["methods"]])
def test_first_contact_loads_nothing_slow(args):
    code = f"from counterpoise.cli import dispatch; dispatch({args})"
    assert not SLOW & modules_after(code)


def test_import_loads_nothing_slow():
    assert not SLOW & modules_after("import counterpoise; dir(counterpoise)")


def test_reading_a_run_folder_needs_no_torch(tmp_path):
    run = make_run(tmp_path / "run", num_batches=1, prompts=2, group_size=2)
    code = f"import counterpoise as cp; run = cp.load_run({str(run)!r}); run.config; run.metrics"
    assert not {"torch", "transformers"} & modules_after(code)


def test_python_m_counterpoise():
    import counterpoise

    result = run_python("-m", "counterpoise", "--version")
    assert (result.returncode, result.stdout) == (0, f"{counterpoise.__version__}\n")


def test_a_wrong_command_names_the_nearest():
    result = run_python("-m", "counterpoise", "trian")
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith("counterpoise: unknown command 'trian'. Did you mean 'train'?")


def test_the_overview_and_the_list_of_methods_fit_80_columns():
    from counterpoise.catalogue.presets import PRESETS

    text = method_list(summaries())
    assert max(map(len, [*overview().splitlines(), *text.splitlines()])) <= 80
    assert set(PRESETS) <= {line.partition(" ")[0] for line in text.splitlines()}
    assert "Group z-score, token clip, mean over each rollout." in text


def test_one_method_is_shown_on_its_axes(capsys):
    with pytest.raises(SystemExit) as end:
        dispatch(["methods", "dapo"])
    assert end.value.code == 0
    assert "clipped(clip_low=0.2, clip_high=0.28" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command, capsys):
    with pytest.raises(SystemExit) as end:
        dispatch([command, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0 and f"Example: counterpoise {command}" in shown


def test_a_reader_that_stops_early_is_no_error():
    code = (
        "import sys, os; from counterpoise.cli import main; sys.argv = ['counterpoise', '--help']"
    )
    closed = "r, w = os.pipe(); os.close(r); os.dup2(w, 1); main()"
    result = run_python("-c", f"{code}; {closed}")
    assert "Traceback" not in result.stderr
