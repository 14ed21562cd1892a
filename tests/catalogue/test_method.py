"""Method, presets and the messages people see when they get something wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import counterpoise as cp
from counterpoise.catalogue.presets import PRESETS


def lists(**more) -> dict:
    return {
        "token_ids": [[5, 6, 7], [5, 8], [5, 6], [9]],
        "group": [0, 0, 1, 1],
        "reward": [1.0, 0.0, 0.0, 1.0],
        "sampler_logp": [[-0.1, -0.2, -0.3], [-0.1, -2.0], [-0.5, -0.5], [-1.0]],
        **more,
    }


def batch(**more) -> cp.TokenBatch:
    arguments = lists(**more)
    return cp.TokenBatch.from_lists(arguments.pop("token_ids"), **arguments)


def test_the_readme_snippet_gives_these_numbers():
    """Two rollouts a prompt, one right: z-score with unbiased std is +-0.5/(sqrt(0.5) + 1e-4) =
    +-0.70701 on every token.
    """
    out = cp.method("grpo").assign(batch())
    z = 0.5 / (0.5**0.5 + 1e-4)
    expected = torch.tensor([[z, z, z], [-z, -z, 0], [-z, -z, 0], [z, 0, 0]])
    torch.testing.assert_close(out.credit_NT, expected)
    assert out.weight_NT.tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 0], [1, 0, 0]]


def test_grpo_loss_and_gradient_by_hand():
    """At ratio 1 the clipped loss is -A and its coef A; per_sequence gives each rollout 1/4, spread
    over its tokens.
    """
    method, data = cp.method("grpo"), batch()
    out = method.assign(data)
    rows = method.rows(data, out, torch.arange(4))
    loss = method.loss(data.sampler_logp_NT, rows)
    torch.testing.assert_close(loss.coef_NT, out.credit_NT)
    torch.testing.assert_close(rows.scale_NT.sum(1), torch.full((4,), 0.25))
    assert rows.scale_NT[0].tolist() == pytest.approx([1 / 12] * 3)
    assert float((loss.loss_NT * rows.scale_NT).sum()) == pytest.approx(0.0, abs=1e-7)


def test_weights_of_one_are_grpo_bit_for_bit():
    plain, uniform = (
        cp.method("grpo").assign(batch()),
        cp.method("grpo", credit=["uniform"]).assign(batch()),
    )
    assert torch.equal(plain.credit_NT, uniform.credit_NT)


def test_clip_at_infinity_is_reinforce_at_ratio_one():
    data = batch()
    wide = cp.method("dapo", loss={"clip_low": float("inf"), "clip_high": float("inf")})
    plain = cp.method("dapo", loss="reinforce")
    coefs = []
    for method in (wide, plain):
        rows = method.rows(data, method.assign(data), torch.arange(4))
        coefs.append(method.loss(data.sampler_logp_NT, rows).coef_NT)
    assert torch.equal(*coefs)


def test_fade_at_one_one_is_group_mean():
    fixed = cp.method("fade", controller=None, advantage={"alpha": 1.0, "delta": 1.0}).assign(
        batch()
    )
    assert torch.equal(fixed.credit_NT, cp.method("dr_grpo").assign(batch()).credit_NT)


def test_delta_without_a_range_is_uniform():
    data = batch(hidden_NTD=torch.randn(4, 3, 5))
    flat = cp.method("delta", credit={"low": 1.0, "high": 1.0}).assign(data)
    assert torch.equal(flat.credit_NT, cp.method("dapo").assign(data).credit_NT)


def test_kl_as_a_second_loss_term_adds_its_derivative():
    """k3 = e^(ref - logp) - 1 - (ref - logp); -d/dlogp = e^(ref - logp) - 1, times coef 0.1."""
    data = batch(ref_logp=[[-0.2, -0.2, -0.3], [-0.1, -2.0], [-0.5, -0.5], [-1.0]])
    method = cp.method(
        "dapo", loss=[{"name": "clipped"}, {"name": "kl", "estimator": "k3", "coef": 0.1}]
    )
    assert "ref_logp_NT" in method.needs
    rows = method.rows(data, method.assign(data), torch.arange(4))
    without = cp.method("dapo", loss="clipped").loss(data.sampler_logp_NT, rows)
    extra_NT = method.loss(data.sampler_logp_NT, rows).coef_NT - without.coef_NT
    assert extra_NT[0].tolist() == pytest.approx(
        [0.1 * (2.718281828 ** (-0.1) - 1), 0, 0], abs=1e-6
    )


def test_controller_state_travels_and_sets_the_advantage():
    data = batch(entropy=[[1.0, 1.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0]])
    method = cp.method("fade")
    first = method.assign(data)
    second = method.assign(data, first.state)
    assert first.state["controller"]["p_hat"] == pytest.approx(0.5)
    assert second.state["controller"]["H_hat"] == pytest.approx(1.0)
    assert {key.split("/")[-1] for key in second.metrics} >= {
        "alpha",
        "delta",
        "p_hat",
        "H_hat",
        "m_S",
        "m_F",
    }


def test_methods_lists_axes_parameters_and_reference():
    known = cp.methods()
    assert set(PRESETS) <= set(known)
    for info in known.values():
        assert set(info["axes"]) == {
            "advantage",
            "credit",
            "loss",
            "reduction",
            "plan",
            "controller",
        }
        assert info["reference"]
        assert info["summary"]
    assert known["dapo"]["parameters"]["loss"]["clipped"]["clip_high"] == 0.28


def test_core_imports_torch_alone():
    """The library door must open without transformers, pyarrow and the like."""
    code = (
        "import sys; import counterpoise, torch; import counterpoise.catalogue.presets; bad ="
        " {'transformers', 'pyarrow', 'pydantic', 'typer', 'rich', 'scipy', 'pandas', 'rapidfuzz',"
        " 'trl'} & set(sys.modules); print(sorted(bad))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cp.method("grop"), "unknown method 'grop'. Did you mean 'grpo'"),
        (
            lambda: cp.method("shared_prefix"),
            "it is a credit rule. Set it on a method: method={name: dapo, credit: .shared_prefix.}",
        ),
        (
            lambda: cp.method("entropy_target"),
            "it is a controller. Set it .* method={name: dapo, controller: entropy_target}",
        ),
        (
            lambda: cp.method("group_mean"),
            "it is an advantage. .*{name: dapo, advantage: group_mean}",
        ),
        (
            lambda: cp.method("grpo", credit=["top_entrpy"]),
            "unknown credit rule 'top_entrpy'. Did you mean 'top_entropy'",
        ),
        (lambda: cp.method("grpo", loss="cliped"), "unknown loss 'cliped'. Did you mean 'clipped'"),
        (
            lambda: cp.method("grpo", advantges="signs"),
            "unknown axis 'advantges'. Did you mean 'advantage'",
        ),
        (
            lambda: cp.method("grpo", credit=[{"name": "top_entropy", "fractoin": 0.2}]),
            "no parameter 'fractoin'. Did you mean 'fraction'",
        ),
        (
            lambda: cp.method("grpo", credit=[{"name": "top_entropy", "fraction": 3}]),
            "fraction must be a number",
        ),
        (lambda: cp.method("grpo", loss={"clip_low": -1}), "clip_low must be"),
        (lambda: cp.method("grpo", loss=[]), "at least one term"),
        (
            lambda: cp.method("grpo", clip_high=0.3),
            r"unknown axis 'clip_high'. It is a parameter of clipped: write loss: \{clip_high: ...",
        ),
        (lambda: cp.method("grpo", plann="x"), "unknown axis 'plann'. Did you mean 'plan'"),
        (lambda: cp.method("grpo").assign([[1, 2]]), "expected a TokenBatch .* got a list"),
        (
            lambda: batch(reward=[None, 0, 0, 1]),
            "reward of rollout 0 is None, expected a number per rollout",
        ),
        (
            lambda: batch(group=["a", "a", "b", "b"]),
            "group of rollout 0 is str 'a', expected a whole number per rollout",
        ),
        (lambda: cp.method("grpo", credit={"fraction": 0.2}), "no stage whose parameters"),
        (
            lambda: cp.method("grpo", credit=[lambda credit_NT, batch: credit_NT[:1]]),
            r"returned shape \[1, 3\], expected \[2, 3\]",
        ),
        (
            lambda: cp.method("grpo", credit=[lambda credit_NT, batch: credit_NT * float("nan")]),
            "not finite",
        ),
        (
            lambda: cp.method("grpo", credit=[lambda credit_NT: credit_NT]),
            "does not run on a 2 x 3 example",
        ),
        (lambda: cp.credit.top_entropy(fractoin=0.2), "top_entropy has no parameter 'fractoin'"),
        (lambda: cp.method("grpo").assign(batch(group=[0, 1, 2, 3])), "batch_whitened"),
        (lambda: cp.method("top_entropy").assign(batch()), "top_entropy reads entropy_NT"),
        (
            lambda: batch(reward=[1.0, float("nan"), 0.0, 0.0]),
            r"reward_N is not finite, or beyond 1e\+15, at rollouts \[1\]",
        ),
        (
            lambda: batch(
                sampler_logp=[[-0.1, -0.2, float("inf")], [-0.1, -2.0], [-0.5, -0.5], [-1.0]]
            ),
            r"sampler_logp_NT .* rollouts \[0\]",
        ),
        (
            lambda: batch(sampler_logp=[[-0.1], [-0.1, -2.0], [-0.5, -0.5], [-1.0]]),
            "sampler_logp of rollout 0 has 1 number, expected 3",
        ),
        (
            lambda: batch(hidden_NTD=torch.zeros(4, 2, 5)),
            r"hidden_NTD has shape \[4, 2, 5\], expected \[4, 3, 'D'\]",
        ),
        (
            lambda: batch(token_ids=[[1], [], [2], [3]], sampler_logp=[[-1.0], [], [-1.0], [-1.0]]),
            r"rollouts \[1\] have no response token",
        ),
        (lambda: cp.TokenBatch.from_lists([], group=[], reward=[], sampler_logp=[]), "no rollouts"),
        (
            lambda: cp.method("grpo").plan(batch(), num_updates=0),
            "num_updates must be a whole number >= 1",
        ),
        (lambda: cp.method("dfpo_min").plan(batch(), num_updates=3), "at least 3 prompts, got 2"),
    ],
)
def test_mistakes_get_a_message_that_helps(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_nan_in_trainer_logp_names_the_rollout():
    method, data = cp.method("grpo"), batch()
    rows = method.rows(data, method.assign(data), torch.tensor([2, 3]))
    bad = rows.sampler_logp_NT.clone()
    bad[1, 0] = float("nan")
    with pytest.raises(
        ValueError, match=r"trainer_logp_NT gave a value that is not finite at rollouts \[3\]"
    ):
        method.loss(bad, rows)


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (lambda x: x[2:3], r"\[1, 3\]"),
        (lambda x: x[2:, :1], r"\[2, 1\]"),
        (lambda x: x[2], r"\[3\]"),
        (lambda x: x, r"\[4, 3\]"),
    ],
)
def test_log_probs_of_other_rows_than_those_of_the_loss_are_an_error(cut, shape):
    method, data = cp.method("grpo"), batch()
    rows = method.rows(data, method.assign(data), torch.tensor([2, 3]))
    with pytest.raises(ValueError, match=rf"shape {shape}, expected \[2, 3\].*rows.row_R"):
        method.loss(cut(data.sampler_logp_NT), rows)
    method.loss(data.sampler_logp_NT[rows.row_R], rows)


def test_two_losses_that_look_at_the_whole_update_are_refused():
    with pytest.raises(ValueError, match="losses clip_cov and dfpo each look at the whole update"):
        cp.method("grpo", loss=["clip_cov", "dfpo"])
    assert cp.method("grpo", loss=["clip_cov", "implied_value"]).needs_update_logp
