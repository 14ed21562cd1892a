"""What cannot be done is said in one line before training starts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise.hosts.trl import CreditMixin
from counterpoise.hosts.trl.checks import check_trainer, check_version
from counterpoise.hosts.trl.method import setup
from helpers import trl_tiny

pytestmark = pytest.mark.hosts


def stand_in(method="delta", *, processes=1, parallelism=None, fsdp=False, **args):
    """What ``check_trainer`` looks at, without a world of processes."""
    config = trl_tiny.CreditGRPOConfig(
        output_dir="unused", **trl_tiny.SMALL | {"method": method} | args
    )
    decoder = torch.nn.Linear(1, 1)
    model = SimpleNamespace(get_decoder=lambda: decoder)
    trainer = SimpleNamespace(
        args=config,
        num_generations=config.num_generations,
        beta=config.beta,
        temperature=config.temperature,
        model=model,
        is_fsdp_enabled=fsdp,
        is_deepspeed_enabled=False,
        accelerator=SimpleNamespace(
            num_processes=processes, parallelism_config=parallelism, unwrap_model=lambda m: m
        ),
    )
    return trainer, config.setup()


def test_a_sound_setting_passes():
    check_trainer(*stand_in("delta", processes=2, plan="query_preserved"))


@pytest.mark.parametrize(
    ("axes", "stage"),
    [
        ({"credit": {"corrections": 2}}, "edits"),
        ({"plan": {"name": "reward_balanced", "mode": "buffer"}}, "reward_balanced"),
        ({"plan": "dynamic_sampling"}, "dynamic_sampling"),
    ],
)
def test_a_stage_that_samples_more(axes, stage):
    with pytest.raises(ValueError, match=f"{stage} samples more rollouts .* TRL samples by itself"):
        setup("ibpo", axes, own_advantage=True, own_loss=True, loss_type="dapo")


def test_a_group_that_straddles_processes():
    trainer, made = stand_in(
        processes=2,
        per_device_train_batch_size=3,
        steps_per_generation=4,
        num_generations=2,
        gradient_accumulation_steps=4,
    )
    check_trainer(trainer, made)
    trainer.num_generations = 8
    with pytest.raises(
        ValueError, match="a group of 8 rollouts would straddle processes: each holds 12 rows"
    ):
        check_trainer(trainer, made)


@pytest.mark.parametrize(
    ("size", "name"), [("cp_size", "context"), ("sp_size", "sequence"), ("tp_size", "tensor")]
)
def test_parallelism_within_a_rollout(size, name):
    with pytest.raises(ValueError, match=f"{name} parallelism \\({size} 2\\) is not supported"):
        check_trainer(*stand_in(parallelism=SimpleNamespace(**{size: 2})))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"method_loss": False, "importance_sampling_level": "sequence"},
            "gives every token of a rollout the rollout's mean credit. Set it to 'token'",
        ),
        (
            {"ledger_every": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 2},
            "an update holds parts of several: steps_per_generation is 2",
        ),
        (
            {"method": "dapo", "method_axes": {"credit": ["kl_penalty"]}},
            "reads ref_logp_NT.*beta > 0",
        ),
        (
            {"method": "dfpo_min", "top_entropy_quantile": 0.2},
            "top_entropy_quantile is part of TRL's loss",
        ),
        (
            {"method": "dfpo_min", "off_policy_mask_threshold": 0.1},
            "off_policy_mask_threshold is part of TRL's loss",
        ),
        (
            {"plan": "query_preserved", "steps_per_generation": 3},
            "must be a multiple of gradient_accumulation_steps",
        ),
        (
            {"plan": "query_preserved", "num_generations": 16},
            "2 prompts per generation do not divide into 4 updates",
        ),
        ({"method_axes": {"credit": {"proxy": "topk"}}, "fsdp": True}, "FSDP and DeepSpeed shard"),
        (
            {"method_axes": {"credit": {"proxy": "head"}}, "temperature": 0.7},
            "at temperature 1, and temperature of TRL's config is 0.7. Give the rule",
        ),
    ],
)
def test_combinations_that_do_not_work(args, message):
    with pytest.raises(ValueError, match=message):
        check_trainer(*stand_in(**args))


def test_liger_of_old_trl():
    trainer, made = stand_in()
    trainer.use_liger_kernel = True
    with pytest.raises(ValueError, match="use_liger_kernel=True computes the loss past the hook"):
        check_trainer(trainer, made)


def test_luspo_of_trl_1_9(monkeypatch):
    """Its token losses are not masked; our own losses do not read it unless there is a KL term."""
    import trl

    monkeypatch.setattr(trl, "__version__", "1.9.2")
    with pytest.raises(
        ValueError, match="luspo of trl 1.9.2 averages token losses over padding. Take trl >= 1.10"
    ):
        check_trainer(*stand_in("delta", method_loss=False, loss_type="luspo"))
    check_trainer(*stand_in("tpo"))
    with pytest.raises(ValueError, match="luspo of trl 1.9.2"):
        check_trainer(*stand_in("tpo", beta=0.1))


def test_switched_off_refuses_nothing():
    check_trainer(
        *stand_in(
            "uniform",
            processes=2,
            mask_truncated_completions=True,
            parallelism=SimpleNamespace(tp_size=2),
        )
    )


@pytest.mark.parametrize("version", ["0.29.1", "1.8.0", "1.15.0"])
def test_wrong_versions(version):
    with pytest.raises(ValueError, match=f"works with trl >= 1.9, != 1.15.0, found {version}"):
        check_version(version)


@pytest.mark.parametrize("version", ["1.9.0", "1.14.2", "1.16.0", "1.17.0.dev0", "2.0.0"])
def test_right_versions(version):
    check_version(version)


def test_a_model_without_a_backbone(tmp_path):
    class Bare(type(trl_tiny.tiny_model())):
        def get_decoder(self):
            return None

    model = trl_tiny.tiny_model()
    model.__class__ = Bare
    with pytest.raises(ValueError, match="Bare shows no backbone"):
        trl_tiny.ours(tmp_path, args={"method": "delta"}, model=model)


def test_a_head_that_is_more_than_a_weight(tmp_path):
    """DelTA's proxies that read the head, on a model that does something more to its logits."""

    class Shifted(type(trl_tiny.tiny_model())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits + torch.arange(out.logits.shape[-1])
            return out

    model = trl_tiny.tiny_model()
    model.__class__ = Shifted
    with pytest.raises(
        ValueError, match="Shifted: its logits are not head weight x last hidden state.*proxy 'row'"
    ):
        trl_tiny.ours(
            tmp_path,
            args={"method": "delta", "method_axes": {"credit": {"proxy": "topk"}}},
            model=model,
        )


def test_a_plain_config(tmp_path):
    with pytest.raises(ValueError, match="args must be a CreditGRPOConfig, got GRPOConfig"):
        trl_tiny._trainer(
            trl_tiny.CreditGRPOTrainer,
            trl_tiny.GRPOConfig(output_dir=str(tmp_path), **trl_tiny.SMALL),
            0,
            {},
        )


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("trl", "RLOOTrainer"),
        ("trl", "SFTTrainer"),
        ("trl.experimental.async_grpo", "AsyncGRPOTrainer"),
        ("trl.experimental.tpo", "TPOTrainer"),
        ("trl.experimental.gmpo", "GMPOTrainer"),
    ],
)
def test_the_mixin_before_another_trainer(module, name, tmp_path):
    """One line that says what works, before TRL makes anything of the arguments."""
    try:
        other = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.skip(f"this TRL has no {name}")
    mine = type("Mine", (CreditMixin, other), {})
    args = trl_tiny.CreditGRPOConfig(output_dir=str(tmp_path), method="delta", **trl_tiny.SMALL)
    with pytest.raises(ValueError, match="trl.GRPOTrainer and subclasses of your own") as refusal:
        mine(trl_tiny.tiny_model(), reward_funcs=trl_tiny.graded, args=args)
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_mixin_before_a_subclass_of_your_own(tmp_path):
    class Base(trl_tiny.GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs)

    trained = []
    for cls in (type("Mine", (CreditMixin, Base), {}), trl_tiny.CreditGRPOTrainer):
        trainer = trl_tiny.ours(tmp_path, cls=cls, args={"method": "delta", "max_steps": 1})
        trainer.train()
        trained.append(trl_tiny.weights(trainer))
    trl_tiny.assert_identical(*trained)


def test_rewards_alone_keep_the_sequence_level():
    """Nothing is lost where all tokens of a rollout have one credit."""
    sequence = {"method_loss": False, "importance_sampling_level": "sequence"}
    check_trainer(*stand_in("dapo", **sequence))
    check_trainer(*stand_in("f_grpo", **sequence))


class WithImages(trl_tiny.GRPOTrainer):
    """TRL as it is with a model for images: its output carries them, wherever they came from."""

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        pixels = torch.zeros(len(output["prompt_ids"]), 3, 2, 2)
        return {**output, "pixel_values": pixels, "num_images": [1] * len(pixels)}


@pytest.mark.parametrize(
    ("why", "args"),
    [
        ("a forward of ours", {"method": "ktae", "steps_per_generation": 2}),
        ("plan or ledger", {"method": "dapo", "plan": "query_preserved"}),
        ("plan or ledger", {"method": "dfpo_min"}),
        ("plan or ledger", {"method": "dapo", "ledger_every": 1}),
    ],
)
def test_images_in_trls_output(why, args, tmp_path):
    """Whatever the column is called: an iterable dataset names none."""
    mine = type("Mine", (CreditMixin, WithImages), {})
    data = trl_tiny.prompts().to_iterable_dataset()
    trainer = trl_tiny.ours(tmp_path, cls=mine, args=args, train_dataset=data)
    with pytest.raises(ValueError, match=rf"images \(pixel_values, num_images in .*: {why}"):
        trainer.train()
