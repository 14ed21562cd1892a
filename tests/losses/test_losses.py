"""Every loss: its twin, its coefficient, the diagonal law, padding and cuts; then what is special
to each.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoise.losses import (
    LOSSES,
    clip_cov,
    clipped,
    contrastive,
    cumulative,
    detached_ratio,
    dual_clip,
    geometric,
    kl,
    kl_cov,
    reinforce,
    sequence_ratio,
    soft_gate,
    symmetric_clip,
)
from helpers import reference_losses as twins
from helpers.loss_cases import INF, assert_close, gradient, one_token, random_rows, rows_of
from helpers.strategies import ragged_batches

# every loss with the parameters under which it is compared with its twin; the first row of each
# name is the default
VARIANTS = {
    "reinforce": [{}],
    "clipped": [
        {},
        {"clip_low": 0.1, "clip_high": 0.5},
        {"dual_clip": 3.0},
        {"clip_low": INF, "clip_high": INF},
    ],
    "dual_clip": [{}, {"dual_clip": 1.5}],
    "symmetric_clip": [{}, {"clip": 1.5}],
    "detached_ratio": [{}, {"clip_low": 0.2, "clip_high": 0.5}],
    "soft_gate": [{}, {"tau_pos": 2.0, "tau_neg": 0.5}],
    "contrastive": [{}, {"clip_low": 0.5, "clip_high": 1.0}],
    "sequence_ratio": [
        {},
        {"clip_low": 0.3, "clip_high": 0.5},
        {"clip_low": 0.2, "clip_high": 0.2, "mean": False},
    ],
    "geometric": [{}, {"clip_low": 1.0, "clip_high": 2.0}],
    "cumulative": [
        {},
        {"clip_low": 1.0, "clip_high": 1.5, "dual_clip": 2.0},
        {"clip_high": INF, "dual_clip": INF, "power": 0.0},
    ],
    "target": [{}, {"temperature": 0.5}],
    "dfpo": [
        {},
        {"transform": "orth"},
        {"transform": "none", "weight": "product"},
        {"length": "inside"},
        {"transform": "orth", "weight": "product", "length": "inside"},
    ],
    "clip_cov": [
        {"fraction": 1.0},
        {"fraction": 1.0, "low": 0.1, "high": 0.8, "clip_low": INF, "clip_high": INF},
    ],
    "kl_cov": [{}, {"fraction": 0.3, "coef": 0.5}],
    "kl": [{}, {"estimator": "k1"}, {"estimator": "k2", "coef": 1.0}],
    "implied_value": [{}, {"beta": 0.5}],
}
ALL = [(name, params) for name in LOSSES for params in VARIANTS[name]]
EVERY = pytest.mark.parametrize(
    ("name", "params"), ALL, ids=[f"{name}-{k}" for k, (name, _) in enumerate(ALL)]
)
PREPARED = [(name, params) for name, params in ALL if LOSSES[name].prepare]


def assert_twin(name, params, logp_NT, rows):
    case = twins.case_of(logp_NT, rows)
    expected, got = getattr(twins, name)(case, **params), LOSSES[name](logp_NT, rows, **params)
    for i, row in enumerate(expected):
        for k, column_NT in enumerate((got.loss_NT, got.coef_NT, got.ratio_NT)):
            assert_close(
                column_NT[i, : len(row)], [token[k] for token in row], rtol=1e-9, atol=1e-11
            )
            assert (column_NT[i, len(row) :] == (1 if k == 2 else 0)).all()
        assert got.clipped_NT[i].tolist() == [token[3] for token in row] + [False] * (
            rows.mask_NT.shape[1] - len(row)
        )


@EVERY
def test_equals_its_twin(name, params):
    for seed in range(3):
        assert_twin(name, params, *random_rows(seed))


@settings(max_examples=150)
@given(data=st.data(), batch=ragged_batches(min_group_size=2), pick=st.sampled_from(ALL))
def test_equals_its_twin_on_ragged_batches(data, batch, pick):
    values = st.sampled_from([-1.5, -0.5, 0.0, 0.25, 1.0])
    n, width = batch.mask_NT.shape
    credit = data.draw(
        st.lists(st.lists(values, min_size=width, max_size=width), min_size=n, max_size=n)
    )
    credit_NT = torch.where(batch.mask_NT, torch.tensor(credit, dtype=torch.float64), 0)
    name, params = pick
    if (
        name == "kl_cov"
    ):  # ties for the last place among the top covariances may be broken either way
        params = {**params, "fraction": 1.0}
    assert_twin(name, params, batch.trainer_logp_NT, rows_of(batch, credit_NT))


@EVERY
def test_equals_its_twin_where_a_rollout_has_drifted_far(name, params):
    logp_NT, rows = random_rows(seed=0, spread=6.0)
    total_N = ((logp_NT.detach() - rows.sampler_logp_NT) * rows.mask_NT).sum(1)
    assert total_N.max() > 20  # the product of a rollout's ratios is bounded, its tokens are not
    assert_twin(name, params, logp_NT, rows)


@EVERY
def test_diagonal_law_and_coef_is_minus_the_derivative(name, params):
    logp_NT, rows = random_rows(
        seed=1, spread=0.03
    )  # near enough that no loss has clipped every token
    jacobian = torch.autograd.functional.jacobian(
        lambda x_NT: LOSSES[name](x_NT, rows, **params).loss_NT, logp_NT
    )
    size = logp_NT.numel()
    matrix = jacobian.reshape(size, size)
    assert_close(-matrix.diagonal().view_as(logp_NT), LOSSES[name](logp_NT, rows, **params).coef_NT)
    assert (matrix - matrix.diagonal().diag() == 0).all()
    assert matrix.abs().sum() > 0


@EVERY
def test_padding_holds_anything_and_changes_nothing(name, params):
    logp_NT, rows = random_rows(seed=2)
    loss = functools.partial(LOSSES[name], **params)
    expected, expected_grad = loss(logp_NT, rows), gradient(loss, logp_NT, rows)
    wide = {
        field: torch.nn.functional.pad(getattr(rows, field), (0, 2))
        for field in ("mask_NT", "credit_NT", "scale_NT")
    }
    for field in ("sampler_logp_NT", "ref_logp_NT", "ref_kl_NT"):
        wide[field] = torch.nn.functional.pad(getattr(rows, field), (0, 2), value=-INF).masked_fill(
            ~wide["mask_NT"], math.nan
        )
    logp_wide_NT = torch.nn.functional.pad(logp_NT, (0, 2)).masked_fill(~wide["mask_NT"], -INF)
    got, got_grad = (
        loss(logp_wide_NT, rows._replace(**wide)),
        gradient(loss, logp_wide_NT, rows._replace(**wide)),
    )
    for a, b in zip([*got, got_grad], [*expected, expected_grad]):
        assert torch.equal(a[:, :-2], b)
    assert (got_grad[~wide["mask_NT"]] == 0).all()


@EVERY
def test_half_precision_log_probs_are_widened(name, params):
    logp_NT, rows = random_rows(seed=3)
    out = LOSSES[name](
        logp_NT.bfloat16(),
        rows._replace(
            credit_NT=rows.credit_NT.float(), sampler_logp_NT=rows.sampler_logp_NT.float()
        ),
        **params,
    )
    assert out.coef_NT.dtype == torch.float32
    assert out.loss_NT.dtype in (torch.float32, torch.float64)


@EVERY
def test_parameters_bind(name, params):
    logp_NT, rows = random_rows()
    stage = LOSSES[name](**params)
    assert stage.fn is LOSSES[name].fn
    assert stage.params == params
    assert torch.equal(stage(logp_NT, rows).loss_NT, LOSSES[name](logp_NT, rows, **params).loss_NT)


@pytest.mark.parametrize(("name", "params"), PREPARED)
def test_cuts_of_a_prepared_step_give_the_gradient_of_the_step(name, params):
    logp_NT, rows = random_rows(seed=4)
    loss = functools.partial(LOSSES[name], **params)
    whole = gradient(loss, logp_NT, rows)
    ready = rows._replace(update_NT=LOSSES[name].prepare(logp_NT, rows, **params))
    for cuts in ([[0, 1, 2], [3, 4, 5]], [[5, 0], [4], [2, 1, 3]], [[i] for i in range(6)]):
        for cut in map(torch.tensor, cuts):
            assert_close(gradient(loss, logp_NT[cut], ready.select(cut)), whole[cut])


@pytest.mark.parametrize(
    ("name", "params"),
    [("target", {}), ("dfpo", {}), ("dfpo", {"transform": "orth"}), ("kl_cov", {})],
)
def test_unprepared_cuts_would_give_another_gradient(name, params):
    logp_NT, rows = random_rows(seed=4)
    loss, cut = functools.partial(LOSSES[name], **params), torch.tensor([0, 1])
    assert (
        gradient(loss, logp_NT[cut], rows.select(cut)) - gradient(loss, logp_NT, rows)[cut]
    ).abs().max() > 1e-3


@EVERY
def test_order_of_the_rows_does_not_matter(name, params):
    logp_NT, rows = random_rows(seed=5)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for a, b in zip(
        LOSSES[name](logp_NT[order], rows.select(order), **params),
        LOSSES[name](logp_NT, rows, **params),
    ):
        torch.testing.assert_close(a, b[order], rtol=1e-12, atol=1e-12)


# r = 2 or 1/2 at log-prob -1 + log r; numbers worked out by hand
BY_HAND = [
    (reinforce, {}, 2.0, 3.0, -3 * (math.log(2) - 1), 3.0),
    (clipped, {}, 2.0, 1.0, -1.2, 0.0),  # above 1.2 and good: held
    (clipped, {}, 2.0, -1.0, 2.0, -2.0),  # above 1.2 and bad: pushed down with its full ratio
    (clipped, {}, 0.5, 1.0, -0.5, 0.5),
    (clipped, {}, 0.5, -1.0, 0.8, 0.0),
    (clipped, {"dual_clip": 1.5}, 2.0, -1.0, 1.5, 0.0),
    (dual_clip, {}, 11.0, -1.0, 10.0, 0.0),
    (dual_clip, {}, 9.0, -1.0, 9.0, -9.0),
    (symmetric_clip, {}, 2.0, -1.0, 1.2, 0.0),
    (symmetric_clip, {}, 1.1, -1.0, 1.1, -1.1),
    (detached_ratio, {"clip_high": 0.5}, 2.0, 1.0, -1.5 * (math.log(2) - 1), 1.5),
    (detached_ratio, {}, 6.0, -1.0, 5 * (math.log(6) - 1), -5.0),
    (soft_gate, {}, 1.0, 1.0, -2.0, 1.0),  # 4 sigmoid(0) = 2, slope 4 * 1/4 = 1
    (soft_gate, {}, 2.0, 1.0, -4 / (1 + math.exp(-1)), 8 * math.exp(-1) / (1 + math.exp(-1)) ** 2),
    (contrastive, {}, 8.0, 1.0, -8.0, 8.0),
    (contrastive, {}, 12.0, 1.0, -11.0, 0.0),
    (contrastive, {}, 0.5, -1.0, 0.8, 0.0),
    (sequence_ratio, {}, 1.0003, 1.0, -1.0003, 1.0003),
    (sequence_ratio, {}, 1.0005, 1.0, -1.0004, 0.0),
    (geometric, {}, 2.0, 1.0, -math.exp(0.4), 0.0),
    (geometric, {}, 2.0, -1.0, 2.0, -2.0),
    (cumulative, {}, 2.0, 1.0, -math.exp(0.05), 0.0),
    (cumulative, {}, 0.5, 1.0, -0.5, 0.5),
    (cumulative, {}, 2.0, -1.0, math.exp(0.05), 0.0),
    (kl_cov, {"coef": 2.0}, 2.0, 1.0, -2 + 2 * math.log(2), 2 - 2),
    (kl, {"coef": 1.0}, 2.0, 1.0, 0.5 - 1 + math.log(2), -0.5),  # ref - logp = -log 2
    (kl, {"coef": 1.0, "estimator": "k2"}, 2.0, 1.0, math.log(2) ** 2 / 2, -math.log(2)),
]


@pytest.mark.parametrize(("loss", "params", "ratio", "credit", "value", "coef"), BY_HAND)
def test_numbers_by_hand(loss, params, ratio, credit, value, coef):
    out = loss(*one_token(ratio, credit), **params)
    assert out.loss_NT.item() == pytest.approx(value, abs=1e-12)
    assert out.coef_NT.item() == pytest.approx(coef, abs=1e-12)
    if loss not in (kl, kl_cov, detached_ratio):
        assert out.clipped_NT.item() is (coef == 0)


UNCLIPPED = [
    clipped(clip_low=INF, clip_high=INF),
    dual_clip(clip_low=INF, clip_high=INF, dual_clip=INF),
    symmetric_clip(clip=INF),
    detached_ratio(clip_low=INF, clip_high=INF),
    contrastive(clip_low=INF, clip_high=INF),
    clip_cov(clip_low=INF, clip_high=INF, low=1e9, high=2e9),
    kl_cov(coef=0.0),
]


@pytest.mark.parametrize("loss", UNCLIPPED, ids=lambda loss: loss.__name__)
def test_clip_at_infinity_is_ratio_times_credit_and_reinforce_at_ratio_one(loss):
    logp_NT, rows = random_rows(seed=6, spread=2.0)
    out = loss(logp_NT, rows)
    ratio_NT = (logp_NT - rows.sampler_logp_NT).exp()
    assert_close(out.coef_NT, torch.where(rows.mask_NT, ratio_NT * rows.credit_NT, 0))
    assert not out.clipped_NT.any()
    assert torch.equal(
        gradient(loss, rows.sampler_logp_NT, rows), gradient(reinforce, rows.sampler_logp_NT, rows)
    )


@pytest.mark.parametrize(
    "name",
    ["soft_gate", "sequence_ratio", "geometric", "cumulative", "dfpo", "clipped", "dual_clip"],
)
def test_on_policy_gradient_is_that_of_reinforce(name):
    _, rows = random_rows(seed=7)
    assert_close(
        gradient(LOSSES[name], rows.sampler_logp_NT, rows),
        gradient(reinforce, rows.sampler_logp_NT, rows),
    )


def test_clip_cov_draws_from_the_band_and_by_seed_alone():
    logp_NT, rows = random_rows(seed=13, n=40, width=20)
    params = {"low": 0.1, "high": 2.0, "fraction": 0.02}
    band = twins.clip_cov_band(twins.case_of(logp_NT, rows), low=0.1, high=2.0)
    num_wanted = int(0.02 * int(rows.mask_NT.sum()))
    assert len(band) > 2 * num_wanted > 4

    def drawn(seed):
        return {
            tuple(place)
            for place in clip_cov.prepare(logp_NT, rows, seed=seed, **params).nonzero().tolist()
        }

    assert drawn(0) <= band
    assert len(drawn(0)) == num_wanted
    assert drawn(0) == drawn(0) != drawn(1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(
        clip_cov(logp_NT[order], rows.select(order), **params).coef_NT,
        clip_cov(logp_NT, rows, **params).coef_NT[order],
    )


def test_needs_and_missing_reference():
    assert kl().needs == {"ref_logp_NT"}
    assert all(not LOSSES[name]().needs for name in LOSSES if name not in ("kl", "implied_value"))
    logp_NT, rows = random_rows()
    with pytest.raises(ValueError, match="kl: the rows have no ref_logp_NT"):
        kl(logp_NT, rows._replace(ref_logp_NT=None))


BAD = [
    ("clipped", {"clip_low": -0.1}, "clipped: clip_low must be a number >= 0, got -0.1"),
    ("clipped", {"dual_clip": 1.0}, "clipped: dual_clip must be a number > 1, got 1.0"),
    ("dual_clip", {"dual_clip": 0.5}, "dual_clip: dual_clip must be a number > 1"),
    ("symmetric_clip", {"clip": "wide"}, "symmetric_clip: clip must be a number >= 0, got 'wide'"),
    (
        "detached_ratio",
        {"clip_high": math.nan},
        "detached_ratio: clip_high must be a number >= 0, got nan",
    ),
    ("soft_gate", {"tau_neg": 0}, "soft_gate: tau_neg must be a number > 0, got 0"),
    ("contrastive", {"clip_high": None}, "contrastive: clip_high must be a number >= 0, got None"),
    ("sequence_ratio", {"clip_low": -1}, "sequence_ratio: clip_low"),
    ("geometric", {"clip_high": -1}, "geometric: clip_high"),
    ("cumulative", {"dual_clip": 0.0}, "cumulative: dual_clip must be a number > 0"),
    ("cumulative", {"power": -0.5}, "cumulative: power must be a number >= 0"),
    ("target", {"temperature": 0}, "target: temperature must be a number > 0, got 0"),
    (
        "dfpo",
        {"transform": "ortho"},
        "dfpo: transform must be one of min, orth, none, got 'ortho'. Did you mean 'orth'?",
    ),
    ("dfpo", {"weight": "mean"}, "dfpo: weight must be one of geometric_mean, product, got 'mean'"),
    ("dfpo", {"length": "in"}, "dfpo: length must be one of outside, inside, got 'in'"),
    ("clip_cov", {"fraction": 2}, "clip_cov: fraction must be a number > 0 and <= 1, got 2"),
    ("clip_cov", {"low": 5.0, "high": 1.0}, "clip_cov: high must be a number > 5, got 1.0"),
    ("kl_cov", {"fraction": 0}, "kl_cov: fraction must be a number > 0"),
    ("kl_cov", {"coef": -1}, "kl_cov: coef must be a number >= 0"),
    ("kl", {"coef": True}, "kl: coef must be a number >= 0, got True"),
    ("implied_value", {"beta": 0}, "implied_value: beta must be a number > 0, got 0"),
    ("kl", {"estimator": "k4"}, "kl: estimator must be one of k1, k2, k3, got 'k4'"),
]


@pytest.mark.parametrize(("name", "params", "message"), BAD)
def test_bad_parameters(name, params, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("?", r"\?")):
        LOSSES[name](*random_rows(), **params)
    with pytest.raises(ValueError, match="has no parameter 'cliplow'"):
        LOSSES[name](cliplow=1)
