"""The tables of docs/results/credit.md from kept summaries of the probes localisation, token_value
and gradient: every rule with three measures at one batch, fewer numbers over several, or over
several models.

    python benchmarks/credit_table.py benchmarks/results/credit_bundled --batch 20
    python benchmarks/credit_table.py benchmarks/results/credit_bundled --batch 0 20 40
    python benchmarks/credit_table.py benchmarks/results --models bundled=20 smollm2=40 qwen=30
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

PROBES = ("localisation", "token_value", "gradient")
HEAD = (
    "rule",
    "share on the first error",
    "AUROC",
    "cosine with the token's value",
    "within a rollout",
    "cosine with the true gradient, minus control",
    "AdamW step, minus control",
    "worth, rollouts",
)
# what the pages call rules of our own
OWN = {
    "dapo, credit soften_negatives": "soften",
    "dapo, credit surprise_negatives": "surprise",
    "dapo, credit value_baseline": "value",
    "dapo, credit value_baseline + soften_negatives": "value_soften",
    "dapo, credit value_baseline + surprise_negatives": "value_surprise",
    "dapo, credit value_baseline + negative_token_filter": "value_ntf",
    "dapo, credit value_baseline + negative_mass(factor=0.0)": "value_positive",
    "dapo, credit negative_mass": "less_negative",
    "dapo, credit even_mass(rule=soften_negatives)": "soften_even",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--batch", type=int, nargs="+")
    which.add_argument("--models", nargs="+", help="NAME=BATCH, from credit_NAME in the folder")
    args = parser.parse_args()
    if args.models:
        over_models(args.folder, dict(model.split("=") for model in args.models))
    else:
        (one_batch if len(args.batch) == 1 else over_batches)(args.folder, args.batch)


def one_batch(folder: Path, batches: list[int]) -> None:
    """All measures at one batch."""
    first, value, gradient = (numbers(folder, name, batches[0]) for name in PROBES)
    lines: dict[tuple[str, ...], list[str]] = {}
    for rule in [*value["rules"], *(f"({name})" for name in value["references"])]:
        cells = row(rule, first, value, gradient)
        lines.setdefault(cells, []).append(rule)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for cells, rules in sorted(lines.items(), key=by_share):
        print(f"| {', '.join(rules)} | {' | '.join(cells)} |")


def over_batches(folder: Path, batches: list[int]) -> None:
    """Share on the first error, difference to the control and bias, batch by batch."""
    first = [numbers(folder, "localisation", batch)["rules"] for batch in batches]
    gradient = [numbers(folder, "gradient", batch)["gradient"] for batch in batches]
    lines: dict[tuple[str, ...], list[str]] = {}
    for rule in gradient[0]:
        shares = (text(at.get(rule, {}).get("share")) for at in first)
        differences = (judged(at[rule]) for at in gradient)
        biases = (text(at[rule].get("cosine_of_mean"), 2) for at in gradient)
        lines.setdefault((*shares, *differences, *biases), []).append(rule)
    kinds = ("share", "minus control", "of the mean")
    head = ["rule", *(f"{kind}, batch {batch}" for kind in kinds for batch in batches)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for cells, rules in lines.items():
        print(f"| {', '.join(rules)} | {' | '.join(cells)} |")


def over_models(folder: Path, batches: dict[str, str]) -> None:
    """Share on the first error, cosine with the token's value within a rollout, and the gradient's
    difference to the control, model by model.
    """
    audits = [
        [numbers(folder / f"credit_{model}", probe, int(batch)) for probe in PROBES]
        for model, batch in batches.items()
    ]
    value = audits[0][1]
    lines: dict[tuple[str, ...], list[str]] = {}
    for rule in [*value["rules"], *(f"({name})" for name in value["references"])]:
        rows = [row(rule, *audit) for audit in audits]
        cells = [cell for share, _, _, within, plain, *_ in rows for cell in (share, within, plain)]
        lines.setdefault(tuple(cells), []).append(rule)
    kinds = ("share", "value, within", "gradient, minus control")
    head = ["rule", *(f"{model}: {kind}" for model in batches for kind in kinds)]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for cells, rules in sorted(lines.items(), key=by_share):
        print(f"| {', '.join(rules)} | {' | '.join(cells)} |")


def numbers(folder: Path, name: str, batch: int) -> dict[str, Any]:
    """What a probe found at a batch, rules of our own by the names of the pages."""
    file = folder / "probes" / name / f"batch_{batch:06d}" / "summary.json"
    read = json.loads(file.read_text())["numbers"]
    for part in ("rules", "gradient", "adamw"):
        if part in read:
            read[part] = {OWN.get(rule, rule): row for rule, row in read[part].items()}
    return read


def row(
    rule: str, first: dict[str, Any], value: dict[str, Any], gradient: dict[str, Any]
) -> tuple[str, ...]:
    """The cells of one rule; a signal in brackets has no update of its own."""
    kind, name = ("references", rule[1:-1]) if rule.startswith("(") else ("rules", rule)
    plain, step = (gradient.get(metric, {}).get(rule, {}) for metric in ("gradient", "adamw"))
    return (
        text(first[kind].get(name, {}).get("share")),
        text(first[kind].get(name, {}).get("auroc"), 2),
        text(value[kind][name]["cosine"]),
        text(value[kind][name]["cosine_within"]),
        judged(plain),
        judged(step),
        text(plain.get("worth"), 0),
    )


def judged(of: dict[str, Any]) -> str:
    """The difference to the control; bold where its simultaneous interval leaves 0 out."""
    if of.get("verdict") in ("control", "inactive here"):
        return of["verdict"]
    shown = text(of.get("difference"))
    return f"**{shown}**" if of.get("verdict") in ("nearer", "farther") else shown


def text(number: dict[str, float | None] | None, digits: int = 3) -> str:
    """``.054 [.049, .061]``, a dash where it is not defined."""
    if not number or number["mean"] is None:
        return "-"
    low, high = number["low"], number["high"]
    shown = [
        f"{x:.{digits}f}".replace("0.", ".", 1)
        for x in (number["mean"], low, high)
        if x is not None
    ]
    return shown[0] if len(shown) < 3 or low == high else f"{shown[0]} [{shown[1]}, {shown[2]}]"


def by_share(line: tuple[tuple[str, ...], list[str]]) -> tuple[bool, float]:
    """Rules before signals, the largest share first."""
    (share, *_), rules = line
    return rules[0].startswith("("), -float(share.split()[0]) if share != "-" else 1.0


if __name__ == "__main__":
    main()
