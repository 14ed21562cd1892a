"""Caches: code that others could have put there is not loaded; another file is another key."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from counterpoise.policy.load import gguf_folder
from counterpoise.run.environment import why_not_private
from counterpoise.sampling.kernels import cpu
from helpers.quick_compiler import COMPILER, path_with_quick_compiler

PLANTED = '#include <fcntl.h>\n__attribute__((constructor)) void f(void) {{ creat("{}", 0600); }}\n'


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], bool]]:
    """Whether kernels can be had with a cache; what was built and loaded is forgotten each time."""

    def has_kernels(cache: Path) -> bool:
        monkeypatch.setenv("COUNTERPOISE_CACHE", str(cache))
        cpu.library.cache_clear()
        return cpu.library() is not None

    yield has_kernels
    cpu.library.cache_clear()


def plant(cache: Path, mark: Path) -> Path:
    """Replace the kernels in a cache by a library that leaves a mark when it is loaded."""
    (library,) = (cache / "kernels").glob("*.so")
    source = mark.with_name("planted.c")
    source.write_text(PLANTED.format(mark))
    library.unlink()
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


def open_up(how: str, cache: Path, library: Path) -> None:
    """Let others write the library, or what leads to it."""
    if how == "owner":
        os.chown(library, 12345, 12345)
        return
    path = {"folder": library.parent, "root": cache, "file": library}[how]
    path.chmod(path.stat().st_mode | 0o002)


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_kernels_that_others_could_have_written_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Callable[[Path], bool], caplog
):
    monkeypatch.setenv("PATH", path_with_quick_compiler(tmp_path / "bin"))
    ways = ["folder", "root", "file", *["owner"] * (os.geteuid() == 0)]  # root may give files away
    caches = [tmp_path / how for how in ways]
    assert build(caches[0]) and not caplog.records
    for cache in caches[1:]:
        shutil.copytree(caches[0], cache)
    for how, cache in zip(ways, caches):
        open_up(how, cache, plant(cache, cache / "mark"))
    assert [build(cache) for cache in caches] == [True] * len(ways)
    assert caplog.text.count("not loaded but built anew") == len(ways)
    assert not list(tmp_path.rglob("mark"))


def test_a_private_folder_is_private(tmp_path: Path):
    assert why_not_private(tmp_path) is None
    tmp_path.chmod(0o777)
    assert "chmod o-w" in str(why_not_private(tmp_path))


def test_a_gguf_file_is_known_by_its_content(tmp_path: Path):
    folders = []
    for content in (b"first", b"other"):
        (tmp_path / "model.gguf").write_bytes(content)
        os.utime(tmp_path / "model.gguf", (0, 0))
        folders.append(gguf_folder(tmp_path / "model.gguf"))
    assert folders[0] != folders[1]
    shutil.copy(tmp_path / "model.gguf", tmp_path / "copy.gguf")
    assert gguf_folder(tmp_path / "copy.gguf").name.split("-")[1] == folders[1].name.split("-")[1]
