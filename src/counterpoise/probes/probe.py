"""The list of probes and the way to run one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from counterpoise.build import nearest
from counterpoise.files import step_of
from counterpoise.probes.output import Output, pooled_tables, write_summary
from counterpoise.probes.scene import checkpoint_of, open_scene, read_config


class Probe(NamedTuple):
    """``module`` holds ``probe(scene or run folder and step, output, *, settings) -> (figure, numbers)`` and ``SUMMARY``."""

    module: str
    needs_snapshot: bool
    help: str

    @property
    def run(self) -> Callable[..., Any]:
        return importlib.import_module(self.module).probe

    @property
    def settings(self) -> dict[str, Any]:
        """Names and defaults of its settings."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


PROBES = {
    "flips": Probe("counterpoise.probes.flips", False, "E1: tokens that move against their own advantage, over training"),
    "coupling": Probe(
        "counterpoise.probes.coupling", True, "E2: which tokens push which, by the head's kernel and by masking peers"
    ),
    "counterfactual": Probe(
        "counterpoise.probes.counterfactual", True, "E3: the update with positives, negatives or the head alone"
    ),
    "value": Probe("counterpoise.probes.value", True, "E4: Monte Carlo value of boosted and suppressed tokens"),
    "exchangeability": Probe("counterpoise.probes.exchangeability", True, "what is left at shared tokens under several losses"),
    "tax": Probe("counterpoise.probes.tax", True, "KL spent at shared contexts beside the KL where rollouts part"),
    "drift": Probe("counterpoise.probes.drift", True, "how the policy moves among verified solutions"),
}


def run_probe(
    run_dir: Path, name: str, step: int | None = None, settings: dict[str, Any] | None = None, *, fresh: bool = False
) -> dict[str, Any]:
    """Run a probe, or what is left of it, and return its summary (also in ``RUN/probes/<name>/step_N/summary.json``).

    Args:
        run_dir: a run folder.
        name: one of ``PROBES``.
        step: the rollout batch; the last one that can be probed by default.
        settings: of the probe, see ``PROBES[name].settings``.
        fresh: begin again.
    """
    if name not in PROBES:
        raise ValueError(f"unknown probe {name!r}. {nearest(name, PROBES)}")
    chosen = PROBES[name]
    whole = chosen.settings | checked(name, settings or {}, chosen.settings)
    read_config(run_dir)
    step = last_step(run_dir, chosen.needs_snapshot) if step is None else step
    if chosen.needs_snapshot:
        checkpoint_of(run_dir, step)
    output = Output(run_dir, name, step, whole, fresh=fresh)
    subject = (open_scene(run_dir, step),) if chosen.needs_snapshot else (run_dir, step)
    figure, numbers = chosen.run(*subject, output, **whole)
    return output.finish(figure, numbers)


def pool(run_dir: Path, name: str) -> dict[str, Any]:
    """The numbers of a probe over all steps at which it was run; prompts of different steps are different clusters.

    Written to ``RUN/probes/<name>/pooled/``.
    """
    chosen = PROBES.get(name)
    summarise = getattr(importlib.import_module(chosen.module), "summarise", None) if chosen else None
    if summarise is None:
        raise ValueError(f"probe {name!r} has nothing to pool. {nearest(name, [n for n in PROBES if n not in ('flips', 'drift')])}")
    folders = [path.parent for path in sorted((run_dir / "probes" / name).glob("step_*/summary.json"))]
    if not folders:
        raise ValueError(f"{run_dir}: probe {name} was not run at any step yet. Run it with --step first.")
    figure, numbers = summarise(pooled_tables(folders))
    folder = run_dir / "probes" / name / "pooled"
    return write_summary(folder, figure, {"probe": name, "steps": [step_of(path) for path in folders]}, numbers)


def checked(name: str, given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Settings with known names and values of the default's type."""
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"probe {name}: unknown setting {key!r}. {nearest(key, known)}")
        if isinstance(known[key], int) and (not isinstance(value, int) or value < 0):
            raise ValueError(f"probe {name}: {key} must be a whole number from 0 on, got {value!r}.")
    return given


def last_step(run_dir: Path, needs_snapshot: bool) -> int:
    """The last step with everything that a probe reads."""
    folder, pattern = ("checkpoints", "step_*") if needs_snapshot else ("tokens", "step_*.parquet")
    steps = sorted((step_of(path) for path in (run_dir / folder).glob(pattern)), reverse=True)
    if needs_snapshot:
        steps = [k for k in steps if (run_dir / "rollouts" / f"step_{k:06d}.parquet").is_file()]
    if not steps:
        keys = "keep_every and save_rollouts_every" if needs_snapshot else "ledger.every"
        raise ValueError(f"{run_dir}: no step to probe in {folder}/. Train with {keys}.")
    return steps[0]
