"""Caches: code that others could have put there is not loaded; another file is another key."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoise.policy.load import gguf_folder
from counterpoise.run.environment import why_not_private

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
BUILD = "from counterpoise.sampling.kernels import cpu; print(cpu.library() is not None)"
PLANTED = '#include <fcntl.h>\n__attribute__((constructor)) void f(void) {{ creat("{}", 0600); }}\n'


def build(cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BUILD],
        env={**os.environ, "COUNTERPOISE_CACHE": str(cache)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def plant(cache: Path, mark: Path) -> Path:
    """Replace the kernels in a cache by a library that leaves a mark when it is loaded."""
    (library,) = (cache / "kernels").glob("*.so")
    source = mark.with_name("planted.c")
    source.write_text(PLANTED.format(mark))
    library.unlink()
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    return library


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.parametrize("how", ["owner", "folder", "root", "file"])
def test_kernels_that_others_could_have_written_are_not_loaded(how: str, tmp_path: Path):
    cache, mark = tmp_path / "cache", tmp_path / "mark"
    assert build(cache).stdout == "True\n"
    library = plant(cache, mark)
    if how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root may give a file away")
        os.chown(library, 12345, 12345)
    else:
        path = {"folder": library.parent, "root": cache, "file": library}[how]
        path.chmod(path.stat().st_mode | 0o002)
    result = build(cache)
    assert result.stdout == "True\n" and "not loaded but built anew" in result.stderr
    assert not mark.exists()


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
