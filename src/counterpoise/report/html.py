"""What every page is made of: its assets, its layout, and a policy that lets it run its own scripts
alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING

from counterpoise.text import number, visible, with_interval, with_range

if TYPE_CHECKING:
    import jinja2
    import plotly.graph_objects as go
    from markupsafe import Markup


def policy(*, scripts: Sequence[str], styles: Sequence[str]) -> str:
    """A Content-Security-Policy: only these very scripts and styles run, and nothing is loaded."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(map(digest, scripts))}",
            f"style-src {' '.join(map(digest, styles))}",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def digest(text: str) -> str:
    """The source expression of an inline script or style: the hash of its text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def asset(name: str, subject: str = "report") -> str:
    """The text of an asset of the report, the viewer or the arena."""
    return (resources.files(f"counterpoise.{subject}") / "assets" / name).read_text(
        encoding="utf-8"
    )


def render_page(
    template: str,
    *,
    title: str,
    source: str,
    figures: Mapping[str, go.Figure],
    own_style: str = "",
    **content: object,
) -> str:
    """A page with charts: ``layout.html`` around a template.

    Args:
        template: an asset of the report, or ``arena/NAME`` for one of the arena.
        source: what the page is made from, for its foot.
        figures: by the name of the chart.
        own_style: rules that only this page has.
        content: what the template shows.
    """
    from plotly.offline import get_plotlyjs

    script, plotly = asset("report.js"), get_plotlyjs()
    style = asset("tokens.css") + asset("report.css") + own_style
    return (
        _templates()
        .get_template(template)
        .render(
            title=title,
            source=source,
            figures={name: figure.to_json() for name, figure in figures.items()},
            policy=policy(scripts=[plotly, script], styles=[style, ""]),
            script=script,
            style=style,
            plotly=plotly,
            style_ids=_style_ids(plotly),
            **content,
        )
    )


@lru_cache(1)
def _templates() -> jinja2.Environment:
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"visible": visible, "number": number, "data": data}
    env.filters["interval"] = lambda value, scale=None: with_interval(*value, scale=scale)
    env.filters["range"] = lambda value: with_range(*value)
    return env


def _template(path: str) -> str:
    subject, _, name = path.rpartition("/")
    return asset(name, subject or "report")


def data(text: str) -> Markup:
    """JSON for a script element: without a < no text in it can end the element."""
    from markupsafe import Markup

    return Markup(text.replace("<", "\\u003c"))


def _style_ids(plotly: str) -> list[str]:
    """Ids under which the chart library would add style sheets for maps, which the policy forbids
    and no chart needs: taken beforehand.
    """
    return re.findall(r'getElementById\("([0-9a-f]{64})"\)', plotly)
