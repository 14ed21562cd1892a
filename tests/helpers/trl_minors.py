"""Run ``test_minor.py`` against one release of every supported TRL minor: ``python
tests/helpers/trl_minors.py [FOLDER]``.

Each release is installed without dependencies into FOLDER (default: build/trl) and put in front of
the installed one; everything else stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# 1.15 has one release, 1.15.0, which is excluded
MINORS = ("1.9", "1.10", "1.11", "1.12", "1.13", "1.14", "1.16")


def main(folder: Path) -> int:
    failed = []
    for minor in MINORS:
        target = folder / minor
        if not target.is_dir():
            install = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--no-deps",
                "--target",
                str(target),
                f"trl=={minor}.*",
            ]
            subprocess.run(install, check=True)
        path = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
        test = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            str(Path(__file__).parents[1] / "hosts" / "trl" / "test_minor.py"),
        ]
        done = subprocess.run(test, env=os.environ | {"PYTHONPATH": path}, check=False)
        failed += [minor] if done.returncode else []
        print(f"trl {minor}: {'failed' if done.returncode else 'passed'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/trl")))
