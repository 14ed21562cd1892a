"""Every stage and every preset through the same laws (the rows are in conformance_table.py)."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest
import torch

import counterpoise as cp
from counterpoise.catalogue.presets import PRESETS
from counterpoise.catalogue.registry import FAMILIES
from counterpoise.maths.reduce import groups, seeded_generator
from counterpoise.stage import build, call, describe
from helpers import conformance_table as table
from helpers.full_batch import make_batch

# before any test registers stages of its own
BUILT_IN = {axis: set(stages) for axis, stages in FAMILIES.items()}
ROWS = {
    "advantage": table.ADVANTAGES,
    "credit": table.RULES,
    "loss": table.LOSSES,
    "reduction": table.REDUCTIONS,
    "plan": table.PLANS,
    "controller": table.CONTROLLERS,
}


def widened(batch: cp.TokenBatch, by: int = 3) -> cp.TokenBatch:
    """The same rollouts with more padding, filled with rubbish that no one may read."""

    def pad(value: torch.Tensor | None, fill: float) -> torch.Tensor | None:
        if value is None or value.dim() < 2:
            return value
        rubbish = torch.full((value.shape[0], by, *value.shape[2:]), fill).to(value.dtype)
        return torch.cat([value, rubbish], 1)

    names = {f.name for f in dataclasses.fields(batch)} - {
        "head_VD",
        "max_length",
        "extra",
        "mask_NT",
        "group_N",
        "reward_N",
    }
    names = {name for name in names if not name.endswith("_NU")}
    columns = {name: pad(getattr(batch, name), -1 if name == "turn_NT" else 3.0) for name in names}
    return batch.replace(mask_NT=pad(batch.mask_NT, False), **columns)


def start(batch: cp.TokenBatch) -> torch.Tensor:
    """The credit that the first rule of a chain gets."""
    return cp.advantages.group_zscore(batch.reward_N, batch.group_N)[:, None] * batch.mask_NT


def rows_of(batch: cp.TokenBatch, credit_NT: torch.Tensor | None = None) -> cp.Rows:
    credit_NT = start(batch) if credit_NT is None else credit_NT
    return cp.Rows(
        row_R=torch.arange(batch.num_rollouts),
        mask_NT=batch.mask_NT,
        group_N=batch.group_N,
        reward_N=batch.reward_N,
        advantage_N=cp.advantages.group_zscore(batch.reward_N, batch.group_N),
        credit_NT=credit_NT,
        sampler_logp_NT=batch.sampler_logp_NT,
        scale_NT=batch.mask_NT / batch.mask_NT.sum(),
        ref_logp_NT=batch.ref_logp_NT,
        ref_kl_NT=batch.ref_kl_NT,
        rollout_scale_N=torch.full_like(batch.reward_N, 1 / batch.num_rollouts),
    )


def made(axis: str, name: str):
    row = ROWS[axis][name]
    params = row if isinstance(row, dict) else row.params
    return build(axis, FAMILIES[axis], {"name": name, **params})


def run_rule(name: str, batch: cp.TokenBatch) -> torch.Tensor:
    """Its credit; of a rule with memory, that of the batch after one that it has seen."""
    rule, offers = made("credit", name), {"generator": seeded_generator(0, 0, "test")}
    if rule.init is None:
        return call(rule, start(batch), batch, **offers)
    seen = make_batch(seed=1, turns=True)
    _, state = call(rule, rule.start(), start(seen), seen, **offers)
    return call(rule, json.loads(json.dumps(state)), start(batch), batch, **offers)[0]


PERMUTATION = torch.randperm(16, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("axis", FAMILIES)
def test_every_stage_has_a_row(axis):
    assert set(ROWS[axis]) == BUILT_IN[axis]


@pytest.mark.parametrize(("axis", "name"), [(axis, name) for axis in ROWS for name in ROWS[axis]])
def test_stage_pickles_describes_and_has_words(axis, name):
    stage = made(axis, name)
    again = build(axis, FAMILIES[axis], json.loads(json.dumps(describe(FAMILIES[axis], stage))))
    assert describe(FAMILIES[axis], again) == describe(FAMILIES[axis], stage)
    assert pickle.loads(pickle.dumps(stage)).needs == stage.needs
    assert len((stage.__doc__ or "").strip()) > 40


@pytest.mark.parametrize("name", table.RULES)
def test_rule_laws(name):
    batch, law = make_batch(turns=True), table.RULES[name]
    copies = {
        f.name: getattr(batch, f.name).clone()
        for f in dataclasses.fields(batch)
        if isinstance(getattr(batch, f.name), torch.Tensor)
    }
    before_NT, after_NT = start(batch), run_rule(name, batch)
    assert after_NT.dtype == before_NT.dtype
    assert torch.all(after_NT[~batch.mask_NT] == 0)
    assert torch.isfinite(after_NT).all()
    for key, value in copies.items():  # inputs are unchanged
        torch.testing.assert_close(getattr(batch, key), value, rtol=0, atol=0, equal_nan=True)
    if law.keeps_mass:
        assert after_NT.abs().sum().item() == pytest.approx(before_NT.abs().sum().item(), rel=1e-12)
    if law.keeps_sign:
        assert torch.all(after_NT * before_NT >= 0)
    if name != "uniform":
        assert not torch.equal(before_NT, after_NT), (
            "the row's parameters make the rule do nothing: the laws above were not tested"
        )


@pytest.mark.parametrize("name", [name for name, law in table.RULES.items() if not law.is_random])
def test_rule_ignores_padding_and_order(name):
    batch = make_batch(turns=True)
    after_NT = run_rule(name, batch)
    wide_NT = run_rule(name, widened(batch))
    torch.testing.assert_close(wide_NT[:, : after_NT.shape[1]], after_NT, rtol=0, atol=1e-12)
    assert torch.all(wide_NT[:, after_NT.shape[1] :] == 0)
    torch.testing.assert_close(
        run_rule(name, batch.select(PERMUTATION)), after_NT[PERMUTATION], rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("name", table.ADVANTAGES)
def test_advantage_laws(name):
    batch, law, stage = make_batch(turns=True), table.ADVANTAGES[name], made("advantage", name)
    num, length_N = batch.num_rollouts, batch.length_N
    advantage_N = call(stage, batch.reward_N, batch.group_N, length_N=length_N)
    assert advantage_N.shape == batch.reward_N.shape
    assert advantage_N.dtype == batch.reward_N.dtype
    assert (advantage_N != 0).any()
    moved = (column[PERMUTATION] for column in (batch.reward_N, batch.group_N))
    moved_N = call(stage, *moved, length_N=length_N[PERMUTATION])
    torch.testing.assert_close(moved_N, advantage_N[PERMUTATION])
    if law.is_centred:
        assert groups(batch.group_N).sum(advantage_N).abs().max() < 1e-12
    if law.by_group:
        assert torch.all(advantage_N[batch.group_N == 0] == 0), "a constant group learns nothing"
        with pytest.raises(ValueError, match="batch_whitened"):
            stage(batch.reward_N, torch.arange(num))
    else:
        alone_N = call(stage, batch.reward_N, torch.arange(num), length_N=length_N)
        assert torch.isfinite(alone_N).all(), "one rollout a prompt is legal"


@pytest.mark.parametrize("name", table.LOSSES)
def test_loss_laws(name):
    batch, stage = make_batch(turns=True), made("loss", name)
    logp_NT = batch.trainer_logp_NT.clone().requires_grad_()
    rows = rows_of(batch)
    out = stage(logp_NT, rows)
    for column in (out.loss_NT, out.coef_NT):
        assert torch.all(column[~batch.mask_NT] == 0)
    assert not out.clipped_NT[~batch.mask_NT].any()
    assert torch.all(out.ratio_NT[~batch.mask_NT] == 1)
    assert out.coef_NT.abs().sum() > 0
    (grad_NT,) = torch.autograd.grad((out.loss_NT * rows.scale_NT).sum(), logp_NT)
    torch.testing.assert_close(-grad_NT, out.coef_NT * rows.scale_NT, rtol=1e-12, atol=1e-14)
    if not table.LOSSES[name].is_random:
        wide = stage(widened(batch).trainer_logp_NT, rows_of(widened(batch)))
        torch.testing.assert_close(
            wide.coef_NT[:, : batch.mask_NT.shape[1]], out.coef_NT, rtol=0, atol=1e-12
        )
        permuted = stage(batch.trainer_logp_NT[PERMUTATION], rows_of(batch.select(PERMUTATION)))
        torch.testing.assert_close(permuted.coef_NT, out.coef_NT[PERMUTATION], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", table.REDUCTIONS)
def test_reduction_laws(name):
    batch, law, stage = make_batch(turns=True), table.REDUCTIONS[name], made("reduction", name)
    advantage_N = cp.advantages.group_zscore(batch.reward_N, batch.group_N)
    scale_NT = stage(batch.mask_NT, start(batch), advantage_N)
    assert torch.all(scale_NT[~batch.mask_NT] == 0)
    assert torch.all(scale_NT >= 0)
    wide = widened(batch)
    torch.testing.assert_close(
        stage(wide.mask_NT, start(wide), advantage_N)[:, : scale_NT.shape[1]],
        scale_NT,
        rtol=0,
        atol=1e-15,
    )
    if law.total is not None:
        assert float(scale_NT.sum()) == pytest.approx(law.total, rel=1e-12)


@pytest.mark.parametrize("name", table.PLANS)
@pytest.mark.parametrize("num_updates", [1, 2, 3])
def test_plan_laws(name, num_updates):
    batch, law = make_batch(turns=True), table.PLANS[name]
    method = cp.method("grpo", plan={"name": name, **law.params})
    plan = method.plan(batch, num_updates=num_updates, seed=5)
    rows = torch.cat(list(plan)).tolist()
    assert len(plan) == num_updates
    assert len(set(rows)) == len(rows), "a rollout is in two batches"
    assert (
        sorted(rows) + sorted(plan.manifest["left_out"])
        if not law.covers
        else sorted(rows) == list(range(16))
    )
    assert sorted(rows + plan.manifest["left_out"]) == list(range(16))
    again = method.plan(batch, num_updates=num_updates, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(plan, again))
    json.dumps(plan.manifest)
    if law.whole_prompts:
        assert cp.audit(plan, batch).prompts_split == 0


@pytest.mark.parametrize("name", table.CONTROLLERS)
def test_controller_laws(name):
    batch, controller = make_batch(turns=True), made("controller", name)
    state = controller.start()
    for _ in range(3):
        before = json.dumps(state)
        control = call(controller, state, batch)
        assert json.dumps(state) == before, "the old state was changed"
        state = json.loads(json.dumps(control.state))
    assert control.settings


@pytest.mark.parametrize("name", PRESETS)
def test_preset_round_trips_and_is_cut_without_a_trace(name):
    """describe -> method gives the same credit; padding changes nothing; any cut of a batch into
    micro-batches gives the same gradient.
    """
    batch, method = make_batch(turns=True), cp.method(name)
    out = method.assign(batch)
    again = cp.method(**json.loads(json.dumps(method.describe()))).assign(batch)
    torch.testing.assert_close(again.credit_NT, out.credit_NT, rtol=0, atol=0)
    assert (out.credit_NT != 0).any()
    assert torch.all(out.weight_NT[~batch.mask_NT] == 0)
    batch_number = method.plan(batch, num_updates=2, seed=1).updates[0]
    if name not in table.RANDOM_PRESETS:
        wide = method.assign(widened(batch))
        torch.testing.assert_close(
            wide.credit_NT[:, : out.credit_NT.shape[1]], out.credit_NT, rtol=0, atol=1e-12
        )
    whole = gradient(method, batch, out, batch_number, None)
    assert whole.abs().sum() > 0
    torch.testing.assert_close(
        gradient(method, batch, out, batch_number, 7), whole, rtol=0, atol=1e-13
    )
    torch.testing.assert_close(
        gradient(method, batch, out, batch_number, 20), whole, rtol=0, atol=1e-13
    )


def gradient(
    method: cp.Method,
    batch: cp.TokenBatch,
    out: cp.Credit,
    batch_number: torch.Tensor,
    budget: int | None,
) -> torch.Tensor:
    """Gradient of the batch's total by the log-probs of all its rows, cut into micro-batches of a
    token budget.
    """
    rows = method.rows(batch, out, batch_number)
    logp_NT = batch.trainer_logp_NT[batch_number].clone().requires_grad_()
    rows = method.prepare(logp_NT, rows)
    size = len(batch_number) if budget is None else max(1, budget // rows.mask_NT.shape[1])
    cuts = rows.mask_NT.sum(1).argsort(descending=True).split(size)
    for pick in cuts:
        micro = rows.select(pick)
        (method.loss(logp_NT[pick], micro).loss_NT * micro.scale_NT).sum().backward()
    return logp_NT.grad
