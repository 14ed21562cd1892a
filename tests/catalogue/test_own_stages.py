"""Stages of one's own by ``module:function``, on every axis, from Python and from a recipe."""

from __future__ import annotations

import dataclasses
import textwrap

import pytest
import torch
import yaml

import counterpoise as cp
from counterpoise.cli import dispatch
from counterpoise.run.read import open_run, read_jsonl
from counterpoise.stage import as_stage

MODULE = """
import torch
import counterpoise as cp

def half(reward_N, group_N):
    return reward_N - 0.5

def last(credit_NT, batch, *, count=1):
    late_NT = batch.mask_NT.cumsum(1) > batch.length_N[:, None] - count
    return torch.where(late_NT & batch.mask_NT, credit_NT, 0.0)

@cp.token_loss
def plain(trainer_logp_NT, rows):
    ratio_NT = torch.exp(trainer_logp_NT - rows.sampler_logp_NT)
    return -rows.credit_NT * trainer_logp_NT, ratio_NT, torch.zeros_like(rows.mask_NT)

def ones(mask_NT, credit_NT, advantage_N):
    return mask_NT.float()

def one_by_one(group_N, reward_N, length_N, *, num_updates):
    return list(torch.arange(len(group_N)).chunk(num_updates))

@cp.declare(init=lambda: {"num": 0})
def count(state, batch):
    return cp.Control({}, {"num": state["num"] + 1}, {"num": state["num"]})

number = 3

def nothing(credit_NT, batch):
    credit_NT * 2

@cp.declare(init=lambda: {})
def forgets(state, credit_NT, batch):
    return credit_NT

def raises(credit_NT, batch):
    shift = {}["shift"]
    return credit_NT + shift

def raises_inside(credit_NT, batch):
    return credit_NT.reshape(7, 7)

@cp.token_loss
def bad_loss(trainer_logp_NT, rows):
    return rows.nonsense

@cp.token_loss
def one_tensor(trainer_logp_NT, rows):
    return -rows.credit_NT * trainer_logp_NT

@cp.token_loss
def reduced(trainer_logp_NT, rows):
    return (-rows.credit_NT * trainer_logp_NT).sum()

@cp.token_loss
def no_mask(trainer_logp_NT, rows):
    ones_NT = torch.ones_like(trainer_logp_NT)
    return -rows.credit_NT * trainer_logp_NT, ones_NT, ones_NT

@cp.token_loss
def narrow(trainer_logp_NT, rows):
    return -rows.credit_NT * trainer_logp_NT, torch.ones(()), torch.zeros_like(rows.mask_NT)

@cp.token_loss
def whole_rollout(trainer_logp_NT, rows):
    ratio_NT = (trainer_logp_NT - rows.sampler_logp_NT).mean(1, keepdim=True).exp()
    ratio_NT = ratio_NT.expand_as(trainer_logp_NT)
    return -rows.credit_NT * ratio_NT, ratio_NT, torch.zeros_like(rows.mask_NT)

def alone(credit_NT):
    return credit_NT

def is_late(credit_NT, batch):
    return credit_NT > 0

def surprised(credit_NT, batch):
    entropy_NT = batch.entropy_NT
    return credit_NT * entropy_NT

def per_token(reward_N, group_N):
    return reward_N[:, None].expand(2, 3)

def no_scale(mask_NT, credit_NT, advantage_N):
    return 1 / mask_NT.sum()

def drawn(group_N, reward_N, length_N, *, num_updates, generator):
    return list(torch.randperm(len(group_N), generator=generator).chunk(num_updates))

def no_list(group_N, reward_N, length_N, *, num_updates):
    return None

def one_less(group_N, reward_N, length_N, *, num_updates):
    return [torch.arange(len(group_N))]

def a_row_twice(group_N, reward_N, length_N, *, num_updates):
    return [torch.tensor([0, 1])] * num_updates

def beyond(group_N, reward_N, length_N, *, num_updates):
    return [torch.tensor([0]), torch.tensor([1, len(group_N)])]

def lists(group_N, reward_N, length_N, *, num_updates):
    return [[0], [1]]

def empty(group_N, reward_N, length_N, *, num_updates):
    return [torch.arange(len(group_N)), torch.arange(0)]
"""
LINE = {
    text: MODULE[: MODULE.index(text)].count("\n") + 1
    for text in ("{}[", "(7", "rows.non", "def alone", "* entropy")
}
PATHS = {
    "advantage": "own_stages:half",
    "credit": [{"name": "own_stages:last", "count": 2}],
    "loss": "own_stages:plain",
    "reduction": "own_stages:ones",
    "plan": "own_stages:one_by_one",
    "controller": "own_stages:count",
}


@pytest.fixture(autouse=True)
def own_stages(tmp_path, monkeypatch):
    (tmp_path / "own_stages.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)


def test_every_axis_takes_an_import_path():
    method = cp.method("grpo", **PATHS)
    assert cp.method(**method.describe()).describe() == method.describe()
    assert {axis: method.describe()[axis] for axis in PATHS} == {
        "advantage": {"name": "own_stages:half"},
        "credit": [{"name": "own_stages:last", "count": 2}],
        "loss": [{"name": "own_stages:plain"}],
        "reduction": {"name": "own_stages:ones"},
        "plan": {"name": "own_stages:one_by_one"},
        "controller": {"name": "own_stages:count"},
    }
    batch = cp.TokenBatch.from_lists(
        [[5, 6, 7], [5, 8, 9]],
        group=[0, 0],
        reward=[1.0, 0.0],
        sampler_logp=[[-0.1] * 3, [-0.2] * 3],
    )
    expected = torch.tensor([[0.0, 0.5, 0.5], [0.0, -0.5, -0.5]])
    assert torch.equal(method.assign(batch).credit_NT, expected)


def test_a_nested_rule_takes_an_import_path():
    described = cp.method("dapo", credit={"name": "only_negative", "rule": "own_stages:last"})
    assert described.describe()["credit"][0]["rule"] == {"name": "own_stages:last"}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"credit": "own_stages:lst"}, "module 'own_stages' has no 'lst'. Did you mean 'last'"),
        ({"credit": "no_such_module:rule"}, "credit rule 'no_such_module:rule': cannot import"),
        ({"plan": "own_stages:number"}, "plan 'own_stages:number' is a int, expected a function"),
        ({"loss": "own_stages:half"}, "loss 'own_stages:half' is a plain function. Decorate it"),
        ({"controller": "own_stages:half"}, "controller 'own_stages:half' has no init="),
        ({"credit": {"name": "own_stages:last", "cuont": 2}}, "last has no parameter 'cuont'"),
        ({"advantage": "own_stages:last"}, "does not run on a 2 x 3 example"),
        (
            {"credit": "own_stages:nothing"},
            "method 'grpo': credit rule own_stages:nothing returned None, expected a tensor [2, 3]",
        ),
        ({"credit": "own_stages:forgets"}, "own_stages:forgets returned a Tensor, expected (cred"),
        (
            {"credit": "own_stages:raises"},
            "does not run on a 2 x 3 example: own_stages:raises raised KeyError: 'shift' (",
        ),
        ({"credit": "own_stages:raises"}, f"own_stages.py:{LINE['{}[']})."),
        ({"credit": "own_stages:raises_inside"}, f"own_stages.py:{LINE['(7']})."),
        ({"loss": "own_stages:bad_loss"}, f"own_stages.py:{LINE['rows.non']})."),
        (
            {"loss": "own_stages:one_tensor"},
            "loss own_stages:one_tensor returned a tensor [2, 3], expected (loss_NT, ratio_NT, cl",
        ),
        ({"loss": "own_stages:reduced"}, "own_stages:reduced returned a tensor [], expected (loss"),
        ({"loss": "own_stages:no_mask"}, "clipped_NT is torch.float32, expected torch.bool."),
        ({"loss": "own_stages:narrow"}, "ratio_NT is shape [], expected [2, 3]: one value per"),
        (
            {"loss": "own_stages:whole_rollout"},
            "loss own_stages:whole_rollout: the loss of token 0 of rollout 0 also changes with the"
            " log-prob of token 1 of rollout 0",
        ),
        ({"credit": "own_stages:alone"}, f"own_stages.py:{LINE['def alone']})."),
        ({"credit": "own_stages:is_late"}, "returned torch.bool, expected floating point [2, 3]"),
        ({"credit": "own_stages:surprised"}, f"own_stages.py:{LINE['* entropy']}). It reads entr"),
        ({"credit": "own_stages:surprised"}, "@counterpoise.declare(needs='entropy_NT')"),
        (
            {"advantage": "own_stages:per_token"},
            "advantage own_stages:per_token returned shape [2, 3], expected [2]: one number per",
        ),
        (
            {"reduction": "own_stages:no_scale"},
            "own_stages:no_scale returned shape [], expected [2",
        ),
    ],
)
def test_what_cannot_be_a_stage_is_one_line(axes, message):
    with pytest.raises(ValueError) as error:
        cp.method("grpo", **axes)
    assert message in str(error.value)


def test_a_recipe_names_them_and_trains(tmp_path):
    recipe = {
        "run_dir": str(tmp_path / "run"),
        "method": {"name": "grpo", **PATHS},
        "num_batches": 2,
        "rollouts": {"prompts": 2, "group_size": 4, "max_new_tokens": 16},
        "optimizer": {"updates_per_batch": 2},
        "eval": {"every": 0},
        "ledger": {"every": 0},
        "trackers": [],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(SystemExit) as end:
        dispatch(["train", str(tmp_path / "recipe.yaml")])
    assert end.value.code == 0
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["controller/count/num"] for row in rows] == [0, 1]
    assert open_run(tmp_path / "run").manifest["method"]["plan"] == {"name": PATHS["plan"]}


def test_a_plan_as_the_guide_writes_it_passes_the_check_before_training():
    method = cp.method("dapo", plan="own_stages:drawn")
    method.check_plan(num_prompts=4, group_size=2, num_updates=2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("no_list", "plan own_stages:no_list returned a NoneType, expected a list of 2 tensors"),
        ("one_less", "plan own_stages:one_less returned 1 updates, expected 2."),
        ("a_row_twice", "plan own_stages:a_row_twice gave rollout 0 more than once."),
        ("beyond", "plan own_stages:beyond gave rollout 8, expected numbers from 0 to 7."),
        ("lists", "plan own_stages:lists: update 0 is a list, expected a torch.int64 tensor [R]"),
        ("empty", "plan own_stages:empty: update 1 has no rollouts."),
    ],
)
def test_a_plan_that_cuts_wrongly_is_an_error_before_anything_is_sampled(plan, message):
    import own_stages  # pyright: ignore[reportMissingImports]

    good = cp.method("dapo")
    method = dataclasses.replace(good, planner=as_stage(getattr(own_stages, plan)))
    with pytest.raises(ValueError) as error:
        method.check_plan(num_prompts=4, group_size=2, num_updates=2)
    assert message in str(error.value)
