"""The figures of docs/results/claims.md from benchmarks/results: the probes' own figures
as pictures.

python benchmarks/claims_figures.py benchmarks/results/claims_bundled docs/img/claims_bundled
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from pictures import write_pngs

from counterpoise.probes import PROBES
from counterpoise.probes.output import dress

AGAIN = ("tax", "drift")  # these measure other things since schema version 3


def main(results: Path, prefix: Path) -> None:
    figures = {
        prefix.with_name(f"{prefix.name}_{name}.png"): dress(
            importlib.import_module(PROBES[name].module).figure(
                json.loads(summary.read_text())["numbers"]
            )
        )
        for name, summary in summaries(results).items()
    }
    write_pngs(figures, width=1040, height=470)


def summaries(results: Path) -> dict[str, Path]:
    """The pooled summary of each probe, or that of its last batch where none was pooled."""
    out = {}
    for name in PROBES:
        found = sorted(
            results.glob(f"probes/{name}/*/summary.json")
        )  # "pooled" comes before "step_..."
        if found and name in AGAIN and json.loads(found[0].read_text())["schema_version"] < 3:
            continue
        if found:
            out[name] = found[0] if found[0].parent.name == "pooled" else found[-1]
    return out


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
