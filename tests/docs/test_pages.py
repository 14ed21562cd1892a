"""What the README, the start and the guides print runs: Python blocks with their output, shell
blocks on a tiny setting. Links, pictures and the site's list of pages hold.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import counterpoise.credit

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# a run that shows nothing but that the commands work
TINY = (
    "num_batches=2 rollouts.prompts=4 rollouts.group_size=4 rollouts.max_new_tokens=24 eval.every=2"
    " eval.prompts=8 ledger.every=1 ledger.bank=0 checkpoint_every=1 keep_every=1 trackers=[]"
)


@pytest.fixture(autouse=True)
def own_tables():
    """What a page registers is gone after its test."""
    from counterpoise.catalogue.method import FAMILIES

    before = {axis: dict(stages) for axis, stages in FAMILIES.items()}
    yield
    for axis, stages in FAMILIES.items():
        for name in stages.keys() - before[axis].keys():
            del stages[name]


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


def run_python(code: str, names: dict) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "page", "exec"), names)
    return printed.getvalue()


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/guides/own_rule.md"])
def test_python_blocks_print_what_the_page_says(name):
    """A ``text`` block after a Python block is its output."""
    names: dict = {}
    found = [b for b in blocks(ROOT / name) if "hosts.trl" not in b[1] and "my_package" not in b[1]]
    for (kind, code), (next_kind, output) in zip(found, [*found[1:], ("", "")]):
        if kind == "python":
            printed = run_python(code, names)
            if next_kind == "text":
                assert printed.split() == output.split()


def test_the_guide_to_your_own_task(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind, code in blocks(DOCS / "guides" / "own_task.md"):
        if kind == "python" and code.startswith("# my_"):
            name = code.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(code)
        elif kind == "python":
            importlib.invalidate_caches()
            printed = run_python(code, {})
            assert [line.split()[-2:] for line in printed.splitlines()] == [["1.0", "0.0"]] * 3
    from counterpoise import Prompt
    from counterpoise.tasks import answer_start, first_error, task

    prompt = next(iter(task("arithmetic").prompts("train", 0)))
    graded = task("arithmetic", reward="my_rewards:short_and_right")
    assert graded.reward(prompt, f"It is {prompt.answer}.") == pytest.approx(0.97)
    traced = task("my_traced_task:Traced")
    answer = Prompt("", "Write abcd backwards.", "dcba")
    assert [first_error(traced, answer, text) for text in ("dcab", "dc", "dcba")] == [2, 2, None]
    answering = task("my_answering_task:Answering")
    assert [answer_start(answering, answer, text) for text in ("It is dcab", " ")] == [6, None]


def test_the_guide_to_environments(tmp_path, monkeypatch):
    page = blocks(DOCS / "guides" / "environments.md")
    monkeypatch.syspath_prepend(tmp_path)
    for (kind, code), (next_kind, output) in zip(page, [*page[1:], ("", "")]):
        if kind == "python" and code.startswith("# my_"):
            (tmp_path / code.split()[1]).write_text(code)
        elif kind == "python":
            assert next_kind == "text" and run_python(code, {}).split() == output.split()


def run_command(line: str, monkeypatch) -> None:
    """One ``counterpoise ...`` line of a page, on the tiny setting."""
    from counterpoise.cli import main

    words = shlex.split(line, comments=True)
    words = [w for word in words for w in (sorted(glob.glob(word)) if "*" in word else [word])]
    words = [
        re.sub(r"^\d+$", "1", w) if before == "--batch" else w
        for before, w in zip(["", *words], words)
    ]
    if words[1] == "sweep":  # one method and one seed show that it works
        del words[words.index("--methods") + 2 : words.index("--seeds")]
        del words[words.index("--seeds") + 2 : words.index("--jobs")]
    if words[1] in ("train", "sweep"):
        words += [word for pair in TINY.split() for word in ("--set", pair)]
    if words[1] == "eval":
        words += ["--prompts", "8"]
    if words[1] == "view" and "--export" not in words:
        words += ["--export", "pages"]
    monkeypatch.setattr(sys, "argv", words)
    code: object = 0
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            code = end.code
    assert not code, line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with the repository's recipes and a tiny run in runs/demo."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    run_command("counterpoise train recipes/demo.yaml", monkeypatch)
    assert (tmp_path / "runs" / "demo" / "metrics.jsonl").is_file()
    return tmp_path


def test_probes_on_batches_of_ones_own():
    """The blocks of the guide that need no model run; the error gets most of NTF's credit there."""
    code = [code for kind, code in blocks(DOCS / "guides" / "probes.md") if kind == "python"]
    first, second = (
        run_python(next(c for c in code if f"import {name}" in c), {})
        for name in ("localise", "compare_values")
    )
    share = {line.split()[0]: float(line.split()[1]) for line in first.splitlines()}
    assert share["dapo"] == 0.25 < share["crf_ntf"]
    assert 0.5 < float(second) < 0.9


@pytest.mark.parametrize("name", ["start.md", "guides/choose.md"])
def test_shell_blocks_run(name, folder, monkeypatch):
    lines = [
        line for kind, code in blocks(DOCS / name) if kind == "bash" for line in code.splitlines()
    ]
    ours = [line for line in lines if line.startswith("counterpoise ")]
    assert len(ours) >= 4
    for line in ours:
        run_command(line, monkeypatch)
    code = "".join(code for kind, code in blocks(DOCS / name) if kind == "python")
    run_python(re.sub(r"batch=\d+", "batch=1", code), {})


def test_commands_of_every_page_exist():
    """Each ``counterpoise COMMAND --option`` in a shell block is one that the command line has."""
    reference = (DOCS / "reference" / "cli.md").read_text()
    options = {part.split("\n")[0]: part for part in reference.split("\n## ")[1:]}
    for page in [ROOT / "README.md", *PAGES]:
        for kind, code in blocks(page):
            for line in code.splitlines() if kind == "bash" else []:
                words = line.split("#")[0].split()
                if words[:1] == ["counterpoise"]:
                    assert words[1] in options, f"{page.name}: {line}"
                    for word in re.findall(r"(?<= )--[a-z-]+", line.split("#")[0]):
                        assert f"{word}`" in options[words[1]] or f"{word}," in options[words[1]], (
                            f"{page.name}: {line}"
                        )


def test_links_and_pictures():
    """Zensical checks links between pages; here: pictures, and links of the README."""
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]:
        text = BLOCK.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    "name", ["clip_cov", "gtpo", "ar", "rloo", "ntf_whitened", "crf_ntf", "tpo", "dapo"]
)
def test_presets_that_depart_from_their_authors_code_say_so(name):
    index = (DOCS / "methods" / "index.md").read_text()
    (page,) = re.findall(rf"\[`{name}`\]\((\w+\.md)\)", index)
    text = (DOCS / "methods" / page).read_text()
    section = text.partition("## Differs from the authors' code\n")[2].partition("\n## ")[0]
    assert f"`{name}`" in section or f'cp.method("{name}")' in text
    assert section.strip()


@pytest.mark.parametrize(
    "page", sorted((DOCS / "methods").glob("*.md")), ids=lambda page: page.stem
)
def test_a_method_page_names_every_parameter_of_its_rule(page):
    text = page.read_text()
    names = re.findall(
        r"`counterpoise\.credit\.(\w+)`", text.partition("**Code.**")[2].split("\n")[0]
    )
    for rule in filter(None, (getattr(counterpoise.credit, name, None) for name in names[:1])):
        missing = [name for name in rule.parameters if f"`{name}`" not in text]
        assert not missing, rule


def test_the_site_lists_every_page():
    listed = re.findall(r'= "([\w/]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_generated_pages_are_current():
    words = [sys.executable, str(ROOT / "scripts" / "make_reference.py"), "--check"]
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]


def test_every_public_name_is_in_the_reference():
    import counterpoise as cp

    text = (DOCS / "reference" / "python.md").read_text()
    assert [name for name in cp.__all__ if f"counterpoise.{name}" not in text] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_a_number_of_methods_is_the_true_one(page):
    """Results say how many took part; nobody else should count what grows."""
    if page.parent.name == "results":
        return
    from counterpoise.catalogue.presets import PRESETS

    text = BLOCK.sub("", page.read_text())
    numbers = re.findall(r"\b(\d+) (?:published )?(?:methods|presets)\b", text)
    assert {int(number) for number in numbers} <= {len(PRESETS)}


def test_the_readme_is_short():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.stem)
def test_one_sentence_per_line(page):
    """A line of prose ends where a sentence does, or before a list or block."""
    text = BLOCK.sub("", page.read_text())
    prose = r"(?!\||#|!\[|<|\s*[-*] |\s*\d+\. |    |:::)\S.*"
    for before, after in re.findall(rf"^({prose})\n(?=({prose})$)", text, re.MULTILINE):
        assert re.search(r"[.!?:][)\"'`*]*$", before), f"{page.name}: {before!r}, {after!r}"
