"""SDPO, OPSD and TOP-D: the values of their papers by hand, what a teacher reads, what holds at the
borders.
"""

from __future__ import annotations

import json
import math

import pytest
import torch

import counterpoise as cp
from counterpoise import credit as rules
from counterpoise.credit.hindsight import TEMPLATES, check_teacher, readings
from counterpoise.credit.teacher import proximal_reward
from counterpoise.rollouts import RolloutBatch
from counterpoise.types import Prompt
from helpers.credit_cases import assert_rows, batch_of, spread
from helpers.full_batch import make_batch


def taught(ids, *, has=None, **columns):
    batch = batch_of(ids, **columns)
    return batch.replace(has_teacher_N=torch.tensor(has or [True] * len(ids)))


def test_the_gap_is_the_credit():
    """Teacher -0.5, student -1.0: +0.5; without a teacher nothing, whatever the column holds."""
    batch = taught(
        [[1, 2], [3]],
        trainer_logp=[[-1.0, -0.5], [-2.0]],
        teacher_logp=[[-0.5, -2.5], [-1.0]],
        has=[True, False],
    )
    credit_NT = rules.teacher(spread([7.0, 7.0], batch), batch)
    assert_rows(credit_NT, [[0.5, -2.0], [0.0]])


def test_sdpo_weighs_a_token_by_its_ratio_up_to_2():
    """Credit 0.5 at ratio 3: coefficient 1.0; at ratio 1.5 it is 0.75; far ratios stay finite."""
    batch = taught(
        [[1], [2], [3]],
        reward=[1.0, 1.0, 1.0],
        trainer_logp=[[-1.0]] * 3,
        teacher_logp=[[-0.5]] * 3,
        sampler_logp=[[-1.5], [-1.5], [-90.0]],
    )
    method = cp.method("sdpo")
    credit = method.assign(batch)
    rows = method.rows(batch, credit, torch.arange(3))
    now_NT = torch.tensor([[-1.5 + math.log(3)], [-1.5 + math.log(1.5)], [-0.1]])
    loss = method.loss(now_NT.double(), rows)
    assert loss.coef_NT.flatten().tolist() == pytest.approx([1.0, 0.75, 1.0])
    assert rows.scale_NT.flatten().tolist() == pytest.approx([1 / 3] * 3)


def test_sdpo_trains_constant_groups_and_a_rollout_without_a_teacher_leaves_the_denominator():
    batch = taught(
        [[1, 2], [3, 4], [5]],
        reward=[1.0, 1.0, 1.0],
        trainer_logp=[[-1.0, -1.0], [-1.0, -1.0], [-1.0]],
        teacher_logp=[[-0.5, -2.0], [-0.1, -0.2], [-0.3]],
        has=[True, False, True],
    )
    method = cp.method("sdpo")
    credit = method.assign(batch)
    assert not credit.advantage_N.any()
    assert_rows(credit.credit_NT, [[0.5, -1.0], [0.0, 0.0], [0.7]])
    rows = method.rows(batch, credit, torch.arange(3))
    assert rows.scale_NT.max().item() == pytest.approx(1 / 3)  # tokens with credit
    assert credit.metrics["credit/teacher/taught_frac"] == pytest.approx(2 / 3)
    assert credit.metrics["credit/teacher/liked_frac"] == pytest.approx(2 / 3)


def test_tokens_of_an_environment_get_nothing():
    """A hole in the mask: no credit there, and TOP-D's later tokens are those of the model."""
    whole = taught([[1, 2, 3]], trainer_logp=[[-1.0] * 3], teacher_logp=[[-0.5, -0.1, -2.0]])
    mask_NT = torch.tensor([[True, False, True]])
    holed = whole.replace(mask_NT=mask_NT)
    assert_rows(rules.teacher(spread([1.0], holed), holed), [[0.5, 0.0, -1.0]])
    without = taught([[1, 3]], trainer_logp=[[-1.0] * 2], teacher_logp=[[-0.5, -2.0]])
    near_NT = rules.proximal_teacher(spread([1.0], holed), holed)
    assert near_NT[:, 1] == 0
    expected_NT = rules.proximal_teacher(spread([1.0], without), without)
    torch.testing.assert_close(near_NT[mask_NT], expected_NT.flatten())


@pytest.mark.parametrize(("rho", "expected"), [(1.0, 0.0), (2.0, 0.18232), (0.0, -0.22314)])
def test_the_reward_of_the_proximal_teacher(rho, expected):
    reward = proximal_reward(torch.tensor([rho], dtype=torch.float64).log(), 0.2)
    assert reward.item() == pytest.approx(expected, abs=5e-6)


def test_top_d_by_hand():
    """rho = (2, 0): returns -.04082, -.22314; as the whole group +-.70711. Three tokens show the
    returns themselves: (a - mean) / std."""
    two = taught([[1, 2]], teacher_logp=[[-1.0 + math.log(2), -80.0]])
    credit_NT = rules.proximal_teacher(spread([0.0], two), two)
    assert credit_NT.flatten().tolist() == pytest.approx([0.70711, -0.70711], abs=5e-6)
    three = taught(
        [[1, 2], [3]],
        sampler_logp=[[-2.0, -2.0], [-2.0]],
        teacher_logp=[[-2.0 + math.log(2), -80.0], [-2.0]],
    )
    values = torch.tensor([-0.04082, -0.22314, 0.0])
    expected = ((values - values.mean()) / values.std()).tolist()
    credit_NT = rules.proximal_teacher(spread([0.0, 0.0], three), three)
    assert credit_NT[three.mask_NT].tolist() == pytest.approx(expected, abs=1e-4)


def test_top_d_of_one_token_and_of_one_rollout():
    one = taught([[1]], teacher_logp=[[-0.2]])
    assert rules.proximal_teacher(spread([1.0], one), one).item() == 0
    for name in ("opsd", "top_d"):
        cp.method(name).check_group_size(1, "one")
    with pytest.raises(ValueError, match="compares the rollouts"):
        cp.method("sdpo").check_group_size(1, "one")
    alone = cp.method("opsd", credit=[{"name": "teacher", "source": "sibling"}])
    with pytest.raises(ValueError, match="teacher compares the rollouts"):
        alone.check_group_size(1, "one")


def test_the_expected_gradient_is_that_of_the_divergence():
    """Student (.5, .5), teacher (.8, .2): KL 0.22314, and the mean of -credit grad log p over
    sampled tokens is its gradient by the logits."""
    logits = torch.tensor([0.3, -0.3, 0.1]).double().requires_grad_()
    target = torch.tensor([0.7, 0.2, 0.1]).double().log()
    logp = logits.log_softmax(0)
    kl = (logp.exp() * (logp - target)).sum()
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    total = torch.zeros(3).double()
    for token in range(3):
        batch = taught(
            [[token]], trainer_logp=[[logp[token].item()]], teacher_logp=[[target[token].item()]]
        )
        credit = rules.teacher(spread([0.0], batch), batch).item()
        (gradient,) = torch.autograd.grad(-credit * logp[token], logits, retain_graph=True)
        total += logp[token].exp().item() * gradient
    torch.testing.assert_close(total, expected)
    half = torch.tensor([0.5, 0.5]).double()
    kl = (half * (half.log() - torch.tensor([0.8, 0.2]).double().log())).sum()
    assert kl.item() == pytest.approx(0.22314, abs=5e-6)


def test_mix_with_a_teacher_is_a_mixture_with_grpo():
    """SDPO, section 4.5, in a recipe's words: 0.9 GRPO + 0.1 teacher, survives JSON."""
    spec = {"name": "mix", "rules": ["uniform", "teacher"], "weights": [0.9, 0.1]}
    method, batch = cp.method("grpo", credit=[spec]), make_batch()
    credit = method.assign(batch)
    grpo_NT = cp.method("grpo").assign(batch).credit_NT
    sdpo_NT = cp.method("sdpo").assign(batch).credit_NT
    torch.testing.assert_close(credit.credit_NT, 0.9 * grpo_NT + 0.1 * sdpo_NT)
    assert method.has_teacher
    assert not cp.method("grpo").has_teacher
    again = cp.method(**json.loads(json.dumps(method.describe())))
    assert torch.equal(again.assign(batch).credit_NT, credit.credit_NT)
    assert credit.metrics["credit/mix/1_teacher/taught_frac"] == pytest.approx(12 / 16)


def test_rewards_change_nothing_but_who_demonstrates():
    batch = make_batch()
    for name in ("sdpo", "opsd", "top_d"):
        credit_NT = cp.method(name).assign(batch).credit_NT
        other = batch.replace(reward_N=1 - batch.reward_N)
        assert torch.equal(credit_NT, cp.method(name).assign(other).credit_NT)
        assert not credit_NT[~batch.has_teacher_N].any()


def test_a_rule_whose_work_a_teacher_would_lose_is_refused():
    with pytest.raises(ValueError, match="what top_entropy gives would be lost. Put teacher first"):
        cp.method("sdpo", credit=["top_entropy", "teacher"])
    cp.method("sdpo", credit=["teacher", "top_entropy"])


# what a teacher reads


def rollouts_of(texts, reward, group=None, prompts=None, feedback=None):
    batch = batch_of([[1]] * len(texts), group=group, reward=reward)
    prompts = prompts or [Prompt(str(k), f"p{k}", f"a{k}") for k in range(4)]
    return RolloutBatch(
        prompts, [[0]] * len(texts), texts, ["stop"] * len(texts), batch, 0, [], feedback=feedback
    )


SDPO = check_teacher("t", ("sibling", "feedback"), None, "average", 0.05)
SHORT = check_teacher(
    "t",
    ["sibling", "feedback"],
    {"sibling": "{prompt}|{demonstration}", "feedback": "{prompt}!{feedback}"},
    "policy",
    0.05,
)


def read(rollouts, templates=SHORT):
    every = readings(rollouts, rollouts.batch, templates)
    return [one and one.text for one in every]


def test_the_first_success_of_the_group_demonstrates_and_never_to_itself():
    rollouts = rollouts_of(["w", "x", "y", "z"], [0.0, 1.0, 0.7, 0.2])
    assert read(rollouts) == ["p0|x", "p0|y", "p0|x", "p0|x"]


def test_a_lone_success_has_no_teacher_and_two_teach_constant_groups():
    rollouts = rollouts_of(
        ["a", "b", "c", "d", "e"], [1.0, 0.0, 1.0, 1.0, 0.0], group=[0, 0, 1, 1, 2]
    )
    assert read(rollouts) == [None, "p0|a", "p1|d", "p1|c", None]


def test_feedback_teaches_where_no_sibling_does():
    rollouts = rollouts_of(
        ["a", "b", "c"], [1.0, 0.0, 0.0], group=[0, 0, 1], feedback=["", "bad b", "bad c"]
    )
    assert read(rollouts) == [None, "p0|a", "p1!bad c"]
    only = check_teacher("t", "feedback", "{prompt}!{feedback}", "policy", 0.05)
    assert read(rollouts, only) == [None, "p0!bad b", "p1!bad c"]


def test_a_demonstration_has_no_thinking_and_braces_in_it_are_text():
    texts = ["no", "<think>{x}\n7</think>\n{1: 2}", "so </think> <think> 3"]
    assert read(rollouts_of(texts, [0.0, 1.0, 1.0])) == ["p0|{1: 2}", None, "p0|{1: 2}"]


def test_success_is_that_of_the_task():
    rollouts = rollouts_of(["a", "b"], [0.5, 0.7])
    high = rollouts._replace(batch=rollouts.batch.replace(success=0.6))
    assert read(high) == ["p0|b", None]


def test_the_solution_is_the_worked_one_where_the_task_keeps_it():
    prompts = [
        Prompt("0", "p0", "15", {"solution": "7 + 8 = 15"}),
        Prompt("1", "p1", "3"),
        Prompt("2", "p2"),
    ]
    rollouts = rollouts_of(["a", "b", "c"], [0.0] * 3, group=[0, 1, 2], prompts=prompts)
    template = check_teacher("t", "solution", "{solution}<{prompt}", "initial", 0.05)
    assert read(rollouts, template) == ["7 + 8 = 15<p0", "3<p1", None]
    alone = check_teacher("t", "prompt", None, "other", 0.05)
    assert read(rollouts, alone) == ["p0", "p1", "p2"]


def test_default_templates_have_what_they_promise():
    assert list(SDPO.items()) == [(name, TEMPLATES[name]) for name in ("sibling", "feedback")]


BAD = [
    ({"source": "neighbour"}, "source must be one of sibling"),
    ({"source": []}, "source must be one of sibling"),
    ({"source": 3}, "source must be one of sibling"),
    ({"template": "{prompt} {demonstration}"}, "one text and there are 2 sources"),
    ({"template": {"solution": "{prompt} {solution}"}}, "no source here"),
    ({"template": 3}, "a text or a mapping"),
    ({"source": "solution", "template": "{prompt}"}, r"must have each of \{prompt\}, \{solution\}"),
    ({"source": "solution", "template": "{prompt} {solution} {x}"}, "no other field"),
    ({"source": "solution", "template": "{prompt} {solution!r}"}, "no other field"),
    ({"source": "solution", "template": "{prompt} {solution} {}"}, "no other field"),
    ({"source": "solution", "template": "{prompt"}, "template of 'solution'"),
    ({"model": ""}, "model is empty"),
    ({"model": 3}, "model must be"),
    ({"rate": 0}, "rate must be a number > 0"),
    ({"rate": 1.5}, "rate must be a number > 0 and <= 1"),
]


@pytest.mark.parametrize(("params", "message"), BAD)
def test_wrong_parameters_are_refused_when_the_method_is_made(params, message):
    with pytest.raises(ValueError, match=message):
        cp.method("sdpo", credit=params)


def test_alpha_is_a_share():
    with pytest.raises(ValueError, match="alpha must be a number > 0 and < 1"):
        cp.method("top_d", credit={"alpha": 1.0})
