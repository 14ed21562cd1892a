"""DelTA: needs, errors, logged numbers."""

from __future__ import annotations

import math
import re

import pytest
import torch

import counterpoise as cp
from counterpoise.credit.delta import Settings, delta, delta_weight
from counterpoise.stage import Stage
from helpers import reference_delta as reference
from helpers.delta_cases import KEPT, PROXIES, example, ragged


def test_needs():
    assert delta.needs == {"hidden_NTD"}
    assert delta(proxy="topk").needs == {"topk_ids_NTK", "topk_logp_NTK", "head_VD"}
    assert delta(proxy="head").needs == {"hidden_NTD", "head_VD"}
    assert delta(score="random").needs == delta(select="random").needs == frozenset()
    assert cp.method("delta").needs == {"hidden_NTD"}
    assert cp.method("delta", credit={"proxy": "head"}).needs == {"hidden_NTD", "head_VD"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"proxy": "rows"}, "proxy must be one of row, topk, head, got 'rows'. Did you mean 'row'"),
        ({"low": 1.5}, "high must be a number > 0 and >= 1.5, got 1.2"),
        ({"low": -0.1}, "low must be a number >= 0, got -0.1"),
        ({"low": 0.0, "high": 0.0}, "high must be a number > 0"),
        ({"refinements": -1}, "whole number >= 0, got -1"),
        ({"refinements": 1.5}, "whole number >= 0, got 1.5"),
        ({"score": "own"}, "score must be one of contrast, within_side, random, got 'own'"),
        ({"select": "best"}, "select must be one of top, bottom, random"),
        (
            {"select": "top", "select_frac": 0.0},
            "select_frac must be a number > 0 and <= 1, got 0.0",
        ),
        ({"gamma": 0.0}, "gamma must be a number > 0 or None, got 0.0"),
        ({"topk": 3}, "read by proxy='topk' alone"),
        ({"proxy": "topk", "topk": 0}, "topk must be a whole number >= 1 or None, got 0"),
        ({"proxy": "topk", "topk": KEPT + 1}, f"topk_ids_NTK has K={KEPT} candidates"),
        ({"temperature": 0.7}, "read by proxy='head' alone"),
        ({"proxy": "head", "temperature": 0.0}, "temperature must be a number > 0"),
        ({"hard": True, "gamma": 1.0}, "hard=True has no temperature"),
        ({"hard": True, "select": "top"}, "rank nothing"),
        ({"score": "random", "select": "top"}, "use select='random' alone"),
        ({"score": "within_side", "select": "random"}, "reads no score"),
        ({"score": "random", "refinements": 2}, "leave at the default: refinements"),
        (
            {"select": "random", "proxy": "head", "temperature": 0.5},
            "leave at the default: proxy, temperature",
        ),
        ({"select": "top", "low": 0.5}, "leave low and high"),
        ({"select": "top", "count_zero": False}, "leave count_zero at True"),
        ({"select_frac": 0.2}, "read only with select"),
        ({"normalise": False, "count_zero": False}, "no mean to count tokens for"),
    ],
)
def test_bad_parameters(params, message):
    batch, credit_NT = example()
    with pytest.raises(ValueError, match="delta: .*" + re.escape(message)):
        delta(credit_NT, batch, **params)
    if params.get("topk") != KEPT + 1:
        with pytest.raises(ValueError, match="delta: "):
            cp.method("delta", credit=[{"name": "delta", **params}])


def test_bad_columns():
    batch, credit_NT = example()
    with pytest.raises(ValueError, match="hidden_NTD has hidden size 2, head_VD has 3"):
        delta(credit_NT, batch.replace(hidden_NTD=batch.hidden_NTD[..., :2]), proxy="head")
    with pytest.raises(ValueError, match=r"topk_ids_NTK is .* and topk_logp_NTK"):
        delta(credit_NT, batch.replace(topk_ids_NTK=batch.topk_ids_NTK[..., :2]), proxy="topk")
    with pytest.raises(ValueError, match=r"token_ids_NT holds ids \d\.\.5, but head_VD has 5 rows"):
        delta(credit_NT, batch.replace(head_VD=batch.head_VD[:5]), proxy="head")
    with pytest.raises(
        ValueError, match=r"topk_ids_NTK holds ids \d\.\.77, but head_VD has 6 rows"
    ):
        delta(
            credit_NT,
            batch.replace(topk_ids_NTK=batch.topk_ids_NTK.where(batch.topk_ids_NTK > 0, 77)),
            proxy="topk",
        )
    with pytest.raises(ValueError, match="a centroid is not finite"):
        delta(credit_NT, batch.replace(hidden_NTD=torch.full_like(batch.hidden_NTD, float("nan"))))
    with pytest.raises(ValueError, match="no column 'hidden_NTD'"):
        delta(credit_NT, batch.replace(hidden_NTD=None))
    with pytest.raises(ValueError, match="delta has no parameter 'lo'"):
        delta_weight(credit_NT, batch, lo=0.5)


def test_settings_and_report_follow_the_signature():
    assert list(delta.parameters) == list(Settings._fields)
    own = Stage(delta.report).parameters
    assert own == {name: delta.parameters[name] for name in own}


@pytest.mark.parametrize("proxy", PROXIES)
def test_logged_numbers(proxy):
    """Every logged number against the twin: centroids and first temperatures from it, weights from
    ``delta_weight``.
    """
    batch, credit_NT = example()
    rule = delta(proxy=proxy, refinements=2)
    weight_NT, after_NT = (
        delta_weight(credit_NT, batch, proxy=proxy, refinements=2),
        rule(credit_NT, batch),
    )
    report = {
        key: float(value)
        for key, value in rule.report(credit_NT, after_NT, batch, proxy=proxy).items()
    }
    rows, v = ragged(credit_NT, batch), reference.vectors(batch, proxy)
    first, scales, mu = reference.margins(rows, v, refinements=0)
    alphas = {
        s: [reference.squash(x) for (i, _), x in first.items() if rows[i][0] * s > 0]
        for s in (1, -1)
    }
    expected = {
        "centroid_distance": math.sqrt(reference.distance(mu[1], mu[-1])),
        "gamma_positive": scales[0][1],
        "gamma_negative": scales[0][-1],
        "alpha_positive": sum(alphas[1]) / len(alphas[1]),
        "alpha_negative": sum(alphas[-1]) / len(alphas[-1]),
        "weight_positive": float(weight_NT[credit_NT > 0].mean()),
        "weight_negative": float(weight_NT[credit_NT < 0].mean()),
        "weight_min": float(weight_NT[credit_NT != 0].min()),
        "weight_max": float(weight_NT[credit_NT != 0].max()),
        "inflation": float(weight_NT[credit_NT != 0].mean()),
        "zero_frac": 5 / 24,
    }
    assert report == pytest.approx(expected, rel=1e-11)


def test_logged_numbers_of_a_method():
    batch, _ = example()
    batch = batch.replace(
        reward_N=torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    )
    metrics = cp.method("delta").assign(batch).metrics
    assert metrics["credit/delta/inflation"] > 1
    assert metrics["credit/delta/zero_frac"] == pytest.approx(5 / 24)
    uncounted = cp.method("delta", credit={"count_zero": False}).assign(batch).metrics
    assert uncounted["credit/delta/inflation"] == pytest.approx(1, abs=1e-14)
    random = cp.method("delta", credit={"score": "random"}).assign(batch).metrics
    assert "credit/delta/gamma_positive" not in random
    assert random["credit/delta/weight_max"] > random["credit/delta/weight_min"]


def test_logged_numbers_of_one_side_and_of_none():
    batch, credit_NT = example()
    for one_sided_NT in (credit_NT.clamp(min=0), torch.zeros_like(credit_NT)):
        report = delta.report(one_sided_NT, delta(one_sided_NT, batch), batch)
        assert "centroid_distance" not in report
        assert (report["inflation"], report["weight_min"], report["weight_max"]) == (1, 1, 1)
