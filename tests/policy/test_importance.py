"""Influence of tokens on the answer: against a direct computation, batching, tokens without any."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from counterpoise.maths.noise import normal_at
from counterpoise.policy import measure_importance
from counterpoise.policy.backbone import backbone
from helpers.tiny_models import tiny

PROMPT = [3, 4, 5, 6, 7, 8, 9]
PROMPTS = [PROMPT, [8], PROMPT, PROMPT, [11, 12], PROMPT, PROMPT]
RESPONSES = [
    [7, 9, 4, 20, 2],
    [1, 20, 21, 22, 2],
    [28, 2, 6],
    [14, 15],
    [5, 17, 18, 19],
    [3, 9],
    [26, 25, 24, 23, 22, 21, 20],
]
ANSWER_N = torch.tensor([3, 2, 1, -1, 2, 0, 5])
WIDTH = 7
TOKENS_NT = torch.tensor([row + [0] * (WIDTH - len(row)) for row in RESPONSES])
MASK_NT = torch.tensor([[t < len(row) for t in range(WIDTH)] for row in RESPONSES])
MASK_NT[6, 2:4] = MASK_NT[4, 3] = False  # what an environment said
ROWS = (PROMPTS, TOKENS_NT, MASK_NT, ANSWER_N)
HAS_N = torch.tensor([True, True, True, False, True, False, True])
SIGMA = 0.05  # larger than the default: the second order of the KL is seen too


class ScaledLlama(LlamaForCausalLM):
    """Logits that no config field explains."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.5
        return out


def direct(model, *, seed, temperature=1.0, sigma=SIGMA):
    """Row by row without padding: the KL itself, from ``inputs_embeds``, differentiated."""
    out_NT = torch.where(MASK_NT, -1.0, 0.0).double()
    embedding = model.get_input_embeddings()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES)):
        start = int(ANSWER_N[row])
        reasoning = [t for t in range(max(start, 0)) if MASK_NT[row, t]]
        answer = [t for t in range(len(response)) if MASK_NT[row, t] and 0 <= start <= t]
        if not reasoning or not answer:
            continue
        places = [len(prompt) + t for t in reasoning]
        predicted = [len(prompt) + t - 1 for t in answer]
        clean = embedding(torch.tensor([prompt + response])).detach()
        noisy = clean.clone()
        at_K = torch.tensor(reasoning)
        number_K = torch.full_like(at_K, row)
        unit_KD = normal_at(torch.full_like(at_K, seed), number_K, at_K, clean.shape[-1])
        noisy[0, places] += (sigma * unit_KD).to(clean.dtype)
        noisy.requires_grad_()
        both = [
            (model(inputs_embeds=x).logits[0, predicted] / temperature).log_softmax(-1)
            for x in (clean, noisy)
        ]
        kl = (both[0].exp() * (both[0] - both[1])).sum()
        gradient = torch.autograd.grad(kl, noisy)[0]
        out_NT[row, reasoning] = (gradient * clean)[0, places].sum(-1).abs()
    return out_NT


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "cohere", "phi", "gpt2"])
def test_scores_equal_a_direct_computation(name):
    """Ragged rows, prompts that are read once, holes, rows without an answer or before it."""
    model = tiny(name, dtype=torch.float64)
    assert backbone(model).head is not None
    expected_NT = direct(model, seed=5, temperature=0.7)
    assert (expected_NT > 1e-6).any(1).tolist() == HAS_N.tolist()
    for token_budget in (16384, 24, 1):
        got_NT = measure_importance(
            model, *ROWS, seed=5, temperature=0.7, sigma=SIGMA, token_budget=token_budget
        )
        torch.testing.assert_close(got_NT, expected_NT, rtol=1e-9, atol=1e-12)


def test_a_head_that_no_config_explains_goes_through_the_models_own_forward():
    torch.manual_seed(0)
    model = ScaledLlama(tiny().config).double().eval()
    assert backbone(model).head is None
    got_NT = measure_importance(model, *ROWS, seed=1, temperature=0.7, sigma=SIGMA)
    expected_NT = direct(model, seed=1, temperature=0.7)
    torch.testing.assert_close(got_NT, expected_NT, rtol=1e-9, atol=1e-12)


def test_padding_and_the_other_rows_change_nothing():
    model = tiny(dtype=torch.float64)
    whole_NT = measure_importance(model, *ROWS, seed=0)
    tokens_NT = torch.nn.functional.pad(TOKENS_NT, (0, 4), value=17)
    mask_NT = torch.nn.functional.pad(MASK_NT, (0, 4))
    wide_NT = measure_importance(model, PROMPTS, tokens_NT, mask_NT, ANSWER_N, seed=0)
    torch.testing.assert_close(wide_NT[:, :WIDTH], whole_NT, rtol=1e-9, atol=1e-15)
    assert not wide_NT[:, WIDTH:].any()
    first_NT = measure_importance(
        model, PROMPTS[:2], TOKENS_NT[:2], MASK_NT[:2], ANSWER_N[:2], seed=0
    )
    torch.testing.assert_close(first_NT, whole_NT[:2], rtol=1e-9, atol=1e-15)


def test_a_score_is_proportional_to_small_noise_and_float32_has_its_digits():
    """The KL is quadratic in the noise, so its gradient is linear (GPT-2 has no float32 norms)."""
    model = tiny("gpt2").double()
    small_NT, large_NT = (
        measure_importance(model, *ROWS, seed=0, sigma=x)[HAS_N] for x in (1e-6, 1e-5)
    )
    scale_N1 = large_NT.amax(1, keepdim=True)
    is_scored_NT = large_NT >= 0
    gap_NT = (large_NT - 10 * small_NT).abs() / scale_N1
    assert float(gap_NT[is_scored_NT].max()) < 0.01
    both = (model, tiny("gpt2"))
    large_NT, single_NT = (measure_importance(x, *ROWS, seed=0)[HAS_N] for x in both)
    gap_NT = (large_NT - single_NT).abs() / large_NT.amax(1, keepdim=True)
    assert float(gap_NT.max()) < 2e-3


def test_a_token_that_cannot_reach_the_answer_has_no_influence():
    """Without attention only the token right before the answer has a say in it."""
    model = tiny(dtype=torch.float64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    score_NT = measure_importance(model, *ROWS, seed=0)
    assert score_NT[0, :2].abs().max() == 0 < score_NT[0, 2]
    assert score_NT[1, 0] == 0 < score_NT[1, 1]
    # row 6: tokens 2 and 3 are the environment's, token 4 is the model's and comes last
    assert score_NT[6, :2].abs().max() == 0 < score_NT[6, 4]


def test_seeds_decide_the_noise_and_nothing_else_is_touched():
    model = tiny()
    model.train()
    before = torch.get_rng_state()
    first_NT, again_NT, other_NT = (measure_importance(model, *ROWS, seed=k) for k in (3, 3, 4))
    assert torch.equal(first_NT, again_NT)
    assert not torch.equal(first_NT, other_NT)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    assert all(weight.grad is None for weight in model.parameters())
    assert not first_NT.requires_grad
    assert not model.get_input_embeddings()._forward_hooks


def test_no_answer_at_all_costs_nothing():
    model = tiny()
    none_N = torch.full_like(ANSWER_N, -1)
    score_NT = measure_importance(model, PROMPTS, TOKENS_NT, MASK_NT, none_N, seed=0)
    assert torch.equal(score_NT, torch.where(MASK_NT, -1.0, 0.0))
