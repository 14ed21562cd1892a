"""Every loss: its twin, its coefficient, the diagonal law, padding and cuts; then what is special to each."""

from __future__ import annotations

import functools
import math

import pytest
import reference_losses as twins
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import ragged_batches

from counterpoise.advantages import group_mean
from counterpoise.batches import constant_length, per_sequence, side_means
from counterpoise.build import base, bound, needs_of
from counterpoise.losses import LOSSES, clip_cov, clipped, contrastive, cumulative, detached_ratio, dfpo, dfpo_weight, dual_clip, geometric
from counterpoise.losses import kl, kl_cov, reinforce, sequence_ratio, soft_gate, symmetric_clip, target
from counterpoise.types import Rows

INF = math.inf
# every loss with the parameters under which it is compared with its twin; the first row of each name is the default
VARIANTS = {
    "reinforce": [{}],
    "clipped": [{}, {"clip_low": 0.1, "clip_high": 0.5}, {"dual_clip": 3.0}, {"clip_low": INF, "clip_high": INF}],
    "dual_clip": [{}, {"dual_clip": 1.5}],
    "symmetric_clip": [{}, {"clip": 1.5}],
    "detached_ratio": [{}, {"clip_low": 0.2, "clip_high": 0.5}],
    "soft_gate": [{}, {"tau_pos": 2.0, "tau_neg": 0.5}],
    "contrastive": [{}, {"clip_low": 0.5, "clip_high": 1.0}],
    "sequence_ratio": [{}, {"clip_low": 0.3, "clip_high": 0.5}],
    "geometric": [{}, {"clip_low": 1.0, "clip_high": 2.0}],
    "cumulative": [{}, {"clip_low": 1.0, "clip_high": 1.5, "dual_clip": 2.0}, {"clip_high": INF, "dual_clip": INF, "power": 0.0}],
    "target": [{}, {"temperature": 0.5}],
    "dfpo": [
        {},
        {"transform": "orth"},
        {"transform": "none", "weight": "product"},
        {"length": "inside"},
        {"transform": "orth", "weight": "product", "length": "inside"},
    ],
    "clip_cov": [{"fraction": 1.0}, {"fraction": 1.0, "low": 0.1, "high": 0.8, "clip_low": INF, "clip_high": INF}],
    "kl_cov": [{}, {"fraction": 0.3, "coef": 0.5}],
    "kl": [{}, {"estimator": "k1"}, {"estimator": "k2", "coef": 1.0}],
}
ALL = [(name, params) for name in LOSSES for params in VARIANTS[name]]
EVERY = pytest.mark.parametrize(("name", "params"), ALL, ids=[f"{name}-{k}" for k, (name, _) in enumerate(ALL)])
PREPARED = [(name, params) for name, params in ALL if LOSSES[name].prepare]


def rows_of(batch, credit_NT=None, advantage_N=None) -> Rows:
    """A step of all rollouts of a batch, constant-length scale."""
    if advantage_N is None:
        advantage_N = group_mean(batch.reward_N, batch.group_N)
    credit_NT = torch.where(batch.mask_NT, advantage_N[:, None], 0) if credit_NT is None else credit_NT
    return Rows(
        row_R=torch.arange(batch.num_rollouts),
        mask_NT=batch.mask_NT,
        group_N=batch.group_N,
        reward_N=batch.reward_N,
        advantage_N=advantage_N,
        credit_NT=credit_NT,
        sampler_logp_NT=batch.sampler_logp_NT,
        scale_NT=constant_length(batch.mask_NT, credit_NT, advantage_N, length=5),
        ref_logp_NT=batch.ref_logp_NT,
    )


def random_rows(seed=0, n=6, width=5, spread=0.5, num_groups=2, uniform=False) -> tuple[torch.Tensor, Rows]:
    """Trainer log-probs and a step in float64: ragged lengths, credit of both signs with zeros in it (or advantage * mask)."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    mask_NT = torch.arange(width) < torch.randint(1, width + 1, (n, 1), generator=gen)
    mask_NT[0] = True
    group_N, reward_N = torch.arange(n) % num_groups, (torch.arange(n) // num_groups % 2).double()
    advantage_N = group_mean(reward_N, group_N)
    credit_NT = normal(n, width) * (torch.rand(n, width, generator=gen) > 0.2) if not uniform else advantage_N[:, None].expand(n, width)
    credit_NT = torch.where(mask_NT, credit_NT, 0)
    sampler_NT = -normal(n, width).abs()
    scale_NT = constant_length(mask_NT, credit_NT, advantage_N, length=width)
    ref_NT = sampler_NT + 0.3 * normal(n, width)
    rows = Rows(torch.arange(n), mask_NT, group_N, reward_N, advantage_N, credit_NT, sampler_NT, scale_NT, ref_NT)
    return sampler_NT + spread * normal(n, width), rows


def one_token(ratio: float, credit: float, sampler=-1.0, ref=-1.0) -> tuple[torch.Tensor, Rows]:
    cell = torch.ones(1, 1, dtype=torch.float64)
    rows = Rows(
        torch.tensor([0]), cell.bool(), torch.tensor([0]), cell[0], credit * cell[0], credit * cell, sampler * cell, cell, ref * cell
    )
    return sampler * cell + math.log(ratio), rows


def gradient(loss, logp_NT, rows: Rows) -> torch.Tensor:
    leaf_NT = logp_NT.clone().requires_grad_()
    (loss(leaf_NT, rows).loss_NT * rows.scale_NT).sum().backward()
    assert leaf_NT.grad is not None
    return leaf_NT.grad


def assert_close(got, expected, rtol=1e-12, atol=1e-12):
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), rtol=rtol, atol=atol)


def assert_twin(name, params, logp_NT, rows):
    case = twins.case_of(logp_NT, rows)
    expected, got = getattr(twins, name)(case, **params), LOSSES[name](logp_NT, rows, **params)
    for i, row in enumerate(expected):
        for k, column_NT in enumerate((got.loss_NT, got.coef_NT, got.ratio_NT)):
            assert_close(column_NT[i, : len(row)], [token[k] for token in row], rtol=1e-9, atol=1e-11)
            assert (column_NT[i, len(row) :] == (1 if k == 2 else 0)).all()
        assert got.clipped_NT[i].tolist() == [token[3] for token in row] + [False] * (rows.mask_NT.shape[1] - len(row))


@EVERY
def test_equals_its_twin(name, params):
    for seed in range(3):
        assert_twin(name, params, *random_rows(seed))


@settings(max_examples=150, deadline=None)
@given(data=st.data(), batch=ragged_batches(min_group_size=2), pick=st.sampled_from(ALL))
def test_equals_its_twin_on_ragged_batches(data, batch, pick):
    values = st.sampled_from([-1.5, -0.5, 0.0, 0.25, 1.0])
    n, width = batch.mask_NT.shape
    credit = data.draw(st.lists(st.lists(values, min_size=width, max_size=width), min_size=n, max_size=n))
    credit_NT = torch.where(batch.mask_NT, torch.tensor(credit, dtype=torch.float64), 0)
    name, params = pick
    if name == "kl_cov":  # ties for the last place among the top covariances may be broken either way
        params = {**params, "fraction": 1.0}
    assert_twin(name, params, batch.trainer_logp_NT, rows_of(batch, credit_NT))


@EVERY
def test_diagonal_law_and_coef_is_minus_the_derivative(name, params):
    logp_NT, rows = random_rows(seed=1)
    jacobian = torch.autograd.functional.jacobian(lambda x_NT: LOSSES[name](x_NT, rows, **params).loss_NT, logp_NT)
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
    wide = {field: torch.nn.functional.pad(getattr(rows, field), (0, 2)) for field in ("mask_NT", "credit_NT", "scale_NT")}
    for field in ("sampler_logp_NT", "ref_logp_NT"):
        wide[field] = torch.nn.functional.pad(getattr(rows, field), (0, 2), value=-INF).masked_fill(~wide["mask_NT"], math.nan)
    logp_wide_NT = torch.nn.functional.pad(logp_NT, (0, 2)).masked_fill(~wide["mask_NT"], -INF)
    got, got_grad = loss(logp_wide_NT, rows._replace(**wide)), gradient(loss, logp_wide_NT, rows._replace(**wide))
    for a, b in zip([*got, got_grad], [*expected, expected_grad]):
        assert torch.equal(a[:, :-2], b)
    assert (got_grad[~wide["mask_NT"]] == 0).all()


@EVERY
def test_half_precision_log_probs_are_widened(name, params):
    logp_NT, rows = random_rows(seed=3)
    out = LOSSES[name](logp_NT.bfloat16(), rows._replace(credit_NT=rows.credit_NT.float(), sampler_logp_NT=rows.sampler_logp_NT.float()), **params)
    assert out.coef_NT.dtype == torch.float32
    assert out.loss_NT.dtype in (torch.float32, torch.float64)


@EVERY
def test_parameters_bind(name, params):
    logp_NT, rows = random_rows()
    stage = LOSSES[name](**params) if params else functools.partial(LOSSES[name])
    assert base(stage) is LOSSES[name]
    assert bound(stage) == params
    assert torch.equal(stage(logp_NT, rows).loss_NT, LOSSES[name](logp_NT, rows, **params).loss_NT)


@pytest.mark.parametrize(("name", "params"), PREPARED)
def test_cuts_of_a_prepared_step_give_the_gradient_of_the_step(name, params):
    logp_NT, rows = random_rows(seed=4)
    loss = functools.partial(LOSSES[name], **params)
    whole = gradient(loss, logp_NT, rows)
    ready = rows._replace(step_NT=LOSSES[name].prepare(logp_NT, rows, **params))
    for cuts in ([[0, 1, 2], [3, 4, 5]], [[5, 0], [4], [2, 1, 3]], [[i] for i in range(6)]):
        for cut in map(torch.tensor, cuts):
            assert_close(gradient(loss, logp_NT[cut], ready.select(cut)), whole[cut])


@pytest.mark.parametrize(("name", "params"), [("target", {}), ("dfpo", {}), ("dfpo", {"transform": "orth"}), ("kl_cov", {})])
def test_unprepared_cuts_would_give_another_gradient(name, params):
    logp_NT, rows = random_rows(seed=4)
    loss, cut = functools.partial(LOSSES[name], **params), torch.tensor([0, 1])
    assert (gradient(loss, logp_NT[cut], rows.select(cut)) - gradient(loss, logp_NT, rows)[cut]).abs().max() > 1e-3


@EVERY
def test_order_of_the_rows_does_not_matter(name, params):
    logp_NT, rows = random_rows(seed=5)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for a, b in zip(LOSSES[name](logp_NT[order], rows.select(order), **params), LOSSES[name](logp_NT, rows, **params)):
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


@pytest.mark.parametrize("loss", UNCLIPPED, ids=lambda loss: base(loss).__name__)
def test_clip_at_infinity_is_ratio_times_credit_and_reinforce_at_ratio_one(loss):
    logp_NT, rows = random_rows(seed=6, spread=2.0)
    out = loss(logp_NT, rows)
    ratio_NT = (logp_NT - rows.sampler_logp_NT).exp()
    assert_close(out.coef_NT, torch.where(rows.mask_NT, ratio_NT * rows.credit_NT, 0))
    assert not out.clipped_NT.any()
    assert torch.equal(gradient(loss, rows.sampler_logp_NT, rows), gradient(reinforce, rows.sampler_logp_NT, rows))


@pytest.mark.parametrize("name", ["soft_gate", "sequence_ratio", "geometric", "cumulative", "dfpo", "clipped", "dual_clip"])
def test_on_policy_gradient_is_that_of_reinforce(name):
    _, rows = random_rows(seed=7)
    assert_close(gradient(LOSSES[name], rows.sampler_logp_NT, rows), gradient(reinforce, rows.sampler_logp_NT, rows))


def sequence_objective(logp_NT, rows, mean_log_N) -> torch.Tensor:
    """Gradient of -(1/N) sum_i A_i exp(mean_log_i) through all tokens of a rollout."""
    leaf_NT = logp_NT.clone().requires_grad_()
    (-(rows.advantage_N * mean_log_N(leaf_NT).exp()).mean()).backward()
    assert leaf_NT.grad is not None
    return leaf_NT.grad


def test_sequence_ratio_has_the_gradient_of_the_sequence_objective():
    logp_NT, rows = random_rows(seed=8, uniform=True)
    rows = rows._replace(scale_NT=per_sequence(rows.mask_NT, rows.credit_NT, rows.advantage_N))
    got = gradient(sequence_ratio(clip_low=INF, clip_high=INF), logp_NT, rows)
    length_N = rows.mask_NT.sum(1)
    assert len(set(length_N.tolist())) > 1
    expected = sequence_objective(
        logp_NT, rows, lambda x_NT: ((x_NT - rows.sampler_logp_NT) * rows.mask_NT).sum(1) / length_N
    )
    assert_close(got, expected)
    # with credit that differs along a row the two part: every token keeps its own credit here, and shares the row's mean there
    uneven = rows._replace(credit_NT=rows.credit_NT * torch.rand(rows.credit_NT.shape, generator=torch.Generator().manual_seed(0)))
    assert (gradient(sequence_ratio(clip_low=INF, clip_high=INF), logp_NT, uneven) / got - uneven.credit_NT / rows.credit_NT)[
        rows.mask_NT
    ].abs().max() < 1e-12


def test_geometric_has_the_gradient_of_its_sequence_objective():
    logp_NT, rows = random_rows(seed=9, uniform=True, spread=0.6)
    rows = rows._replace(scale_NT=per_sequence(rows.mask_NT, rows.credit_NT, rows.advantage_N))

    def mean_log(x_NT):
        log_NT, sign_N1 = x_NT - rows.sampler_logp_NT, rows.advantage_N.sign()[:, None]
        kept_NT = sign_N1 * torch.minimum(sign_N1 * log_NT, sign_N1 * log_NT.clamp(-0.4, 0.4))
        return (kept_NT * rows.mask_NT).sum(1) / rows.mask_NT.sum(1)

    assert geometric(logp_NT, rows).clipped_NT.any()
    assert_close(gradient(geometric, logp_NT, rows), sequence_objective(logp_NT, rows, mean_log))


def test_target_has_the_gradient_of_the_cross_entropy():
    logp_NT, rows = random_rows(seed=10)
    leaf_NT, total = logp_NT.clone().requires_grad_(), torch.zeros((), dtype=torch.float64)
    for g in rows.group_N.unique():
        at = rows.group_N == g
        reward = rows.reward_N[at]
        u = (reward - reward.mean()) / reward.std(unbiased=False)
        q = ((rows.sampler_logp_NT * rows.mask_NT).sum(1)[at] + u).softmax(0)
        total = total - (q * (leaf_NT * rows.mask_NT).sum(1)[at].log_softmax(0)).sum()
    total.backward()
    assert leaf_NT.grad is not None
    assert_close(gradient(target, logp_NT, rows), leaf_NT.grad / (6 * 5))  # constant length: 6 rollouts of 5
    constant = rows._replace(reward_N=torch.full_like(rows.reward_N, 0.7))
    assert_close(target(rows.sampler_logp_NT, constant).coef_NT, torch.zeros_like(logp_NT))


def test_contrastive_with_side_means_is_the_crf_objective():
    logp_NT, rows = random_rows(seed=11)
    sign_N = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    kept_NT = rows.mask_NT & ((sign_N > 0)[:, None] | (rows.sampler_logp_NT < rows.sampler_logp_NT.median()))
    credit_NT = sign_N[:, None] * kept_NT
    rows = rows._replace(advantage_N=sign_N, credit_NT=credit_NT, scale_NT=side_means(rows.mask_NT, credit_NT, sign_N))
    sums = {1: [], -1: []}
    for i, row in enumerate((logp_NT - rows.sampler_logp_NT).exp().tolist()):
        n = int(rows.mask_NT[i].sum())
        bounded = [min(r, 11.0) if sign_N[i] > 0 else max(r, 0.8) * bool(kept_NT[i, t]) for t, r in enumerate(row[:n])]
        sums[int(sign_N[i])].append(sum(bounded) / n)
    expected = -0.5 * (sum(sums[1]) / 2 - sum(sums[-1]) / 4)
    assert (contrastive(logp_NT, rows).loss_NT * rows.scale_NT).sum().item() == pytest.approx(expected, abs=1e-12)


def shared_token_residual(loss, ratio: float, reduction=constant_length(length=1)) -> float:
    """(1/G) sum_i of the coefficient with which rollout i's copy of one shared token enters, G = 8, three of them correct."""
    gen = torch.Generator().manual_seed(0)
    reward_N = torch.tensor([1.0, 0, 0, 1, 0, 0, 1, 0], dtype=torch.float64)
    mask_NT = torch.arange(7) < torch.tensor([[2], [7], [3], [5], [6], [4], [7], [2]])
    advantage_N = reward_N - reward_N.mean()
    credit_NT = advantage_N[:, None] * mask_NT
    sampler_NT = -torch.rand(8, 7, generator=gen, dtype=torch.float64) - 0.1
    logp_NT = sampler_NT + 0.3 * torch.randn(8, 7, generator=gen, dtype=torch.float64)
    logp_NT[:, 0] = sampler_NT[:, 0] + math.log(ratio)
    scale_NT = reduction(mask_NT, credit_NT, advantage_N)
    rows = Rows(torch.arange(8), mask_NT, torch.zeros(8), reward_N, advantage_N, credit_NT, sampler_NT, scale_NT)
    return float((loss(logp_NT, rows).coef_NT * scale_NT)[:, 0].sum())


TOKEN_RATIO = clipped(clip_low=INF, clip_high=INF)
INSIDE = [dfpo(transform=transform, weight=weight, length="inside") for transform in ("min", "orth") for weight in ("geometric_mean", "product")]


@pytest.mark.parametrize("ratio", [1.3, 1.1, 0.7])
@pytest.mark.parametrize(
    "loss", [TOKEN_RATIO, reinforce(), symmetric_clip(), dfpo(), dfpo(transform="orth"), dfpo(weight="product"), *INSIDE], ids=str
)
def test_shared_tokens_cancel(loss, ratio):
    assert abs(shared_token_residual(loss, ratio)) < 1e-15


def test_shared_tokens_do_not_cancel_under_coupling_length_and_signed_clips():
    # eps 0.2: the three good rollouts (A = 5/8) lose a token of ratio 1.3, the five bad ones (A = -3/8) one of ratio 0.7
    assert shared_token_residual(clipped, 1.3) == pytest.approx(-5 * 3 / 8 * 1.3 / 8)
    assert shared_token_residual(clipped, 0.7) == pytest.approx(3 * 5 / 8 * 0.7 / 8)
    assert abs(shared_token_residual(clipped, 1.1)) < 1e-15
    for coupled in (dfpo(transform="none", weight="product"), dfpo(transform="none"), sequence_ratio(clip_low=INF, clip_high=INF)):
        assert abs(shared_token_residual(coupled, 1.3)) > 0.01
    for after in (TOKEN_RATIO, dfpo(), dfpo(transform="orth"), dfpo(transform="min", length="inside")):
        assert abs(shared_token_residual(after, 1.3, per_sequence)) > 0.005


def test_dfpo_min_is_reinforce_times_one_scalar_a_prompt():
    logp_NT, rows = random_rows(seed=12, uniform=True)
    factor_NT = gradient(dfpo, logp_NT, rows) / gradient(reinforce, logp_NT, rows)
    for g in range(2):
        factors = factor_NT[(rows.group_N == g)[:, None] & rows.mask_NT & (rows.credit_NT != 0)]
        assert_close(factors, torch.full_like(factors, factors[0].item()))


def test_dfpo_weight_by_hand_with_a_negative_weight_and_an_empty_advantage():
    # one token each: w = (4, 1, 1), A = (2, -1, -1): A.w / |A|^2 = 6/6 = 1, so w~ = (2, 2, 2); with A = (5, 1, 1): 22/27 off along A
    mask_NT, zero = torch.ones(3, 1, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.float64)
    logp_NT = torch.tensor([[4.0], [1.0], [1.0]], dtype=torch.float64).log()
    rows = Rows(torch.arange(3), mask_NT, torch.zeros(3), zero[:, 0], torch.tensor([2.0, -1, -1]).double(), zero, zero, zero)
    assert_close(dfpo_weight(logp_NT, rows, transform="orth"), [2.0, 2.0, 2.0])
    assert_close(dfpo_weight(logp_NT, rows, transform="min"), [1.0, 1.0, 1.0])
    tilted = rows._replace(advantage_N=torch.tensor([5.0, 1, 1]).double())
    weight_N = dfpo_weight(logp_NT, tilted, transform="orth")
    assert_close(weight_N, [4 - 5 * 22 / 27, 1 - 22 / 27, 1 - 22 / 27])
    assert (weight_N < 0).tolist() == [True, False, False]
    empty = rows._replace(advantage_N=zero[:, 0])
    assert_close(dfpo_weight(logp_NT, empty, transform="orth"), [4.0, 1.0, 1.0])
    with pytest.raises(ValueError, match=r"dfpo weight gave a value that is not finite at rollouts \[0\]"):
        dfpo_weight(torch.tensor([[1e4], [0], [0]]).double(), rows, weight="product")


def test_clip_cov_draws_from_the_band_and_by_seed_alone():
    logp_NT, rows = random_rows(seed=13, n=40, width=20)
    params = {"low": 0.1, "high": 2.0, "fraction": 0.02}
    band = twins.clip_cov_band(twins.case_of(logp_NT, rows), low=0.1, high=2.0)
    num_wanted = int(0.02 * int(rows.mask_NT.sum()))
    assert len(band) > 2 * num_wanted > 4

    def drawn(seed):
        return {tuple(place) for place in clip_cov.prepare(logp_NT, rows, seed=seed, **params).nonzero().tolist()}

    assert drawn(0) <= band
    assert len(drawn(0)) == num_wanted
    assert drawn(0) == drawn(0) != drawn(1)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    assert torch.equal(clip_cov(logp_NT[order], rows.select(order), **params).coef_NT, clip_cov(logp_NT, rows, **params).coef_NT[order])


def test_needs_and_missing_reference():
    assert needs_of(kl()) == {"ref_logp_NT"}
    assert all(not needs_of(LOSSES[name]()) for name in LOSSES if name != "kl")
    logp_NT, rows = random_rows()
    with pytest.raises(ValueError, match="kl: the rows have no ref_logp_NT"):
        kl(logp_NT, rows._replace(ref_logp_NT=None))


BAD = [
    ("clipped", {"clip_low": -0.1}, "clipped: clip_low must be a number >= 0, got -0.1"),
    ("clipped", {"dual_clip": 1.0}, "clipped: dual_clip must be a number > 1, got 1.0"),
    ("dual_clip", {"dual_clip": 0.5}, "dual_clip: dual_clip must be a number > 1"),
    ("symmetric_clip", {"clip": "wide"}, "symmetric_clip: clip must be a number >= 0, got 'wide'"),
    ("detached_ratio", {"clip_high": math.nan}, "detached_ratio: clip_high must be a number >= 0, got nan"),
    ("soft_gate", {"tau_neg": 0}, "soft_gate: tau_neg must be a number > 0, got 0"),
    ("contrastive", {"clip_high": None}, "contrastive: clip_high must be a number >= 0, got None"),
    ("sequence_ratio", {"clip_low": -1}, "sequence_ratio: clip_low"),
    ("geometric", {"clip_high": -1}, "geometric: clip_high"),
    ("cumulative", {"dual_clip": 0.0}, "cumulative: dual_clip must be a number > 0"),
    ("cumulative", {"power": -0.5}, "cumulative: power must be a number >= 0"),
    ("target", {"temperature": 0}, "target: temperature must be a number > 0, got 0"),
    ("dfpo", {"transform": "ortho"}, "dfpo: unknown transform 'ortho'. Did you mean 'orth'?"),
    ("dfpo", {"weight": "mean"}, "dfpo: unknown weight 'mean'"),
    ("dfpo", {"length": "in"}, "dfpo: unknown length 'in'"),
    ("clip_cov", {"fraction": 2}, "clip_cov: fraction must be a number > 0 and <= 1, got 2"),
    ("clip_cov", {"low": 5.0, "high": 1.0}, "clip_cov: high must be a number > 5, got 1.0"),
    ("kl_cov", {"fraction": 0}, "kl_cov: fraction must be a number > 0"),
    ("kl_cov", {"coef": -1}, "kl_cov: coef must be a number >= 0"),
    ("kl", {"coef": True}, "kl: coef must be a number >= 0, got True"),
    ("kl", {"estimator": "k4"}, "unknown KL estimator 'k4'"),
]


@pytest.mark.parametrize(("name", "params", "message"), BAD)
def test_bad_parameters(name, params, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("?", r"\?")):
        LOSSES[name](*random_rows(), **params)
    with pytest.raises(ValueError, match="has no parameter 'cliplow'"):
        LOSSES[name](cliplow=1)
