"""Decode steps in C against torch: values, edges of the draw, bits that depend on nobody else, and
the way back to torch alone.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from counterpoise.policy import load_model
from counterpoise.policy.kernels import build
from counterpoise.sampling import decoder, draw, engine, sample
from counterpoise.sampling.kernels import cpu as kernels_cpu
from helpers.quick_compiler import path_with_quick_compiler
from helpers.tiny_models import row_logits, row_logp_entropy, tiny

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13]]
STOPS = [2, 3, 4, 5]
SIZES: dict[str, Any] = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "vocab_size": 300,
    "max_position_embeddings": 256,
}
NEXT_TO_ONE = 1 - 2.0**-53

# with a compiler the kernels have to build: a source that does not must not pass as skipped
native = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason="there is no C compiler"
)


def kernels_of(model):
    found = engine.engine_for(model)
    assert found is not None
    return found.kernels


def sized(name="llama", **changes):
    """A tiny model whose widths are no multiples of a vector, with norms and biases that are not 1
    and 0.
    """
    sizes: dict[str, Any] = SIZES | {"initializer_range": 0.1} | changes
    model = tiny(name, **sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model


def state(model, num_rows=5, room=200):
    """Fused weights, a cache with something in it, tokens, and positions at the edges of
    a block.
    """
    weights, shape = decoder.fuse_weights(model, torch.float32), decoder.shape_of(model)
    keys, values = torch.randn(
        2, shape.num_layers, num_rows, shape.num_kv_heads, room, shape.head_size
    )
    position_B = torch.tensor([0, 3, 64, 199, 127])[torch.arange(num_rows) % 5]
    return (
        weights,
        shape,
        keys,
        values,
        *decoder.rotary(model, room),
        torch.randint(weights.embed_VD.shape[0], (num_rows,)),
        position_B,
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24}),
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}),
        ("llama", {"num_key_value_heads": 3, "head_dim": 64}),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}),
        (
            "llama",
            {
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 6,
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        (
            "llama",
            {
                "vocab_size": 3,
                "hidden_size": 4,
                "intermediate_size": 2,
                "num_attention_heads": 2,
                "head_dim": 2,
            },
        ),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 24}),
        ("qwen3", {"head_dim": 14}),
    ],
)
@native
@torch.no_grad()
def test_a_decode_step_equals_that_of_torch(name, changes):
    weights, shape, keys, values, cos, sin, token_B, position_B = state(sized(name, **changes))
    copies = keys.clone(), values.clone()
    hidden_BD = decoder.decode(weights, shape, token_B, position_B, keys, values, cos, sin)
    with kernels_cpu.panels(weights, shape, *copies, cos, sin) as model:
        found_BD, logits_BV = kernels_cpu.decode(model, token_B, position_B)
    torch.testing.assert_close(found_BD, hidden_BD, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits_BV, hidden_BD @ weights.head_DV, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(copies[0], keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(copies[1], values, atol=1e-5, rtol=1e-5)


@native
@torch.no_grad()
def test_neither_threads_nor_other_rows_change_a_bit(monkeypatch):
    weights, shape, keys, values, cos, sin, token_B, position_B = state(sized(), num_rows=31)
    found = []
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda num=num_threads: num)
        with kernels_cpu.panels(weights, shape, keys.clone(), values.clone(), cos, sin) as model:
            found.append(kernels_cpu.decode(model, token_B, position_B))
    for b in range(31):
        with kernels_cpu.panels(
            weights, shape, keys[:, b : b + 1].clone(), values[:, b : b + 1].clone(), cos, sin
        ) as model:
            alone = kernels_cpu.decode(model, token_B[b : b + 1], position_B[b : b + 1])
        for hidden_BD, logits_BV in found:
            assert torch.equal(alone[0][0], hidden_BD[b]) and torch.equal(alone[1][0], logits_BV[b])


@pytest.mark.parametrize(
    ("num_tokens", "temperature"), [(3, 1.0), (29, 1.0), (197, 0.7), (5000, 1.3)]
)
@native
def test_drawn_tokens_equal_those_of_torch(num_tokens, temperature):
    generator = torch.Generator().manual_seed(0)
    logits_BV = 3 * torch.randn(2000, num_tokens, generator=generator)
    uniform_B = torch.rand(2000, dtype=torch.float64, generator=generator)
    expected = draw.draw(
        logits_BV.double() / temperature, uniform_B
    )  # in float32 torch itself is 5e-6 away for the widest
    token_B, logp_B, entropy_B = kernels_cpu.draw(logits_BV, uniform_B, temperature)
    is_same_B = token_B == expected.token_N
    assert is_same_B.float().mean() >= 0.999, (
        "a threshold may fall on the edge of two tokens, hardly ever more"
    )
    torch.testing.assert_close(
        logp_B[is_same_B].double(), expected.logp_N[is_same_B], atol=2e-6, rtol=0
    )
    torch.testing.assert_close(entropy_B.double(), expected.entropy_N, atol=2e-6, rtol=0)


@native
def test_tokens_ruled_out_have_no_mass():
    logits_BV = draw.truncate(
        4 * torch.randn(1000, 150, generator=torch.Generator().manual_seed(2)), top_k=7
    )
    uniform_B = torch.linspace(0, NEXT_TO_ONE, 1000, dtype=torch.float64)
    expected = draw.draw(logits_BV, uniform_B)
    token_B, logp_B, entropy_B = kernels_cpu.draw(logits_BV, uniform_B, 1.0)
    assert torch.equal(token_B, expected.token_N)
    torch.testing.assert_close(logp_B, expected.logp_N, atol=5e-6, rtol=0)
    torch.testing.assert_close(entropy_B, expected.entropy_N, atol=5e-6, rtol=0)


@native
def test_the_ends_of_the_unit_interval_by_hand():
    """Mass 1/4, 3/4 at tokens 70 and 140 of 197, in two different blocks; 0 draws the first of
    them, just under 1 the last.
    """
    logits_BV = torch.full((4, 197), float("-inf"))
    logits_BV[:, 70], logits_BV[:, 140] = 0.0, torch.log(torch.tensor(3.0))
    uniform_B = torch.tensor([0.0, 0.2499, 0.2501, NEXT_TO_ONE], dtype=torch.float64)
    token_B, logp_B, entropy_B = kernels_cpu.draw(logits_BV, uniform_B, 1.0)
    prob_2 = torch.tensor([0.25, 0.75])
    assert token_B.tolist() == [70, 70, 140, 140]
    torch.testing.assert_close(logp_B, prob_2.log()[[0, 0, 1, 1]], atol=1e-6, rtol=0)
    torch.testing.assert_close(
        entropy_B, torch.special.entr(prob_2).sum().expand(4), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.3])
@native
def test_no_log_prob_is_above_0_and_no_entropy_under_it(temperature):
    """Tokens that are all but certain: 100 above the others, whose mass is under 1e-30.

    Log-prob and entropy are 0 to rounding.
    """
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(1000, 20, generator=generator)
    logits_BV[:, 3] += 100 + torch.rand(1000, generator=generator)
    token_B, logp_B, entropy_B = kernels_cpu.draw(
        logits_BV, torch.rand(1000, dtype=torch.float64, generator=generator), temperature
    )
    assert (token_B == 3).all()
    assert (logp_B == 0).all()
    assert (entropy_B >= 0).all()
    assert entropy_B.max() < 1e-25


@native
def test_logits_that_are_not_finite_give_no_number():
    logits_BV = torch.zeros(4, 100)
    logits_BV[0, 3], logits_BV[1, 99], logits_BV[2] = float("nan"), float("inf"), float("-inf")
    _, logp_B, entropy_B = kernels_cpu.draw(
        logits_BV, torch.full((4,), 0.5, dtype=torch.float64), 1.0
    )
    assert logp_B.isnan().tolist() == entropy_B.isnan().tolist() == [True, True, True, False]


@native
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("max_rows", [3, 64])
def test_log_probs_and_entropies_equal_a_teacher_forced_forward(name, max_rows):
    model = tiny(name, initializer_range=0.2)
    rollouts = sample(
        model,
        PROMPTS,
        group_size=8,
        max_new_tokens=30,
        temperature=0.8,
        stop_ids=[2, 12],
        seed=3,
        max_rows=max_rows,
        needs={"hidden_NTD"},
    )
    assert kernels_of(model) is kernels_cpu
    assert set(rollouts.stop_reason) == {"stop", "length"}
    for row, p in enumerate(rollouts.prompt_index_N.tolist()):
        mask_T = rollouts.mask_NT[row]
        with torch.no_grad():
            logp_T, entropy_T = row_logp_entropy(
                model, PROMPTS[p], rollouts.token_ids_NT[row][mask_T].tolist(), temperature=0.8
            )
            logits_TV = row_logits(model, PROMPTS[p], rollouts.token_ids_NT[row][mask_T].tolist())
        torch.testing.assert_close(rollouts.sampler_logp_NT[row][mask_T], logp_T, atol=1e-5, rtol=0)
        torch.testing.assert_close(rollouts.entropy_NT[row][mask_T], entropy_T, atol=1e-5, rtol=0)
        assert rollouts.hidden_NTD is not None
        torch.testing.assert_close(
            model.lm_head(rollouts.hidden_NTD[row][mask_T]), logits_TV, atol=2e-5, rtol=0
        )


@native
@torch.no_grad()
def test_the_bundled_models_log_probs_are_as_exact_as_its_own_forward():
    """Against a forward in float64: some tokens of a trained model are ill-conditioned, and float32
    is 1e-4 away there in any order.
    """
    model, exact = load_model("bundled").model, load_model("bundled").model.double()
    rollouts = sample(model, PROMPTS, group_size=8, max_new_tokens=40, stop_ids=[1], seed=3)
    errors, own = [], []
    for row, p in enumerate(rollouts.prompt_index_N.tolist()):
        mask_T = rollouts.mask_NT[row]
        token_ids = rollouts.token_ids_NT[row][mask_T].tolist()
        exact_T, own_T = (row_logp_entropy(m, PROMPTS[p], token_ids)[0] for m in (exact, model))
        errors.append((rollouts.sampler_logp_NT[row][mask_T] - exact_T).abs())
        own.append((own_T - exact_T).abs())
    error_M, own_M = torch.cat(errors), torch.cat(own)
    assert error_M.mean() < 1e-6 and error_M.median() < 5e-7
    assert error_M.max() < max(1e-5, 3 * float(own_M.max()))


@native
@pytest.mark.parametrize("max_rows", [2, 64])
def test_the_bundled_model_decodes_greedily_as_generate_does(max_rows):
    policy = load_model("bundled")
    prompts = [[17, 30, 41], [20, 21, 22, 23, 24, 25], [9], [60, 50, 40, 30]]
    rollouts = sample(
        policy.model,
        prompts,
        max_new_tokens=60,
        stop_ids=policy.stop_ids,
        seed=0,
        temperature=0,
        max_rows=max_rows,
    )
    for row, prompt in enumerate(prompts):
        options = {
            "do_sample": False,
            "max_new_tokens": 60,
            "eos_token_id": list(policy.stop_ids),
            "pad_token_id": 0,
        }
        whole = policy.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), **options
        )
        assert (
            rollouts.token_ids_NT[row][rollouts.mask_NT[row]].tolist()
            == whole[0, len(prompt) :].tolist()
        )


@native
def test_steps_in_a_row_equal_steps_one_by_one(monkeypatch):
    """Torch draws candidates and keeps the books after every step of C, or C does it all.

    Same tokens, same bits.
    """
    model, settings = (
        tiny(),
        {"group_size": 12, "max_new_tokens": 40, "stop_ids": [2], "seed": 5, "max_rows": 9},
    )
    settings |= {"needs": {"topk_ids_NTK", "topk_logp_NTK"}, "topk": 3, "temperature": 0.8}
    together = sample(model, PROMPTS, **settings)
    monkeypatch.setattr(engine.Engine, "is_native", lambda self, settings: False)
    single = sample(model, PROMPTS, **settings)
    for name in ("token_ids_NT", "sampler_logp_NT", "entropy_NT", "topk_ids_NTK"):
        assert torch.equal(getattr(together, name), getattr(single, name)), name
    torch.testing.assert_close(together.topk_logp_NTK, single.topk_logp_NTK, rtol=0, atol=2e-6)
    assert together.stop_reason == single.stop_reason


@native
def test_equal_logits_are_candidates_in_the_order_of_the_vocabulary():
    model = tiny()
    torch.nn.init.zeros_(model.lm_head.weight)
    found = sample(
        model,
        PROMPTS,
        max_new_tokens=2,
        stop_ids=[],
        seed=0,
        needs={"topk_ids_NTK", "topk_logp_NTK"},
        topk=4,
    )
    assert kernels_of(model) is kernels_cpu
    assert found.topk_ids_NTK.unique(dim=0).tolist() == [[[0, 1, 2, 3], [0, 1, 2, 3]]]
    torch.testing.assert_close(
        found.topk_logp_NTK, torch.full_like(found.topk_logp_NTK, 1 / 29).log()
    )


@native
def test_tokens_follow_the_models_distribution():
    """Chi-square of the first token, and of the second given the likeliest first, at
    temperature 1.
    """
    model, num = tiny(vocab_size=6, bos_token_id=None, eos_token_id=None), 8000
    rollouts = sample(model, [[1, 2, 3]], group_size=num, max_new_tokens=2, stop_ids=[], seed=11)
    first_N, second_N = rollouts.token_ids_NT.unbind(1)
    for given, seen_N in (
        ([], first_N),
        ([int(first_N.mode().values)], second_N[first_N == first_N.mode().values]),
    ):
        with torch.no_grad():
            prob_V = torch.softmax(row_logits(model, [1, 2, 3], [*given, 0])[-1].double(), -1)
        assert (
            chisquare(
                torch.bincount(seen_N, minlength=6), len(seen_N) * prob_V / prob_V.sum()
            ).pvalue
            > 0.01
        )


@native
def test_kernels_that_give_other_logits_are_left_aside(monkeypatch, caplog):
    model, sampled = sized(), {"group_size": 2, "max_new_tokens": 8, "stop_ids": STOPS, "seed": 0}
    right = kernels_cpu.decode
    monkeypatch.setattr(
        kernels_cpu, "decode", lambda *args: tuple(1.01 * out for out in right(*args))
    )
    found = sample(model, PROMPTS, **sampled)
    assert kernels_of(model) is None
    assert "other logits than torch" in caplog.text
    monkeypatch.undo()
    again = sized()
    with torch.no_grad():
        for own, other in zip(again.parameters(), model.parameters()):
            own.copy_(other)
    assert torch.equal(sample(again, PROMPTS, **sampled).token_ids_NT, found.token_ids_NT)
    assert kernels_of(again) is kernels_cpu


def test_another_dtype_is_left_to_torch():
    model = tiny(dtype=torch.bfloat16)
    settings = {"max_new_tokens": 5, "stop_ids": [], "seed": 0, "temperature": 0}
    rollouts = sample(model, PROMPTS, **settings)
    assert kernels_of(model) is None
    assert rollouts.token_ids_NT.shape == (4, 5)
    with torch.autocast("cpu", torch.bfloat16):
        plain = tiny()
        sample(plain, PROMPTS, **settings)
    assert kernels_of(plain) is None


@native
def test_norms_of_another_dtype_are_left_to_torch():
    model, settings = tiny(), {"group_size": 2, "max_new_tokens": 6, "stop_ids": [], "seed": 0}
    for layer in model.model.layers:
        layer.input_layernorm.to(torch.bfloat16)
    found = sample(model, PROMPTS, **settings)
    assert kernels_of(model) is None
    assert torch.equal(
        found.token_ids_NT, sample(model, PROMPTS, **settings, engine=False).token_ids_NT
    )


@native
def test_an_error_in_the_middle_leaves_no_copy_of_the_weights(monkeypatch):
    model, settings = tiny(), {"max_new_tokens": 20, "stop_ids": [], "seed": 0}
    expected = sample(model, PROMPTS, **settings)
    right = kernels_cpu.advance
    monkeypatch.setattr(kernels_cpu, "advance", None)
    with pytest.raises(TypeError):
        sample(model, PROMPTS, **settings)
    monkeypatch.setattr(kernels_cpu, "advance", right)
    found = engine.engine_for(model)
    assert found is not None
    assert found.panels is None
    assert torch.equal(sample(model, PROMPTS, **settings).token_ids_NT, expected.token_ids_NT)


@pytest.fixture
def fresh():
    """What was built and loaded is forgotten before and after."""
    kernels_cpu.library.cache_clear()
    yield
    kernels_cpu.library.cache_clear()


@pytest.mark.parametrize(
    ("compilers", "message"),
    [
        (
            ("no-such-compiler",),
            (
                "rollouts: no C compiler (no-such-compiler) was found; the engine works with torch"
                " alone."
            ),
        ),
        (("false",), "rollouts: the C kernels could not be built ("),
    ],
)
def test_without_kernels_torch_does_the_work_and_one_line_says_so(
    compilers, message, fresh, monkeypatch, caplog
):
    settings = {"group_size": 3, "max_new_tokens": 9, "stop_ids": STOPS, "seed": 4}
    generic = sample(tiny(), PROMPTS, **settings, engine=False)
    monkeypatch.setattr(build, "COMPILERS", compilers)
    with caplog.at_level(logging.INFO, logger="counterpoise.sampling"):
        models = tiny(), tiny()
        rollouts = [sample(model, PROMPTS, **settings) for model in models]
    assert [kernels_of(model) for model in models] == [None, None]
    assert [record.message.startswith(message) for record in caplog.records] == [True]
    for found in rollouts:
        assert torch.equal(found.token_ids_NT, generic.token_ids_NT)


def test_a_user_without_a_home_folder_samples_with_torch(fresh, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("COUNTERPOISE_CACHE", raising=False)
    assert kernels_cpu.library() is None


# forked off a process that has loaded everything, so that all three build at the same moment
BUILD = """
import os
from counterpoise.sampling.kernels import cpu
def child():
    pid = os.fork()
    if pid == 0:
        os._exit(0 if cpu.library() is not None else 1)
    return pid
codes = [os.waitpid(pid, 0)[1] for pid in [child() for _ in range(3)]]
assert codes == [0, 0, 0], codes
"""


@native
def test_processes_that_build_at_once_leave_one_whole_library(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", path_with_quick_compiler(tmp_path / "bin"))
    monkeypatch.setenv("COUNTERPOISE_CACHE", str(tmp_path))
    result = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]
