"""The list that ``counterpoise methods`` prints, in a file that loads nothing slow."""

from __future__ import annotations

import importlib.metadata
import textwrap

WIDTH = 80
NO_BREAK = "\N{NO-BREAK SPACE}"  # a reference stays on one line


def summaries() -> dict[str, tuple[str, str]]:
    """Name -> (summary, reference); loads torch only where plug-ins add methods of their own."""
    from counterpoise.catalogue.presets import PRESETS

    if not importlib.metadata.entry_points(group="counterpoise.methods"):
        return {name: (summary, reference) for name, (summary, reference, _) in PRESETS.items()}
    import counterpoise as cp

    return {name: (info["summary"], info["reference"]) for name, info in cp.methods().items()}


def method_list(known: dict[str, tuple[str, str]]) -> str:
    """Name, summary and reference of every method, at most 80 columns wide.

    >>> print(method_list({"grpo": ("Group z-score.", "arXiv 2402.03300")}).splitlines()[0])
    grpo  Group z-score. (arXiv 2402.03300)
    """
    indent = " " * (2 + max(map(len, known)))
    lines = [
        textwrap.fill(
            f"{summary} ({reference.replace(' ', NO_BREAK)})" if reference else summary,
            WIDTH,
            initial_indent=name.ljust(len(indent)),
            subsequent_indent=indent,
            break_on_hyphens=False,
        ).replace(NO_BREAK, " ")
        for name, (summary, reference) in known.items()
    ]
    return "\n".join([*lines, "", "counterpoise methods NAME shows one on its six axes."])
