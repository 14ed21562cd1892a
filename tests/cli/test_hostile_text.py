"""Text of folders and files cannot steer the terminal, and YAML of others stays small."""

from __future__ import annotations

import ast
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoise.cli import dispatch
from counterpoise.run.read import open_run
from counterpoise.text import load_yaml
from counterpoise.trainer.config import ConfigError, load_config
from helpers.probe_run import small_run

CLI = Path(__file__).parents[2] / "src" / "counterpoise" / "cli"
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 10)
)
HOSTILE = "ru\x1b[31mn\nfake line[/bold]\u202e"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose folder has a hostile name, and whose ledger has hostile categories."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = small_run(tmp_path_factory.mktemp("hostile") / "run", num_batches=1)
    file = path / "tokens" / "batch_000000.parquet"
    table = pq.read_table(file)
    names = pa.array([HOSTILE] * len(table))
    table = table.set_column(table.schema.get_field_index("category"), "category", names)
    pq.write_table(table, file)
    return Path(shutil.move(path, path.with_name(HOSTILE.replace("/", ""))))


@pytest.mark.parametrize(
    "args",
    [
        ["eval", "--prompts", "2", "--trust"],
        ["probe", "--probe", "flips"],
        ["replay", "--batch", "0", "--method", "dapo", "--trust"],
        ["audit"],
        ["report"],
        ["compare", "--no-page"],
        ["replay", "--batch", "7", "--method", "dapo"],
    ],
    ids=lambda args: args[0],
)
def test_no_command_prints_an_escape(args: list[str], run: Path, capsys):
    with pytest.raises(SystemExit):
        dispatch([args[0], str(run), *args[1:]])
    shown = "".join(capsys.readouterr())
    assert shown and "\x1b" not in shown and "\u202e" not in shown
    assert not any(line.startswith("fake line") for line in shown.splitlines())


def test_commands_print_through_one_function():
    """``say``, ``print_table`` and ``print_json`` of cli/show.py make what they print visible."""
    bare = [
        f"{file.name}:{node.lineno}"
        for file in sorted(CLI.glob("*.py"))
        if file.name not in ("show.py", "__init__.py", "view.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, "more than 20 aliases"),
        ("a: &a [*a]", "an alias stands inside what it names"),
        ("[" * 5000, "more than 20 aliases or 100 levels"),
        (b"\xff\xfe\x00", "is not YAML"),
        ("!!bool x", "is not YAML"),
        ("!!int ''", "is not YAML"),
        ("a: 2020-99-99", "is not YAML"),
        ("!!python/object/apply:os.system [touch x]", "is not YAML"),
        ("1" * 5000, "is not YAML"),
    ],
    ids=range(9),
)
def test_yaml_that_cannot_be_used_is_one_line(text, message, tmp_path: Path):
    with pytest.raises(ConfigError, match=message) as error:
        load_yaml(text, "recipe")
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
    (tmp_path / "r.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError):
        load_config(tmp_path / "r.yaml")


def test_anchors_and_merges_of_a_plain_recipe_work():
    text = "base: &base {a: 1}\nother: {<<: *base, b: 2}\n"
    assert load_yaml(text, "recipe")["other"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "num_batches: 1\nseed: 0\nnum_batches: 2\n",
            r"'num_batches' is set twice \(lines 1 and 3",
        ),
        ("eval:\n  every: 1\n  'every': 2\n", r"'every' is set twice \(lines 2 and 3"),
        ("method: {name: dapo, name: grpo}\n", r"'name' is set twice \(line 1\). Keep one"),
        ("a: [{b: 1}, {b: 1, b: 1}]\n", r"recipe: 'b' is set twice"),
    ],
)
def test_a_key_that_is_set_twice_is_an_error_with_its_lines(text, message, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        load_yaml(text, "recipe")
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is set twice"):
        load_config(tmp_path / "r.yaml")


def test_merges_may_repeat_and_be_set_anew():
    text = "a: &a {x: 1, y: 1}\nb: &b {z: 1}\nc:\n  <<: *a\n  <<: *b\n  y: 2\n1: i\n'1': s\n"
    assert load_yaml(text, "recipe")["c"] == {"x": 1, "y": 2, "z": 1}


def test_an_exponent_makes_a_number_with_or_without_a_point(tmp_path: Path):
    """As YAML 1.2 has it; a rule's 1e-1 was a text, and refused."""
    assert load_yaml("[1e-5, -2E+3, 1.0e-5, 1e5]", "recipe") == [1e-5, -2000.0, 1e-5, 1e5]
    texts = ["e5", "1e", "1e5x", "1e-5/a", "'1e5'"]
    assert load_yaml(f"[{', '.join(texts)}]", "recipe") == [text.strip("'") for text in texts]
    credit = "[{name: negative_mass, factor: 1e-1}]"
    (tmp_path / "r.yaml").write_text(f"method: {{name: dapo, credit: {credit}}}\n")
    method = load_config(tmp_path / "r.yaml").method
    assert method["credit"] == [{"name": "negative_mass", "factor": 0.1}]


def test_a_bomb_in_a_run_folder_is_left_out_with_little_memory(run: Path, tmp_path: Path):
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    (folder / "config.yaml").write_text(BOMB)
    assert "aliases" in " ".join(open_run(folder).problems)
    limit = 4 << 30  # of addresses, most of which are never touched

    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    code = f"import counterpoise as cp; print(len(str(cp.load_run({str(folder)!r}).config)))"
    result = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=bound, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr
