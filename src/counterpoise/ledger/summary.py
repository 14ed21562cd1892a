"""The numbers of a ledgered batch, from the token columns.

A key is left out where no token falls under it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from counterpoise.ledger.calculus.head_kernel import CONFIDENT
from counterpoise.ledger.measures.changes import correlation
from counterpoise.ledger.measures.classes import Facts
from counterpoise.maths.columns import by_sign
from counterpoise.maths.select import picker
from counterpoise.run.schema import PART_PREFIX, REST


def summary(facts: Facts, columns: dict[str, Tensor]) -> dict[str, float]:
    """Flips, boosted and suppressed shares, entropy, quality of the prediction, cancellation,
    shares of the parts.

    Args:
        facts: of the whole batch.
        columns: [N, T] on the CPU, NaN where a rollout took part in no update.
    """
    trained_NT = facts.mask_NT.cpu() & ~columns["delta"].isnan()
    pick = picker(trained_NT)
    flat = {name: pick(value_NT) for name, value_NT in columns.items()}
    sets = token_sets(facts, trained_NT)
    out = {"noise_floor": float(flat["noise_floor"].max())}
    out |= _by_sign(flat, sets)
    for name in ("both_signs", "one_sign", "common", "single"):
        out |= _mean(f"entropy/{name}", flat["entropy"], sets[name])
    return out | _prediction(flat) | _own(flat) | _cancellation(flat, sets) | _shares(flat)


def token_sets(facts: Facts, trained_NT: Tensor) -> dict[str, Tensor]:
    """Named sets of the trained tokens, flat masks: sign, sharing, confidence, category."""
    shared = facts.sharing
    sign_NT = facts.advantage_NT.sign().expand_as(facts.mask_NT)
    sets = {
        **by_sign(sign_NT),
        "both_signs": shared.is_both_NT,
        "one_sign": ~shared.is_both_NT & (sign_NT != 0),
        "common": shared.is_common_NT,
        "single": ~shared.is_common_NT,
        "confident": facts.sampler_logp_NT.exp() >= CONFIDENT,
        "unsure": facts.sampler_logp_NT.exp() < CONFIDENT,
    }
    sets |= {
        f"category/{name}": facts.category_NT == k for k, name in enumerate(facts.category_names)
    }
    pick = picker(trained_NT)
    return {name: pick(is_in_NT.cpu()) for name, is_in_NT in sets.items()}


def tax(kl_NT: Tensor | None, facts: Facts) -> dict[str, float]:
    """Learning tax of one update: mean KL(after || before) over tokens, by kind of
    context."""
    if kl_NT is None:
        return {}
    out: dict[str, float] = {}
    for name, is_in_NT in facts.sharing.contexts.items():
        out |= _mean(name, kl_NT, is_in_NT & facts.mask_NT)
    return out


def mean_of(numbers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each key over the dicts that have it.

    >>> mean_of([{"a": 1.0}, {"a": 3.0, "b": 5.0}])
    {'a': 2.0, 'b': 5.0}
    """
    keys = dict.fromkeys(key for one in numbers for key in one)
    return {
        key: sum(one[key] for one in numbers if key in one) / sum(key in one for one in numbers)
        for key in keys
    }


def _by_sign(flat: dict[str, Tensor], sets: dict[str, Tensor]) -> dict[str, float]:
    out: dict[str, float] = {}
    for side in ("positive", "negative"):
        out |= _mean(f"flip/{side}", flat["is_flip"], sets[side])
        for name, value in (("boosted", 1), ("suppressed", -1), ("unchanged", 0)):
            out |= _mean(f"{name}/{side}", (flat["change"] == value).float(), sets[side])
    return out | _mean("flip/all", flat["is_flip"], sets["positive"] | sets["negative"])


def _prediction(flat: dict[str, Tensor]) -> dict[str, float]:
    if "predicted" not in flat:
        return {}
    delta, predicted = flat["delta"].double(), flat["predicted"].double()
    out = {"predicted/correlation": correlation(predicted, delta)}
    size = float(delta.square().mean().sqrt())
    if size > 0:
        out["predicted/relative_error"] = float((predicted - delta).square().mean().sqrt()) / size
    return {name: value for name, value in out.items() if math.isfinite(value)}


def _own(flat: dict[str, Tensor]) -> dict[str, float]:
    """Over the tokens whose own part was computed: how many, |own| as a share of |own| + |others|,
    and what the head's part is of it. Medians: a single token can be most of a sum.
    """
    if "own" not in flat:
        return {}
    drawn = ~flat["own"].isnan() & (flat["own"] != 0)
    own, out = flat["own"][drawn].double().abs(), {"own/num": float(drawn.sum())}
    if len(own) and "others" in flat:
        share = own / (own + flat["others"][drawn].double().abs())
        out["own/frac"] = float(share.quantile(0.5))
    if len(own) and "own_head" in flat:
        out["own/head_frac"] = float((flat["own_head"][drawn].double().abs() / own).quantile(0.5))
    return out


def _cancellation(flat: dict[str, Tensor], sets: dict[str, Tensor]) -> dict[str, float]:
    if "cancellation" not in flat:
        return {}
    names = [name for name in sets if name not in ("common", "single")]
    out = _mean(
        "cancellation/all",
        flat["cancellation"],
        torch.ones_like(flat["cancellation"], dtype=torch.bool),
    )
    for name in names:
        out |= _mean(f"cancellation/{name}", flat["cancellation"], sets[name])
    return out


def _shares(flat: dict[str, Tensor]) -> dict[str, float]:
    """Each class's share of sum |part| over tokens and the classes of its axis, the rest aside; and
    the rest's share of everything.
    """
    mass = {
        name.removeprefix(PART_PREFIX): float(value.abs().sum())
        for name, value in flat.items()
        if name.startswith(PART_PREFIX)
    }
    out: dict[str, float] = {}
    for axis in dict.fromkeys(name.partition("_")[0] for name in mass):
        of_axis = {
            name.partition("_")[2]: value
            for name, value in mass.items()
            if name.partition("_")[0] == axis
        }
        rest = of_axis.pop(REST)
        total = sum(of_axis.values())
        out |= (
            {f"part/{axis}/{name}": value / total for name, value in of_axis.items()}
            if total > 0
            else {}
        )
        out |= {f"part/{axis}/{REST}": rest / (total + rest)} if total + rest > 0 else {}
    return out


def _mean(key: str, value: Tensor, is_in: Tensor) -> dict[str, float]:
    return {key: float(value[is_in].double().mean())} if bool(is_in.any()) else {}
