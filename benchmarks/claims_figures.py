"""The figures of docs/claims.md from the numbers under benchmarks/results: the probes' own figures as pictures.

    python benchmarks/claims_figures.py benchmarks/results/claims_bundled docs/img/claims_bundled

Needs plotly, playwright and a Chromium (``CHROMIUM`` names it; playwright's own by default).
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

from counterpoise.probes import PROBES
from counterpoise.probes.output import dressed

SIZE = {"width": 1040, "height": 470}


def main(results: Path, prefix: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as browsers, tempfile.TemporaryDirectory() as folder:
        chromium = browsers.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": SIZE["width"] + 16, "height": SIZE["height"] + 16}, device_scale_factor=1.5)
        for name, summary in summaries(results).items():
            figure = importlib.import_module(PROBES[name].module).figure(json.loads(summary.read_text())["numbers"])
            html = Path(folder) / f"{name}.html"
            dressed(figure).update_layout(**SIZE).write_html(html, include_plotlyjs=True, config={"displayModeBar": False})
            page.goto(html.as_uri())
            page.locator(".main-svg").first.wait_for()
            target = prefix.with_name(f"{prefix.name}_{name}.png")
            page.locator(".plotly-graph-div").screenshot(path=target)
            print(target)


def summaries(results: Path) -> dict[str, Path]:
    """The pooled summary of each probe, or that of its last step where there is nothing to pool."""
    out = {}
    for name in PROBES:
        found = sorted(results.glob(f"probes/{name}/*/summary.json"))  # "pooled" comes before "step_..."
        if found:
            out[name] = found[0] if found[0].parent.name == "pooled" else found[-1]
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
