"""What needs a GPU: the Triton kernels against torch, the engine against a teacher-forced forward,
options of the update.

pytest tests/gpu
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1]))

from counterpoise import method as make_method
from counterpoise.ledger.calculus.decompose import change_along
from counterpoise.ledger.calculus.logprobs import Texts, of_model, trainable
from counterpoise.policy import load_model, measure, pack, token_logp
from counterpoise.policy.precision import autocast
from counterpoise.sampling import decoder, sample
from counterpoise.sampling import draw as plain
from counterpoise.sampling.kernels import triton_decoder as decoder_triton
from counterpoise.sampling.kernels import triton_draw as kernels_draw
from counterpoise.tasks import task
from counterpoise.trainer.collect import RolloutSampler, collect
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.update import apply_update, prepare_update
from helpers.tiny_models import tiny

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13]]
STOPS = [2, 3, 4, 5]
SIZES = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
SIZES |= {"initializer_range": 0.1}


@pytest.fixture(autouse=True)
def exact_matmuls():
    torch.backends.cuda.matmul.allow_tf32 = False


def on_gpu(name, dtype=torch.float32):
    sizes = SIZES | ({"head_dim": 24} if name == "qwen3" else {})
    return tiny(name, **sizes).to(dtype).cuda()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_decode_step_with_kernels_equals_one_without(name, dtype):
    model = on_gpu(name, dtype)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 1.5)
    weights, shape = decoder.fuse_weights(model, dtype), decoder.shape_of(model)
    cos, sin = decoder.rotary(model, 200)
    keys, values = torch.randn(
        2, 2, 5, shape.num_kv_heads, 200, shape.head_size, device="cuda", dtype=dtype
    )
    state = (
        torch.randint(300, (5,), device="cuda"),
        torch.tensor([0, 3, 64, 199, 131], device="cuda"),
    )
    copies = keys.clone(), values.clone()
    expected = decoder.decode(weights, shape, *state, keys, values, cos, sin)
    found = decoder_triton.decode(weights, shape, *state, *copies, cos, sin)
    bound = 2e-5 if dtype == torch.float32 else 0.1
    print(
        f"{name} {dtype}: worst {(found - expected).abs().max():.2g} of {expected.abs().max():.2g}"
    )
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)
    torch.testing.assert_close(copies[0], keys, atol=bound, rtol=bound)
    torch.testing.assert_close(copies[1], values, atol=bound, rtol=bound)


@pytest.mark.parametrize(
    ("num_tokens", "temperature"), [(29, 1.0), (5000, 0.7), (49152, 1.0), (151936, 1.3)]
)
def test_drawn_tokens_equal_those_of_the_plain_path(num_tokens, temperature):
    logits_BV = 3 * torch.randn(
        512, num_tokens, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    uniform_B = torch.rand(
        512, device="cuda", dtype=torch.float64, generator=torch.Generator("cuda").manual_seed(1)
    )
    expected = plain.draw(logits_BV / temperature, uniform_B)
    token_B, logp_B, entropy_B = kernels_draw.draw(logits_BV, uniform_B, temperature)
    is_same_B = token_B == expected.token_N
    assert is_same_B.float().mean() >= 0.99, (
        "a threshold may fall on the edge of two tokens, hardly ever more"
    )
    torch.testing.assert_close(logp_B[is_same_B], expected.logp_N[is_same_B], atol=2e-5, rtol=0)
    torch.testing.assert_close(entropy_B, expected.entropy_N, atol=1e-4, rtol=0)
    assert (logp_B > -60).all(), "a token without mass was drawn"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_tokens", "num"), [(29, 29), (1000, 5), (49152, 20), (151936, 20)])
def test_candidates_are_the_likeliest_tokens_in_order(num_tokens, num, dtype):
    logits_BV = (
        3
        * torch.randn(
            64, num_tokens, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
        )
    ).to(dtype)
    logits_BV[1] = 0.5  # all equal: the first come first
    ids_BK, logp_BK = kernels_draw.candidates(logits_BV, 0.7, num)
    logp_BV = (logits_BV.double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(
        logp_BK.double(), logp_BV.topk(num, dim=-1).values, atol=2e-5, rtol=0
    )
    torch.testing.assert_close(logp_BK.double(), logp_BV.gather(1, ids_BK), atol=2e-5, rtol=0)
    assert all(len(set(ids)) == num for ids in ids_BK.tolist())
    assert ids_BK[1].tolist() == list(range(num))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_rows", [5, 64])
def test_the_engine_equals_a_teacher_forced_forward(name, max_rows):
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        model, settings = (
            on_gpu(name, dtype),
            {"max_new_tokens": 60, "stop_ids": STOPS, "seed": 1, "max_rows": max_rows},
        )
        rollouts = sample(
            model,
            PROMPTS,
            group_size=16,
            **settings,
            needs={"hidden_NTD", "topk_ids_NTK", "topk_logp_NTK"},
        )
        lengths_N = rollouts.mask_NT.sum(1)
        assert lengths_N.min() < 20 < lengths_N.max()
        prompt_ids = [PROMPTS[p] for p in rollouts.prompt_index_N.tolist()]
        needs = {"trainer_logp_NT", "entropy_NT", "hidden_NTD", "topk_logp_NTK"}
        found = measure(model, prompt_ids, rollouts.token_ids_NT, rollouts.mask_NT, needs)
        error_M = (found["trainer_logp_NT"] - rollouts.sampler_logp_NT).abs()[rollouts.mask_NT]
        print(
            f"{name} {dtype}: |sampler - trainer| mean {error_M.mean():.2g}, worst"
            f" {error_M.max():.2g}"
        )
        assert error_M.mean() < bound, f"{name} {dtype}: mean error {error_M.mean()}"
        assert dtype != torch.float32 or error_M.max() < 1e-4
        if dtype == torch.float32:
            torch.testing.assert_close(rollouts.entropy_NT, found["entropy_NT"], atol=1e-4, rtol=0)
            torch.testing.assert_close(
                rollouts.hidden_NTD, found["hidden_NTD"], atol=1e-3, rtol=1e-3
            )
            torch.testing.assert_close(
                rollouts.topk_logp_NTK, found["topk_logp_NTK"], atol=1e-4, rtol=0
            )


@pytest.mark.parametrize("max_rows", [3, 64])
def test_greedy_equals_generate_token_for_token(max_rows):
    model = on_gpu("llama")
    rollouts = sample(
        model,
        PROMPTS,
        group_size=3,
        max_new_tokens=40,
        stop_ids=STOPS,
        seed=0,
        temperature=0,
        max_rows=max_rows,
    )
    for row, prompt in enumerate([p for p in PROMPTS for _ in range(3)]):
        ids = torch.tensor([prompt], device="cuda")
        whole = model.generate(
            ids, do_sample=False, max_new_tokens=40, eos_token_id=STOPS, pad_token_id=0
        )
        assert (
            rollouts.token_ids_NT[row][rollouts.mask_NT[row]].tolist()
            == whole[0, len(prompt) :].tolist()
        )


def test_same_seed_same_tokens_whatever_is_in_flight():
    model, settings = (
        on_gpu("llama"),
        {"group_size": 16, "max_new_tokens": 50, "stop_ids": STOPS, "seed": 3},
    )
    whole = sample(model, PROMPTS, **settings)
    assert torch.equal(whole.token_ids_NT, sample(model, PROMPTS, **settings).token_ids_NT)
    for max_rows in (
        1,
        7,
        40,
    ):  # another batch shape, other matmul kernels: a draw on the edge of two tokens may flip
        other = sample(model, PROMPTS, **settings, max_rows=max_rows)
        width = min(whole.mask_NT.shape[1], other.mask_NT.shape[1])
        is_same_N = (whole.token_ids_NT[:, :width] == other.token_ids_NT[:, :width]).all(1)
        print(f"max_rows {max_rows}: {int(is_same_N.sum())} of {len(is_same_N)} rows equal")
        assert is_same_N.float().mean() > 0.95, max_rows


@pytest.mark.parametrize(
    "options", [{"activation_checkpointing": True}, {"compile": True}, {"kernels": "torch"}]
)
def test_options_of_the_update_change_no_gradient(options):
    method, weights = make_method("dapo"), []
    for optimizer in ({}, options):
        config = parse_config(
            {
                "rollouts": {"prompts": 4, "group_size": 4, "max_new_tokens": 40},
                "optimizer": optimizer,
            }
        )
        policy = load_model("bundled", device="cuda")
        model = prepare_update(policy.model, config.optimizer)
        collected = collect(
            method, RolloutSampler(policy, task(name="arithmetic"), config, 0, needs=method.needs)
        )
        rows = method.rows(collected.batch, method.assign(collected.batch), torch.arange(16))
        before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
        apply_update(
            model, torch.optim.SGD(model.parameters(), lr=1.0), method, rows, collected, config
        )
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    torch.testing.assert_close(
        weights[1], weights[0], atol=0.02 * float(weights[0].abs().max()), rtol=0
    )


def test_autocast_samples_as_it_scores():
    policy = load_model("bundled", device="cuda")
    config = parse_config({"rollouts": {"prompts": 16, "group_size": 8, "max_new_tokens": 80}})
    collected = collect(
        make_method("dapo"),
        RolloutSampler(policy, task(name="arithmetic"), config, 0, needs=make_method("dapo").needs),
    )
    batch = collected.batch
    with autocast(policy.model):
        found = measure(
            policy.model,
            collected.prompt_ids,
            batch.token_ids_NT,
            batch.mask_NT,
            {"trainer_logp_NT"},
        )
    error_M = (found["trainer_logp_NT"] - batch.sampler_logp_NT).abs()[batch.mask_NT]
    print(f"autocast: mean |sampler - trainer| {error_M.mean():.2g}, worst {error_M.max():.2g}")
    assert error_M.mean() < 5e-3


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_prompts_read_once_change_no_log_prob_and_no_gradient(name, monkeypatch):
    model, generator = on_gpu(name), torch.Generator().manual_seed(0)
    prompt_ids = [prompt for prompt in PROMPTS for _ in range(8)]
    length_N = torch.randint(1, 60, (len(prompt_ids),), generator=generator)
    mask_NT = (torch.arange(60) < length_N[:, None]).cuda()
    ids_NT = torch.randint(3, 300, mask_NT.shape, generator=generator).cuda() * mask_NT

    def scores() -> tuple[torch.Tensor, torch.Tensor]:
        logp_NT = token_logp(model, prompt_ids, ids_NT, mask_NT)
        grads = torch.autograd.grad(logp_NT.sum(), list(model.parameters()))
        return logp_NT.detach(), torch.cat([grad.flatten() for grad in grads])

    shared = scores()
    monkeypatch.setattr(pack, "can_share", lambda decoder: False)
    for found, expected in zip(shared, scores()):
        torch.testing.assert_close(found, expected, atol=2e-4 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_forward_mode_written_out_equals_forward_mode(name, is_autocast):
    model, generator = on_gpu(name), torch.Generator().manual_seed(0)
    prompt_ids = [prompt for prompt in PROMPTS for _ in range(8)]
    mask_NT = (
        torch.arange(20) < torch.randint(1, 20, (len(prompt_ids), 1), generator=generator)
    ).cuda()
    ids_NT = torch.randint(3, 300, mask_NT.shape, generator=generator).cuda()
    params = trainable(model)
    direction_C = {
        key: torch.randn(3, *p.shape, generator=generator).cuda() * (p.std() + 0.01)
        for key, p in params.items()
    }

    def context():
        return torch.autocast("cuda", torch.bfloat16, enabled=is_autocast)

    logprobs = of_model(model, Texts(prompt_ids, ids_NT, mask_NT), context)
    assert logprobs.along is not None
    found, expected = (
        change_along(one, params, direction_C) for one in (logprobs, logprobs._replace(along=None))
    )
    error = float((found - expected).norm() / expected.norm())
    print(f"{name} autocast {is_autocast}: {error:.2g}")
    assert error < (0.1 if is_autocast else 1e-4)
