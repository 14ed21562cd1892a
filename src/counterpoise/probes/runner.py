"""The list of probes and the way to run one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from counterpoise.errors import check_text, nearest
from counterpoise.probes.output import Output, Report, pooled_tables, write_summary
from counterpoise.probes.scene import Scene, checkpoint_of, open_scene, read_config
from counterpoise.probes.sheet import Sheet
from counterpoise.run.files import batch_of, inside
from counterpoise.run.read import batch_files, checkpoints


class Probe(NamedTuple):
    """``module`` holds ``probe(scene or run folder and batch, output, *, settings)``, which writes
    tables, ``summarise(tables) -> numbers`` and ``figure(numbers)``; ``sheet(numbers)`` where the
    terminal shows a table.
    """

    module: str
    needs_snapshot: bool
    help: str

    @property
    def can_pool(self) -> bool:
        """Probes that follow the run over its batches have nothing to add up."""
        return self.module.rpartition(".")[2] not in ("flips", "drift", "gradient", "progress")

    @property
    def run(self) -> Callable[..., Any]:
        return importlib.import_module(self.module).probe

    def summary(
        self, folder: Path, facts: dict[str, Any], tables: dict[str, Any]
    ) -> dict[str, Any]:
        """Numbers and figure from the tables of one batch or of several."""
        module = importlib.import_module(self.module)
        numbers = module.summarise(tables)
        return write_summary(
            folder, facts | num_prompts(tables), numbers, lambda: module.figure(numbers)
        )

    def sheet(self, numbers: dict[str, Any]) -> Sheet | None:
        """What the terminal shows as a table, for probes that compare rules."""
        make = getattr(importlib.import_module(self.module), "sheet", None)
        return make(numbers) if make else None

    @property
    def settings(self) -> dict[str, Any]:
        """Names and defaults of its settings."""
        parameters = inspect.signature(self.run).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


PROBES = {
    "flips": Probe(
        "counterpoise.probes.flips",
        False,
        "E1: tokens that move against their own advantage, over training",
    ),
    "coupling": Probe(
        "counterpoise.probes.coupling",
        True,
        "E2: which tokens push which, by the head's kernel and by masking peers",
    ),
    "counterfactual": Probe(
        "counterpoise.probes.counterfactual",
        True,
        "E3: the update with positives, negatives or the head alone",
    ),
    "value": Probe(
        "counterpoise.probes.value", True, "E4: Monte Carlo value of boosted and suppressed tokens"
    ),
    "exchangeability": Probe(
        "counterpoise.probes.exchangeability",
        True,
        "what is left at shared tokens under several losses",
    ),
    "tax": Probe(
        "counterpoise.probes.tax",
        True,
        "KL spent at shared contexts beside the KL where rollouts part",
    ),
    "progress": Probe(
        "counterpoise.probes.progress",
        True,
        "what the updates of a batch gain and waste, per method and plan",
    ),
    "drift": Probe(
        "counterpoise.probes.drift", True, "how the policy moves among verified solutions"
    ),
    "localisation": Probe(
        "counterpoise.probes.localisation",
        True,
        "whether credit falls on the first wrong token of a failed rollout, per method",
    ),
    "gradient": Probe(
        "counterpoise.probes.gradient",
        True,
        "how near one update comes to the true policy gradient, per method, and its worth in"
        " rollouts",
    ),
    "token_value": Probe(
        "counterpoise.probes.token_value",
        True,
        "credit against the Monte Carlo advantage of drawn tokens, per method",
    ),
    "turns": Probe(
        "counterpoise.probes.turns",
        True,
        "credit of turns against their exact advantage in a built-in game, per method",
    ),
}


def run_probe(
    run_dir: Path,
    name: str,
    batch_number: int | None = None,
    settings: dict[str, Any] | None = None,
    *,
    fresh: bool = False,
    scene: Scene | None = None,
    trust: bool = False,
    report: Report | None = None,
) -> dict[str, Any]:
    """Run a probe, or what is left of it, and return its summary (also in
    ``RUN/probes/<name>/update_N/summary.json``).

    Args:
        run_dir: a run folder.
        name: one of ``PROBES``.
        batch: the batch; the last one that can be probed by default.
        settings: of the probe, see ``PROBES[name].settings``.
        fresh: begin again.
        scene: the batch, if it is open already: for several probes of one batch.
        trust: import the code that the folder's recipe names, as in ``open_scene``.
        report: called with (of what, how many are finished, of how many) while a long probe works.
    """
    output = make_tables(
        run_dir, name, batch_number, settings, fresh=fresh, scene=scene, trust=trust, report=report
    )
    return PROBES[name].summary(output.folder, output.facts, output.tables())


def make_tables(
    run_dir: Path,
    name: str,
    batch_number: int | None = None,
    settings: dict[str, Any] | None = None,
    *,
    fresh: bool = False,
    scene: Scene | None = None,
    trust: bool = False,
    report: Report | None = None,
) -> Output:
    """The raw data of a probe alone, without numbers and figure."""
    chosen = probe_of(name)
    whole = chosen.settings | check_settings(name, settings or {}, chosen.settings)
    read_config(run_dir)
    batch_number = (
        last_batch(run_dir, chosen.needs_snapshot) if batch_number is None else batch_number
    )
    if chosen.needs_snapshot:
        checkpoint_of(run_dir, batch_number)
    subject = (
        (scene or open_scene(run_dir, batch_number, trust=trust),)
        if chosen.needs_snapshot
        else (run_dir, batch_number)
    )
    output = Output(
        run_dir, name, batch_number, whole, fresh=fresh, report=report
    )  # last: --fresh drops what is there
    chosen.run(*subject, output, **whole)
    return output


def pool(run_dir: Path, name: str) -> dict[str, Any]:
    """The numbers of a probe over all batches at which it was run; prompts of different batches are
    different clusters.

    Written to ``RUN/probes/<name>/pooled/``.
    """
    chosen = probe_of(name)
    if not chosen.can_pool:
        raise ValueError(
            f"probe {name!r} covers the run up to its batch already. Run it at the last batch"
            " instead of pooling."
        )
    folders = [
        path.parent for path in sorted((run_dir / "probes" / name).glob("batch_*/summary.json"))
    ]
    if not folders:
        raise ValueError(
            f"{run_dir}: probe {name} was not run at any batch yet. Run it with --batch first."
        )
    folder = inside(run_dir, "probes", name, "pooled")
    return chosen.summary(
        folder,
        {"probe": name, "batches": [batch_of(path) for path in folders]},
        pooled_tables(folders),
    )


def num_prompts(tables: dict[str, Any]) -> dict[str, int]:
    """On how many prompts the intervals rest at most; nothing where no table tells prompts apart
    (negative numbers are no prompts).
    """
    counts = [
        table["group"][table["group"] >= 0].nunique()
        for table in tables.values()
        if "group" in table
    ]
    return {"num_prompts": int(max(counts))} if counts else {}


def probe_of(name: str) -> Probe:
    """A probe by name; an unknown one is an error that names the nearest."""
    if name not in PROBES:
        raise ValueError(f"unknown probe {name!r}. {nearest(name, PROBES)}")
    return PROBES[name]


def check_settings(name: str, given: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Settings with known names and values of the default's type."""
    for key, value in given.items():
        if key not in known:
            raise ValueError(f"probe {name}: unknown setting {key!r}. {nearest(key, known)}")
        if isinstance(known[key], str):
            check_text(f"probe {name}", **{key: value})
        else:
            check_number(f"probe {name}: {key}", value, known[key], 0 if key == "seed" else 1)
    return given


def check_number(where: str, value: Any, default: bool | float, least: int) -> None:
    """An error unless the value is of its default's kind, a whole number from ``least`` on.

    >>> check_number("probe progress: lr", 3e-5, 0.0, 1)
    """
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    if isinstance(default, bool):
        is_fine, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        is_fine = is_number and isinstance(value, int) and value >= least
        expected = f"a whole number from {least} on"
    else:
        is_fine, expected = is_number and value > 0, "a number above 0"
    if not is_fine:
        raise ValueError(f"{where} must be {expected}, got {value!r}.")


def last_batch(run_dir: Path, needs_snapshot: bool) -> int:
    """The last batch with everything that a probe reads."""
    folder, keys = (
        ("checkpoints", "keep_every and save_rollouts_every")
        if needs_snapshot
        else ("tokens", "ledger.every")
    )
    batches = set(batch_files(run_dir, "rollouts" if needs_snapshot else "tokens"))
    if needs_snapshot:
        batches &= {batch_of(path) for path in checkpoints(run_dir)}
    if not batches:
        raise ValueError(f"{run_dir}: no batch to probe in {folder}/. Train with {keys}.")
    return max(batches)
