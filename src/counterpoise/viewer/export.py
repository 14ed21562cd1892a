"""The viewer as one page that opens from disk, with the tokens of chosen batches inside."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from counterpoise.report.html import asset, policy
from counterpoise.run.files import write_text
from counterpoise.run.read import RunFolder
from counterpoise.viewer import api
from counterpoise.viewer.tokens import BatchTokens, open_batch
from counterpoise.viewer.turns import prompt_turns

# in the order of their imports
MODULES = (
    *("text", "colour", "source", "turns", "layout", "align", "pane", "inspector"),
    *("prompts", "history", "address", "theme", "viewer"),
)
IMPORT = re.compile(r'^import \{[^}]*\} from "\./\w+\.js";\n', re.MULTILINE)
EXPORT = re.compile(r"^export ", re.MULTILINE)
MAX_TOKENS = 2_000_000


def write_export(
    run: RunFolder, out: Path, batches: Sequence[int], prompts: int | None = None
) -> Path:
    """Write ``out/index.html`` with the tokens of some batches.

    Args:
        batches: which; each must have a tokens or a rollouts table.
        prompts: only the first so many prompts of each batch.
    """
    tables = [open_batch(run, batch) for batch in batches]
    embedded = {
        "run": api.run_info(run),
        "batches": {str(one.batch): _batch(one, prompts) for one in tables},
    }
    embedded["run"]["evals"] = []
    embedded["run"]["batches"] = [
        {"batch": one.batch, "has_tokens": one.source == "tokens"} for one in tables
    ]
    size = sum(
        rollout["length"]
        for batch in embedded["batches"].values()
        for group in batch["info"]["groups"]
        for rollout in group["rollouts"]
    )
    if size > MAX_TOKENS:
        raise ValueError(
            f"view --export: {size:,} tokens are too many for one page ({MAX_TOKENS:,}). Choose"
            " fewer batches, or --prompts N."
        )
    path = out / "index.html"
    write_text(path, page(embedded))
    return path


def page(embedded: dict[str, Any]) -> str:
    """The viewer's page with scripts, styles and data in it."""
    script, style = bundle(), asset("tokens.css") + asset("viewer.css", "viewer")
    rules = (
        policy(scripts=[script], styles=[style])
        + "; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    html = asset("viewer.html", "viewer")
    html = html.replace('<link rel="stylesheet" href="assets/tokens.css">\n', "")
    html = html.replace(
        '<link rel="stylesheet" href="assets/viewer.css">', f"<style>{style}</style>"
    )
    html = html.replace(
        '<meta name="viewport',
        f'<meta http-equiv="Content-Security-Policy" content="{rules}">\n<meta name="viewport',
    )
    data = json.dumps(embedded, allow_nan=False).replace("<", "\\u003c")
    scripts = (
        f'<script type="application/json" id="embedded">{data}</script>\n<script'
        f' type="module">{script}</script>'
    )
    return html.replace('<script type="module" src="assets/viewer.js"></script>', scripts)


def bundle() -> str:
    """The viewer's modules as one: their names do not clash, so imports between them can go."""
    return "\n".join(
        EXPORT.sub("", IMPORT.sub("", asset(f"{name}.js", "viewer"))) for name in MODULES
    )


def _batch(tokens: BatchTokens, prompts: int | None) -> dict[str, Any]:
    info = api.batch_info(tokens)
    info["groups"] = info["groups"][:prompts]
    names = ["text", "node_positive", "node_negative", *(c["name"] for c in info["columns"])]
    words = {
        name: tokens.column(name).words
        for name in names
        if name != "text" and tokens.column(name).words is not None
    }
    flags = [name for name in names if tokens.column(name).is_flag]
    columns = {
        str(group["group"]): {
            name: _pack(tokens, group["group"], name) for name in dict.fromkeys(names)
        }
        for group in info["groups"]
    }
    turns = {str(g["group"]): prompt_turns(tokens, g["group"]) for g in info["groups"]}
    return {"info": info, "words": words, "flags": flags, "columns": columns, "turns": turns}


def _pack(tokens: BatchTokens, group: int, name: str) -> list[str]:
    kind, content = api.pack_column(tokens, group, name)
    return [kind, base64.b64encode(gzip.compress(content, 6, mtime=0)).decode()]
