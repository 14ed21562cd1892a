"""CreditGRPOConfig: from Python, YAML and the command line; what a method sets, what is said about
settings that are not used.
"""

from __future__ import annotations

import dataclasses
import warnings

import pytest

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer
from counterpoise.hosts.trl.selftest import tiny_model, tiny_tokenizer
from helpers import trl_tiny

pytestmark = pytest.mark.hosts


def config(**args):
    return CreditGRPOConfig(output_dir="unused", **trl_tiny.SMALL | args)


def test_the_command_line(tmp_path):
    words = [
        "--output_dir",
        str(tmp_path),
        "--use_cpu",
        "true",
        "--bf16",
        "false",
        "--report_to",
        "none",
        "--method",
        "dapo",
    ]
    words += [
        "--method_axes",
        '{"credit": [{"name": "top_entropy", "fraction": 0.5}]}',
        "--plan",
        "query_preserved",
    ]
    words += [
        "--method_loss",
        "false",
        "--ledger_every",
        "3",
        "--ledger_decompose",
        "sign",
        "category",
    ]
    (args,) = trl.TrlParser(CreditGRPOConfig).parse_args_and_config(words)
    assert args.method_axes == {"credit": [{"name": "top_entropy", "fraction": 0.5}]}
    assert (args.method, args.plan, args.method_loss, args.method_advantage) == (
        "dapo",
        "query_preserved",
        False,
        True,
    )
    assert (args.ledger_every, args.ledger_decompose) == (3, ["sign", "category"])
    made = args.setup()
    assert made.method.needs == {"entropy_NT"}
    assert made.method.describe()["plan"] == {"name": "query_preserved"}


def test_a_yaml_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"output_dir: {tmp_path}\nuse_cpu: true\nbf16: false\nreport_to: none\nmethod: fade\n"
        "method_axes: {controller: {rate: 0.1}}\nplan: {name: reward_balanced, mode: per_query}\n"
    )
    (args,) = trl.TrlParser(CreditGRPOConfig).parse_args_and_config(["--config", str(file)])
    described = args.setup().method.describe()
    assert described["controller"] == {"name": "fade", "rate": 0.1}
    assert described["plan"] == {"name": "reward_balanced", "mode": "per_query"}


def test_every_field_has_help():
    own = {f.name for f in dataclasses.fields(CreditGRPOConfig)} - {
        f.name for f in dataclasses.fields(trl.GRPOConfig)
    }
    assert own == {
        "solution_column",
        "feedback_column",
        "method",
        "method_axes",
        "plan",
        "method_advantage",
        "method_loss",
        "success",
        "success_reward",
        "ledger_every",
        "ledger_decompose",
        "ledger_own_tokens",
    }
    for field in dataclasses.fields(CreditGRPOConfig):
        if field.name in own:
            assert len(field.metadata["help"]) > 30
    assert "A counterpoise preset" in trl.TrlParser(CreditGRPOConfig).format_help()


def test_a_method_speaks_in_trls_settings():
    args = config(method="delta")
    assert (args.loss_type, args.epsilon, args.epsilon_high, args.delta) == (
        "dapo",
        0.2,
        0.28,
        10.0,
    )
    args = config(method="gspo")
    assert (args.loss_type, args.importance_sampling_level, args.epsilon, args.epsilon_high) == (
        "grpo",
        "sequence",
        3e-4,
        4e-4,
    )
    args = config(method="delta", method_loss=False, loss_type="vespo")
    assert (args.loss_type, args.epsilon_high, args.delta) == ("vespo", None, None)


def test_uniform_sets_nothing():
    plain, ours = trl.GRPOConfig(output_dir="unused", **trl_tiny.SMALL), config(method="uniform")
    for field in dataclasses.fields(trl.GRPOConfig):
        if field.name not in ("accelerator_config", "run_name", "logging_dir"):
            assert getattr(ours, field.name) == getattr(plain, field.name), field.name


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"method": "delta", "epsilon": 0.1},
            "epsilon=0.1 is not used: method 'delta' sets it to 0.2",
        ),
        (
            {"method": "dfpo_min", "epsilon": 0.1},
            "epsilon=0.1 is not used: method 'dfpo_min' brings its own. method_loss=False",
        ),
        (
            {"method": "rloo", "scale_rewards": "batch"},
            "scale_rewards='batch' is not used: .*method_advantage=False",
        ),
        (
            {"method": "sapo", "epsilon": 0.1},
            "epsilon=0.1 is not used: method 'sapo' brings its own. method_loss=False",
        ),
        (
            {"method": "dapo", "method_loss": False, "method_axes": {"loss": "clipped"}},
            "method_axes: the axis 'loss' is not used: method_loss=False keeps TRL's",
        ),
        (
            {"method": "dapo", "method_advantage": False, "method_axes": {"advantage": "signs"}},
            "method_axes: the axis 'advantage' is not used: method_advantage=False keeps TRL's",
        ),
    ],
)
def test_a_setting_that_is_not_used_is_warned_about(args, message):
    with pytest.warns(UserWarning, match=message):
        config(**args)


def test_a_config_that_is_changed_after_it_was_made(tmp_path):
    """The method has no longer a say in TRL's fields."""
    args = config(method="dapo")
    args.method = "delta"
    with pytest.raises(ValueError, match="delta is None, and method 'delta' set it to 10.0"):
        CreditGRPOTrainer(
            model=tiny_model(0),
            reward_funcs=trl_tiny.graded,
            args=args,
            train_dataset=trl_tiny.prompts(),
            processing_class=tiny_tokenizer(),
        )


@pytest.mark.parametrize(("loss_type", "name"), [("sapo", "per_sequence"), ("bnpo", "per_token")])
def test_the_ledgers_reduction_is_that_of_the_loss_that_trains(loss_type, name):
    setup = config(method="grpo", method_loss=False, loss_type=loss_type).setup()
    assert setup.method.describe()["reduction"]["name"] == name


def test_no_warning_without_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        config(method="delta", plan="query_preserved")
        config(method="dfpo_min")
        config(method="uniform", epsilon=0.1, scale_rewards="batch")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"method": "delt"}, "unknown method 'delt'. Did you mean 'delta'"),
        (
            {"method": "shared_prefix"},
            "a credit rule. .*method='dapo', method_axes={credit: .shared_prefix.}",
        ),
        ({"method": "unifrom"}, "unknown method 'unifrom'. Did you mean 'uniform'"),
        (
            {"method": "dapo", "method_axes": {"kredit": []}},
            "method_axes: unknown axis 'kredit'. Did you mean 'credit'",
        ),
        ({"method": "dapo", "method_axes": "[1, 2]"}, "method_axes: expected a mapping, got"),
        ({"method": "dapo", "method_axes": "{a: ["}, "method_axes: .* is not YAML"),
        (
            {"method": "dapo", "plan": "query_preservd"},
            "unknown plan 'query_preservd'. Did you mean 'query_preserved'",
        ),
        (
            {"method": "uniform", "method_axes": {"credit": ["delta"]}},
            "method='uniform' leaves everything but the plan to TRL",
        ),
        ({"method": "dapo", "ledger_every": -1}, "ledger_every: expected 0"),
        (
            {"method": "dapo", "ledger_decompose": ["signs"]},
            "unknown axis 'signs'. Did you mean 'sign'",
        ),
        (
            {"method": "dapo", "num_generations": 1},
            "group_zscore compares the rollouts of one prompt.*batch_whitened",
        ),
        (
            {
                "method": "grpo",
                "method_axes": {"loss": ["clipped", {"name": "kl", "estimator": "k2"}]},
            },
            "TRL has the k3 estimator",
        ),
    ],
)
def test_bad_settings(args, message):
    with pytest.raises(ValueError, match=message):
        config(**args)


def test_stages_of_your_own_by_import_path(tmp_path):
    """From the command line's strings to a training: rule, advantage, loss and plan."""
    own = "hosts.trl.own_stages"
    axes = f'{{"credit": ["{own}:last_token"], "advantage": "{own}:half_of_the_reward"}}'
    args = {"method": "dapo", "method_axes": axes, "plan": f"{own}:backwards", "max_steps": 4}
    trainer = trl_tiny.ours(tmp_path / "rule", args=args)
    trainer.train()
    assert [rows[0].item() for rows in trainer.credit_plan] == [24, 16, 8, 0]
    for micro in trainer._buffered_inputs:
        expected_N = micro["cp_reward"] / 2
        assert (micro["cp_credit"] != 0).sum(1).tolist() == (expected_N != 0).tolist()
        assert micro["cp_credit"].sum(1).tolist() == expected_N.tolist()
    loss = {"method": "dapo", "method_axes": {"loss": f"{own}:plain"}, "max_steps": 1}
    trainer = trl_tiny.ours(tmp_path / "loss", args=loss)
    assert trainer.credit_setup.has_own_loss
    trainer.train()


def test_an_import_path_that_leads_nowhere():
    with pytest.raises(ValueError, match="hosts.trl.own_stages.*'last_tokn'.*last_token"):
        config(method="dapo", method_axes={"credit": ["hosts.trl.own_stages:last_tokn"]})
