"""Plotly figures as PNG files.

Needs playwright and a Chromium (``CHROMIUM`` names it; playwright's own by default).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_pngs(figures: Mapping[Path, Any], *, width: int, height: int) -> None:
    """Each figure into its file."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers, tempfile.TemporaryDirectory() as folder:
        chromium = browsers.chromium.launch(
            executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox", "--disable-gpu"]
        )
        page = chromium.new_page(
            viewport={"width": width + 16, "height": height + 16}, device_scale_factor=1.5
        )
        for target, figure in figures.items():
            html = Path(folder) / f"{target.stem}.html"
            figure.update_layout(width=width, height=height)
            figure.write_html(html, include_plotlyjs=True, config={"displayModeBar": False})
            page.goto(html.as_uri())
            page.locator(".main-svg").first.wait_for()
            page.locator(".plotly-graph-div").screenshot(path=target)
            print(target)
