"""A griffe extension: examples in docstrings (``>>>``) become code blocks of the Python page."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

# a prompt and what follows it up to the next empty line
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?! *$).+)*", re.MULTILINE)


class FenceDoctests(Extension):
    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(_fence, obj.docstring.value)


def _fence(match: re.Match[str]) -> str:
    indent = match[1]
    return f"{indent}```pycon\n{match[0]}\n{indent}```"
