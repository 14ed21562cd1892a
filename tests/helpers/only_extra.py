"""Run Python code as if only the core and one extra of the package were installed.

``python only_extra.py EXTRA CODE``: every other third-party package is hidden.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


class Hide:
    """The usual path finder, blind to some packages and to their metadata."""

    def __init__(self, modules: set[str], allowed: set[str]) -> None:
        self.modules, self.allowed = modules, allowed

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.modules:
            return None
        return PathFinder.find_spec(fullname, path, target)

    def find_distributions(self, context):
        found = PathFinder.find_distributions(context)
        return (one for one in found if normal(one.metadata["Name"]) in self.allowed)

    def invalidate_caches(self) -> None:
        PathFinder.invalidate_caches()


def distributions(extra: str) -> set[str]:
    """Normalised names of everything that ``pip install counterpoise[extra]`` installs."""
    import tomllib

    project = tomllib.loads(PYPROJECT.read_text())["project"]
    ours = {"": project["dependencies"], **project["optional-dependencies"]}
    waiting, reached = [("counterpoise", ""), ("counterpoise", extra)], set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in reached:
            continue
        reached.add((name, wanted))
        texts = ours[wanted] if name == "counterpoise" else installed_requirements(name, wanted)
        waiting += [one for text in texts for one in parse(text)]
    return {name for name, _ in reached}


def installed_requirements(name: str, extra: str) -> list[str]:
    """Requirements of an installed package that hold on this machine."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in metadata.requires(name) or []]
    except metadata.PackageNotFoundError:
        return []
    return [
        f"{one.name}[{','.join(one.extras)}]"
        for one in requirements
        if one.marker is None or one.marker.evaluate({"extra": extra})
    ]


def parse(text: str) -> list[tuple[str, str]]:
    """``"a[b,c]>=1"`` -> ``[("a", ""), ("a", "b"), ("a", "c")]``"""
    from packaging.requirements import Requirement

    one = Requirement(text)
    return [(normal(one.name), extra) for extra in ("", *one.extras)]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hide_all_but(extra: str) -> None:
    """From now on only the standard library, the core and what the extra brings can be imported."""
    allowed = distributions(extra)
    hidden = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not allowed & {normal(owner) for owner in owners}
    }
    for module in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[module]
    sys.meta_path[:] = [
        Hide(hidden, allowed) if finder is PathFinder else finder for finder in sys.meta_path
    ]


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which holds helpers that are named like packages
    hide_all_but(sys.argv[1])
    exec(sys.argv[2], {"__name__": "__main__"})
