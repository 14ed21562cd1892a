"""Prompts read once for their rollouts: log-probs, gradients and forward mode equal those of whole
rows.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from counterpoise.ledger.calculus.logprobs import at
from counterpoise.policy import add_lora, measure, pack, token_logp
from counterpoise.policy.backbone import backbone
from counterpoise.policy.prefix import can_share, prefixes, same_attention
from helpers.tiny_models import row_logp_entropy, tiny

PROMPTS = [[3, 4, 5, 6, 7]] * 4 + [[8, 9, 10]] * 3 + [[3, 4, 5, 6]]
LENGTHS = torch.tensor([9, 5, 3, 1, 7, 9, 2, 4])
MASK_NT = torch.arange(9) < LENGTHS[:, None]
IDS_NT = torch.randint(3, 29, (8, 9), generator=torch.Generator().manual_seed(0)) * MASK_NT


@pytest.fixture
def whole_rows(monkeypatch):
    """Switches sharing off for what follows; before it is called, counts how often prompts were
    shared.
    """
    used = []
    shared = pack.hidden_of_prefixes
    monkeypatch.setattr(pack, "hidden_of_prefixes", lambda *args: used.append(1) or shared(*args))

    def switch() -> int:
        monkeypatch.setattr(pack, "can_share", lambda decoder: False)
        return len(used)

    return switch


def logp_and_grads(model):
    model.zero_grad()
    weight_NT = torch.randn(8, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logp_NT = token_logp(model, PROMPTS, IDS_NT, MASK_NT, temperature=0.8)
    (logp_NT * weight_NT).sum().backward()
    return logp_NT.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_log_probs_and_gradients_equal_those_of_whole_rows(name, whole_rows, wide_norms):
    model = tiny(name, dtype=torch.float64)
    logp_NT, grads = logp_and_grads(model)
    assert whole_rows() == 1
    expected_NT, expected = logp_and_grads(model)
    torch.testing.assert_close(logp_NT, expected_NT, rtol=1e-12, atol=1e-12)
    assert grads.keys() == expected.keys()
    for key, grad in expected.items():
        assert grad.abs().max() > 0
        torch.testing.assert_close(grads[key], grad, rtol=1e-10, atol=1e-12)


def test_a_gap_inside_a_response_is_read_and_not_scored(whole_rows, wide_norms):
    model, mask_NT = tiny(dtype=torch.float64), MASK_NT.clone()
    mask_NT[0, 3:5] = mask_NT[4, 0] = False
    got_NT = token_logp(model, PROMPTS, IDS_NT, mask_NT)
    assert whole_rows() == 1
    torch.testing.assert_close(
        got_NT, token_logp(model, PROMPTS, IDS_NT, mask_NT), rtol=1e-12, atol=1e-12
    )


def test_forward_mode_equals_that_of_whole_rows(whole_rows, wide_norms):
    model = tiny(dtype=torch.float64)
    params = {name: value.detach() for name, value in model.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    direction_C = {
        name: torch.randn(2, *v.shape, generator=generator, dtype=v.dtype)
        for name, v in params.items()
    }

    def changes(share):
        rows = pack.pack_rows(PROMPTS, IDS_NT, MASK_NT, torch.device("cpu"), share=share)

        def hidden(params):
            with sdpa_kernel(SDPBackend.MATH):
                return at(model, params, lambda m: pack.hidden_of(backbone(m), rows))

        return torch.vmap(lambda direction: torch.func.jvp(hidden, (params,), (direction,))[1])(
            direction_C
        )

    got_CMD = changes(share=True)
    assert whole_rows() == 1
    expected_CMD = changes(share=False)
    assert expected_CMD.abs().min() > 0
    torch.testing.assert_close(got_CMD, expected_CMD, rtol=1e-9, atol=1e-10)


def test_measured_columns_equal_those_of_whole_rows(whole_rows):
    model, names = tiny("qwen3"), {"trainer_logp_NT", "entropy_NT", "hidden_NTD"}
    got = measure(model, PROMPTS, IDS_NT, MASK_NT, names)
    assert whole_rows() == 1
    expected = measure(model, PROMPTS, IDS_NT, MASK_NT, names)
    for name in names:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5)


def test_adapters_are_trained_through_shared_prompts(whole_rows, wide_norms):
    model = add_lora(
        tiny(dtype=torch.float64), r=2, alpha=4, target_modules=["q_proj", "v_proj"]
    ).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    _, grads = logp_and_grads(model)
    assert whole_rows() == 1
    _, expected = logp_and_grads(model)
    assert any("lora_A" in key for key in expected)
    for key, grad in expected.items():
        torch.testing.assert_close(grads[key], grad, rtol=1e-8, atol=1e-10)


def test_the_models_own_attention_comes_back():
    model = tiny()
    token_logp(model, PROMPTS, IDS_NT, MASK_NT)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError):
        token_logp(model, PROMPTS, IDS_NT + 100, MASK_NT)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["gemma2", "gpt2"])
def test_other_architectures_read_whole_rows(name):
    assert not can_share(tiny(name).get_decoder())


def test_dropout_windows_and_other_attention_read_whole_rows():
    assert can_share(tiny().get_decoder())
    assert not can_share(tiny().train().get_decoder())
    assert not can_share(tiny(attn_implementation="eager").get_decoder())
    assert not can_share(tiny("qwen2", use_sliding_window=True, sliding_window=4).get_decoder())


def test_recomputed_layers_share_prompts_where_attention_stays():
    model = tiny()
    model.gradient_checkpointing_enable()
    decoder = model.get_decoder()
    assert can_share(decoder)  # nothing is computed again in eval mode
    decoder.layers[0].training = True
    assert not can_share(decoder)
    with same_attention(model):
        assert can_share(decoder)
    assert not can_share(decoder)


def test_rotations_that_depend_on_the_longest_row_are_those_of_whole_rows():
    """A long prompt with a short answer and a short one with a long answer: 16 positions at most,
    though 14 + 12 would be 26.
    """
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny(max_position_embeddings=16, rope_parameters=rope)
    prompts, length_N = [[*range(3, 17)]] * 4 + [[3, 4]] * 4, torch.tensor([2] * 4 + [13] * 4)
    mask_NT = torch.arange(13) < length_N[:, None]
    ids_NT = (
        torch.randint(3, 29, mask_NT.shape, generator=torch.Generator().manual_seed(0)) * mask_NT
    )
    with torch.no_grad():
        got_NT = token_logp(model, prompts, ids_NT, mask_NT)
        for row, (prompt, length) in enumerate(zip(prompts, length_N.tolist())):
            expected_T, _ = row_logp_entropy(model, prompt, ids_NT[row, :length].tolist())
            torch.testing.assert_close(got_NT[row, :length], expected_T, rtol=0, atol=1e-5)


def test_prompts_are_shared_only_where_it_saves_tokens():
    ids_NT = torch.ones(4, 6, dtype=torch.long)
    assert prefixes([[1, 2], [1, 2], [1, 2], [1, 2]], ids_NT, [6, 6, 2, 6]) is not None
    assert prefixes([[1, 2], [2, 2], [3, 2], [4, 2]], ids_NT, [6, 6, 6, 6]) is None
    assert prefixes([[1, 2], [1, 2], [1, 2], [1, 2]], ids_NT, [1, 1, 1, 1]) is None


def test_rows_of_a_prompt_go_together_and_are_counted_as_they_are_laid_out():
    """Two prompts of 10 tokens, four answers of 5 each: 2 x 10 + 8 x 5 = 60 tokens read once, 8 x
    15 = 120 as whole rows.
    """
    prompts = [[1] * 10, [2] * 10] * 4
    assert pack.row_buckets(prompts, [5] * 8, 60, share=True) == [[0, 2, 4, 6, 1, 3, 5, 7]]
    assert pack.row_buckets(prompts, [5] * 8, 59, share=True) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert pack.row_buckets(prompts, [5] * 8, 60, share=False) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # 10 + 4 x 5 = 30 is over 25 by itself: as many answers as fit beside the prompt
    assert pack.row_buckets(prompts[::2], [5] * 4, 25, share=True) == [[0, 1, 2], [3]]
    # nothing to share: whole rows are counted, and go by their whole length
    assert pack.row_buckets([[1] * 10, [2] * 10], [5, 5], 29, share=True) == [[0], [1]]
    assert pack.row_buckets([[1] * 9, [2], [3] * 8, [4] * 2], [1, 2, 2, 1], 20, share=True) == [
        [3, 1],
        [0, 2],
    ]


@example(prompts=[0, 0], lengths=[1] * 24, token_budget=7, share=True)
@given(
    prompts=st.lists(st.integers(0, 3), min_size=1, max_size=24),
    lengths=st.lists(st.integers(1, 9), min_size=24, max_size=24),
    token_budget=st.integers(1, 90),
    share=st.booleans(),
)
def test_every_row_is_in_one_batch_and_batches_keep_to_the_budget(
    prompts, lengths, token_budget, share
):
    prompt_ids, device = [[number] * (3 + 2 * number) for number in prompts], torch.device("cpu")
    batches = pack.row_buckets(prompt_ids, lengths[: len(prompts)], token_budget, share=share)
    assert sorted(row for batch in batches for row in batch) == list(range(len(prompts)))
    for batch in batches:
        mask_NT = torch.arange(9) < torch.tensor([lengths[row] for row in batch])[:, None]
        rows = pack.pack_rows(
            [prompt_ids[row] for row in batch], mask_NT.long(), mask_NT, device, share=share
        )
        widths = (
            (rows.layout.ids_NL,)
            if isinstance(rows.layout, pack.Whole)
            else (rows.layout.ids_PW, rows.layout.ids_NS)
        )
        assert len(batch) == 1 or sum(ids.numel() for ids in widths) <= token_budget
