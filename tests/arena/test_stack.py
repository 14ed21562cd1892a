"""Members of a stack do what the trainer does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow.parquet import read_table
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from counterpoise.arena import importance
from counterpoise.arena.batch import bench_of, train_batch
from counterpoise.arena.collect import Bench
from counterpoise.arena.crew import Crew
from counterpoise.arena.evaluate import evaluate_stack
from counterpoise.arena.member import Member
from counterpoise.arena.shared import shares_stack
from counterpoise.arena.stack import stack_of
from counterpoise.catalogue.presets import PRESETS
from counterpoise.catalogue.registry import method as make_method
from counterpoise.policy import Policy, load_model, measure_importance, token_logp
from counterpoise.run.read import checkpoints
from counterpoise.tasks import task as make_task
from counterpoise.trainer.config import Config, parse_config
from counterpoise.trainer.evaluate import evaluate
from counterpoise.trainer.loop import train
from helpers.stacks import put_member


def recipe(method: object, seed: int = 0, lr: float = 1e-4, **changes: object) -> Config:
    return parse_config(
        {
            "seed": seed,
            "task": {"name": "arithmetic", "difficulty": "easy"},
            "method": method,
            "num_batches": 1,
            "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 64},
            # at AdamW's usual eps the first update is a sign, which rounding near 0 flips
            "optimizer": {"lr": lr, "updates_per_batch": 2, "eps": 1e-2, "weight_decay": 0.1},
            "eval": {"every": 0},
            "ledger": {"every": 0},
            "trackers": [],
            "device": "cpu",
            **changes,
        }
    )


def bench(configs: list[Config], num_workers: int = 0) -> tuple[Bench, list[Member]]:
    policy = load_model("bundled")
    crew = Crew(policy, make_task(**configs[0].task), configs[0], num_workers)
    made = {str(c.method): make_method(**c.method) for c in configs}
    members = [Member(config, made[str(config.method)]) for config in configs]
    return bench_of(stack_of(policy.model, len(configs)), crew), members


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# seeds of which no draw is within 1e-6 of the edge between two tokens, where rounding decides
SPECS = [
    ("grpo", 3, 1e-4),
    ("grpo", 4, 1e-3),
    ("delta", 5, 3e-4),
    ("tpo", 6, 1e-4),
    ("clip_cov", 7, 3e-4),
    ({"name": "ibpo"}, 8, 1e-4),
    ({"name": "grpo", "loss": ["clipped", {"name": "kl", "coef": 0.1}]}, 9, 1e-4),
    ("vimpo", 11, 1e-3),
    ("vimpo", 4, 1e-4),
    ("oar", 6, 1e-4),
]


@pytest.fixture(autouse=True)
def _loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """OAR's scores are differences of distributions that hardly differ, and with its own noise
    float32 rounds half of them by more than a thousandth, in the trainer and in a stack.
    """
    monkeypatch.setattr(importance, "SIGMA", 0.05)
    monkeypatch.setitem(measure_importance.__kwdefaults__, "sigma", 0.05)


def apart(stack: Bench, s: int, config: Config) -> tuple[float, float]:
    """How far the trainer takes the weights, and how far from there member s is, as a share."""
    train(config)
    start = flat(load_model("bundled").model)
    trained = flat(load_model(str(checkpoints(Path(config.run_dir))[-1])).model)
    model = load_model("bundled").model
    put_member(stack.stack, s, model)
    moved = torch.linalg.vector_norm(trained - start)
    return float(moved), float(torch.linalg.vector_norm(flat(model) - trained) / moved)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_member_samples_and_learns_as_the_trainer_does(tmp_path: Path, num_workers: int) -> None:
    specs = SPECS if num_workers == 0 else [SPECS[2], *SPECS[-2:]]
    configs = [recipe(*spec, run_dir=str(tmp_path / str(k))) for k, spec in enumerate(specs)]
    stack, members = bench(configs, num_workers)
    outcome = train_batch(stack, members, 0)
    stack.crew.close()
    assert len({int(n) for n in outcome.collected.texts.mask_SNT.sum(-1).flatten()}) > 3
    for s, config in enumerate(configs):
        moved, gap = apart(stack, s, config)
        assert moved > 5e-4
        assert gap < 2e-4
        table = read_table(tmp_path / str(s) / "rollouts" / "batch_000000.parquet").to_pydict()
        texts = outcome.collected.texts
        tokens = [ids[m].tolist() for ids, m in zip(texts.response_SNT[s], texts.mask_SNT[s])]
        assert tokens == [list(ids) for ids in table["token_ids"]]


def test_a_policy_that_has_left_its_reference_goes_on_as_in_the_trainer(tmp_path: Path) -> None:
    """Until the second batch there is no KL, and VIMPO's actor has no credit; the rate makes its
    log-ratios large against rounding.
    """
    specs = [("vimpo", 3, 1e-2), ("vimpo", 4, 1e-2), ("oar", 6, 1e-4)]
    configs = [
        recipe(*spec, run_dir=str(tmp_path / str(k)), num_batches=2) for k, spec in enumerate(specs)
    ]
    stack, members = bench(configs)
    for batch_number in range(2):
        outcome = train_batch(stack, members, batch_number)
    kl_SNT = outcome.collected.texts.ref_kl_SNT
    assert kl_SNT is not None and kl_SNT[:2].mean() > 1e-4
    assert max(apart(stack, s, config)[1] for s, config in enumerate(configs)) < 2e-4


def test_ratios_start_where_each_members_rules_say(tmp_path: Path) -> None:
    """With top-p the sampler's log-probs are not the trainer's; a rollout with a large gap is left
    out, and a method without the rule goes on from the sampler's.
    """
    rollouts = {"prompts": 4, "group_size": 4, "max_new_tokens": 64, "top_p": 0.9}
    moved, capped = ({"name": "mismatch_weight", "mode": mode} for mode in ("none", "tis"))
    cut = {"name": "mismatch_weight", "mode": "geo", "low": 0.994}
    methods = [
        {"name": "dapo", "credit": [moved]},
        {"name": "dapo", "credit": [capped]},
        {"name": "dapo", "credit": [cut]},
        "dapo",
        {"name": "tpo", "credit": [moved]},
        {"name": "vimpo", "credit": [cut]},
    ]
    configs = [
        recipe(method, 3, run_dir=str(tmp_path / str(k)), rollouts=rollouts)
        for k, method in enumerate(methods)
    ]
    stack, members = bench(configs)
    outcome = train_batch(stack, members, 0)
    kept = [np.concatenate(one.scale).any(1).mean() for one in outcome.collected.prepared]
    assert 0 < kept[2] < kept[0] == 1
    assert max(apart(stack, s, config)[1] for s, config in enumerate(configs)) < 2e-4


def test_epochs_are_the_trainers(tmp_path: Path) -> None:
    """Two updates, gone through three times, by two methods side by side; rounding adds up over
    them.
    """
    optimizer = {"lr": 1e-4, "updates_per_batch": 2, "epochs": 3, "eps": 1e-2}
    configs = [
        recipe(name, seed, run_dir=str(tmp_path / name), optimizer=optimizer)
        for name, seed in (("tpo", 6), ("grpo", 3))
    ]
    stack, members = bench(configs)
    assert len(train_batch(stack, members, 0).norms) == 6
    for s, config in enumerate(configs):
        assert members[s].num_updates == config.num_updates == 6
        assert apart(stack, s, config)[1] < 2e-3


def test_methods_that_sample_more_or_have_a_teacher_train_alone() -> None:
    alone = {name for name in PRESETS if not shares_stack(make_method(name))}
    assert alone == {"vine_ppo", "spo_chain", "sdpo", "opsd", "top_d"}
    dynamic = make_method("dapo", plan={"name": "dynamic_sampling", "max_rounds": 3})
    assert not shares_stack(dynamic)


def test_evaluation_is_the_trainers() -> None:
    config = recipe("grpo")
    stack, members = bench([config, config])
    first, second = evaluate_stack(stack, members, num_prompts=6, samples=4)
    policy, task = load_model("bundled"), make_task(**config.task)
    sampled = evaluate(policy, task, config, prompts=6, samples=4)
    greedy = evaluate(policy, task, config, prompts=6, temperature=0.0)
    assert first == second
    assert first["sampled"] == sampled.reward_PK.mean()
    assert first["greedy"] == greedy.reward_PK.mean()
    assert first["pass@4"] == sampled.pass_at[4]
    assert first["length"] == pytest.approx(sampled.mean_length)
    assert first["entropy"] == pytest.approx(sampled.mean_entropy, rel=1e-4)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "untied"])
def test_other_families_have_the_models_log_probs_and_gradients(kind: str) -> None:
    model = small_model(kind)
    stack = stack_of(model, 2)
    prompts, ids_NT = [[5, 6, 7], [8]], torch.tensor([[9, 10, 11], [12, 13, 0]])
    mask_NT = torch.tensor([[True, True, True], [True, True, False]])
    expected_NT = token_logp(model, prompts, ids_NT, mask_NT)
    (expected_NT * torch.arange(6.0).view(2, 3)).sum().backward()
    got_SNT = stack_logp_of(stack, prompts, ids_NT, mask_NT)
    (got_SNT[1] * torch.arange(6.0).view(2, 3)).sum().backward()
    torch.testing.assert_close(got_SNT[0], expected_NT, atol=1e-5, rtol=1e-5)
    gradient = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    total = torch.linalg.vector_norm(torch.stack(gradient))
    torch.testing.assert_close(stack.grad_SP[1].norm(), total, atol=1e-5, rtol=1e-4)
    assert stack.grad_SP[0].abs().max() == 0


def small_model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": kind != "untied",
    }
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


def stack_logp_of(stack, prompts, ids_NT, mask_NT):
    from counterpoise.arena.texts import pad_questions, stack_logp, texts_of

    asked = pad_questions([prompts, prompts], torch.device("cpu"))
    both = [x.expand(2, *x.shape) for x in (ids_NT, mask_NT.sum(1), torch.zeros(2, 3))]
    return stack_logp(stack, stack.weights, texts_of(asked, 1, *both), 1.0)


def test_a_member_that_diverges_stops_alone() -> None:
    configs = [recipe("grpo", seed) for seed in (3, 4)]
    (both, members), (alone, single) = bench(configs), bench(configs[1:])
    with torch.no_grad():
        both.stack.theta_SP[0].fill_(float("nan"))
    train_batch(both, members, 0)
    train_batch(alone, single, 0)
    assert "not finite" in members[0].stopped
    assert not members[1].stopped and members[1].num_updates == 2
    torch.testing.assert_close(both.stack.theta_SP[1], alone.stack.theta_SP[0])


def test_an_infinite_gradient_stops_a_member_and_leaves_its_weights(monkeypatch) -> None:
    import counterpoise.arena.update as update

    configs = [recipe("grpo", seed) for seed in (3, 4)]
    stack, members = bench(configs)
    before = stack.stack.theta_SP[0].clone()
    clip = update.clip_

    def broken(grad_SP: torch.Tensor, limit: float | None) -> torch.Tensor:
        grad_SP[0, 0] = float("inf")
        return clip(grad_SP, limit)

    monkeypatch.setattr(update, "clip_", broken)
    train_batch(stack, members, 0)
    assert members[0].stopped == "the gradient's norm is not finite"
    assert torch.equal(stack.stack.theta_SP[0], before)
    assert members[1].num_updates == 2 and not members[1].stopped


def test_policy_is_not_needed_by_the_crew() -> None:
    config = recipe("grpo")
    policy = load_model("bundled")
    crew = Crew(policy, make_task(**config.task), config)
    assert isinstance(crew.host.policy, Policy) and crew.host.policy.model is None
