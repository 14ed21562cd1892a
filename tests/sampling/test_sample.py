"""Sampling: the tokens, their log-probs and their random streams."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from scipy.stats import chisquare
from transformers import MambaConfig, MambaForCausalLM
from transformers.cache_utils import DynamicLayer

from counterpoise.sampling import branch, sample
from counterpoise.sampling.cache import ROOM, RoomyLayer, compaction
from counterpoise.sampling.draw import draw, truncate, uniforms
from counterpoise.sampling.sample import COMPACT_FRAC
from helpers.tiny_models import row_logits, row_logp_entropy, tiny

PROMPTS = [[3, 4, 5, 6, 7], [8, 9], [10], [11, 12, 13]]
STOPS = [2, 3, 4, 5]


def responses(rollouts):
    return [ids[mask].tolist() for ids, mask in zip(rollouts.token_ids_NT, rollouts.mask_NT)]


def decoder_calls(model):
    """Shapes of all input_ids the decoder gets from now on."""
    shapes = []
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    return shapes


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", True),
        ("llama", False),
        ("qwen3", True),
        ("qwen3", False),
        ("gemma2", False),
        ("gpt2", False),
        ("phi", False),
    ],
)
@torch.no_grad()
def test_sampler_logp_and_entropy_equal_a_teacher_forced_forward(name, engine):
    model = tiny(name)
    rollouts = sample(
        model,
        PROMPTS,
        group_size=4,
        max_new_tokens=14,
        temperature=0.8,
        stop_ids=STOPS,
        seed=1,
        engine=engine,
    )
    lengths = rollouts.mask_NT.sum(1)
    assert lengths.min() < 6 < lengths.max(), (
        "the case must have rows that stop early (compaction) and rows that go on"
    )
    for row, response in enumerate(responses(rollouts)):
        prompt = PROMPTS[rollouts.prompt_index_N[row]]
        logp, entropy = row_logp_entropy(model, prompt, response, temperature=0.8)
        num = len(response)
        torch.testing.assert_close(rollouts.sampler_logp_NT[row, :num], logp, atol=1e-4, rtol=0)
        torch.testing.assert_close(rollouts.entropy_NT[row, :num], entropy, atol=1e-4, rtol=0)
        assert rollouts.sampler_logp_NT[row, num:].eq(0).all()
        assert rollouts.entropy_NT[row, num:].eq(0).all()


def test_rows_end_at_the_first_stop_token_or_at_the_limit():
    rollouts = sample(
        tiny(), PROMPTS, group_size=4, max_new_tokens=14, stop_ids=STOPS, seed=1, pad_id=28
    )
    assert rollouts.prompt_index_N.tolist() == [p for p in range(4) for _ in range(4)]
    assert {"stop", "length"} == set(rollouts.stop_reason)
    for row, (response, reason) in enumerate(zip(responses(rollouts), rollouts.stop_reason)):
        assert not set(response[:-1]) & set(STOPS)
        assert (response[-1] in STOPS) == (reason == "stop")
        assert reason == "stop" or len(response) == 14
        assert rollouts.token_ids_NT[row, len(response) :].eq(28).all()


def test_a_stop_token_at_the_limit_is_a_stop():
    rollouts = sample(tiny(), [[3]], group_size=3, max_new_tokens=1, stop_ids=range(29), seed=0)
    assert rollouts.stop_reason == ("stop",) * 3


@pytest.mark.parametrize(("name", "engine"), [("llama", True), ("llama", False), ("gemma2", False)])
def test_greedy_equals_generate_token_for_token(name, engine):
    model = tiny(name)
    rollouts = sample(
        model, PROMPTS, max_new_tokens=12, stop_ids=[2], seed=0, temperature=0, engine=engine
    )
    for prompt, response in zip(PROMPTS, responses(rollouts)):
        expected = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=2,
            pad_token_id=0,
        )
        assert response == expected[0, len(prompt) :].tolist()


@torch.no_grad()
def test_temperature_zero_is_greedy_and_reports_the_distribution_at_temperature_one():
    model = tiny()
    greedy = sample(model, PROMPTS, max_new_tokens=5, stop_ids=[], seed=0, temperature=0, top_k=2)
    zero = sample(model, PROMPTS, max_new_tokens=5, stop_ids=[], seed=7, temperature=0)
    assert torch.equal(greedy.token_ids_NT, zero.token_ids_NT)
    logp, entropy = row_logp_entropy(model, PROMPTS[0], responses(zero)[0])
    torch.testing.assert_close(zero.sampler_logp_NT[0], logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(greedy.entropy_NT[0], entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("engine", [True, False])
def test_a_row_depends_on_its_prompt_seed_and_stream_alone(engine, monkeypatch):
    model, settings = tiny(), {"max_new_tokens": 12, "stop_ids": STOPS, "seed": 5, "engine": engine}
    whole = responses(sample(model, PROMPTS, group_size=3, **settings))
    assert whole == responses(sample(model, PROMPTS, group_size=3, **settings))
    for max_rows in (1, 5):
        assert whole == responses(
            sample(model, PROMPTS, group_size=3, max_rows=max_rows, **settings)
        )
    order = [2, 0, 3, 1]
    streams = [p * 3 + g for p in order for g in range(3)]
    assert whole != responses(sample(model, PROMPTS, group_size=3, **settings | {"seed": 6}))
    module = sys.modules[sample.__module__]
    monkeypatch.setattr(module, "uniforms", lambda seed, _, num: uniforms(seed, streams, num))
    shuffled = responses(sample(model, [PROMPTS[p] for p in order], group_size=3, **settings))
    assert shuffled == [whole[stream] for stream in streams]


def test_each_distinct_prompt_is_read_once():
    model = tiny()
    sample(model, [[5]], max_new_tokens=1, stop_ids=[], seed=0, engine=False)
    shapes = decoder_calls(model)
    sample(
        model,
        [PROMPTS[0], PROMPTS[1], PROMPTS[0]],
        group_size=4,
        max_new_tokens=3,
        stop_ids=[],
        seed=0,
        engine=False,
    )
    assert shapes == [(2, 5), (12, 1), (12, 1)]


def test_sampling_ends_when_all_rows_have_stopped():
    model = tiny()
    sample(model, [[5]], max_new_tokens=1, stop_ids=[], seed=0, engine=False)
    shapes = decoder_calls(model)
    rollouts = sample(
        model, PROMPTS, group_size=2, max_new_tokens=50, stop_ids=range(29), seed=0, engine=False
    )
    assert len(shapes) == 1
    assert rollouts.token_ids_NT.shape == (8, 1)


def test_stopped_rows_leave_the_running_batch():
    model = tiny()
    sample(model, [[5]], max_new_tokens=1, stop_ids=[], seed=0, engine=False)
    shapes = decoder_calls(model)
    rollouts = sample(
        model, PROMPTS, group_size=4, max_new_tokens=14, stop_ids=STOPS, seed=1, engine=False
    )
    alive = [int((rollouts.mask_NT.sum(1) > t).sum()) for t in range(1, rollouts.mask_NT.shape[1])]
    rows = [shape[0] for shape in shapes[1:]]
    assert len(rows) == len(alive)
    assert all(
        left == running or left > COMPACT_FRAC * running for running, left in zip(rows, alive)
    )
    assert rows[-1] < rows[0] <= 16


@torch.no_grad()
def test_tokens_follow_the_models_distribution():
    model = tiny(vocab_size=6)
    num = 6000
    rollouts = sample(
        model,
        [[3, 4]],
        group_size=num,
        max_new_tokens=2,
        temperature=1.3,
        stop_ids=[],
        seed=0,
        max_rows=2500,
    )
    first_N, second_N = rollouts.token_ids_NT.T
    prob_V = torch.softmax(row_logits(model, [3, 4], [0])[0] / 1.3, -1).double()
    assert (
        chisquare(torch.bincount(first_N, minlength=6), num * prob_V / prob_V.sum()).pvalue > 0.01
    )
    common = int(prob_V.argmax())
    seen_N = second_N[first_N == common]
    prob_V = torch.softmax(row_logits(model, [3, 4, common], [0])[0] / 1.3, -1).double()
    assert (
        chisquare(torch.bincount(seen_N, minlength=6), len(seen_N) * prob_V / prob_V.sum()).pvalue
        > 0.01
    )


@torch.no_grad()
def test_truncated_sampling_reports_the_truncated_distribution():
    model = tiny()
    rollouts = sample(
        model,
        PROMPTS,
        group_size=2,
        max_new_tokens=6,
        temperature=1.5,
        top_k=5,
        top_p=0.8,
        stop_ids=[],
        seed=3,
    )
    for row, response in enumerate(responses(rollouts)):
        logits = row_logits(model, PROMPTS[rollouts.prompt_index_N[row]], response) / 1.5
        for t, token in enumerate(response):
            best = sorted(
                enumerate(torch.softmax(logits[t], -1).tolist()), key=lambda pair: -pair[1]
            )[:5]
            mass = sum(p for _, p in best)
            kept, total = {}, 0.0
            for v, p in best:
                if total < 0.8:
                    kept[v] = p / mass
                    total += p / mass
            assert rollouts.sampler_logp_NT[row, t].item() == pytest.approx(
                math.log(kept[token] / total), abs=1e-4
            )
            entropy = -sum(p / total * math.log(p / total) for p in kept.values())
            assert rollouts.entropy_NT[row, t].item() == pytest.approx(entropy, abs=1e-4)


def test_truncation_by_hand():
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64).log()

    def kept(**settings):
        return torch.softmax(truncate(logits, **settings), -1)[0].tolist()

    assert kept() == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert kept(top_k=2) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert kept(top_p=0.75) == pytest.approx(
        [0, 4 / 9, 2 / 9, 3 / 9]
    )  # 0.4 + 0.3 < 0.75, so 0.2 is in
    assert kept(top_p=0.65) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert kept(top_p=1e-6) == pytest.approx([0, 1, 0, 0])  # the likeliest token always stays
    # top-k first: (4, 3, 2) / 9; then 4/9 + 3/9 = 0.78 reaches 0.7
    assert kept(top_k=3, top_p=0.7) == pytest.approx([0, 4 / 7, 0, 3 / 7])
    assert kept(top_k=99) == pytest.approx([0.1, 0.4, 0.2, 0.3])


def test_draw_by_hand():
    logits = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0], dtype=torch.float64).log().expand(6, 6)
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    drawn = draw(logits, u)
    assert drawn.token_N.tolist() == [1, 1, 3, 3, 4, 4]
    assert drawn.logp_N.exp().tolist() == pytest.approx([0.25, 0.25, 0.5, 0.5, 0.25, 0.25])
    # 2 x 1/4 ln 4 + 1/2 ln 2 = 3/2 ln 2
    assert drawn.entropy_N.tolist() == pytest.approx([1.5 * math.log(2)] * 6)


def test_streams_do_not_touch_each_other():
    whole = uniforms(3, range(50), 40)
    assert whole.min() >= 0
    assert whole.max() < 1
    assert torch.equal(uniforms(3, [17], 7)[0], whole[17, :7])
    assert whole.mean().item() == pytest.approx(0.5, abs=0.02)  # 2000 draws: sd 0.0065
    assert len(torch.unique(whole)) == whole.numel()
    assert not torch.isin(uniforms(4, range(50), 40), whole).any()


def test_branch_continues_a_response_exactly():
    model, settings = tiny(), {"max_new_tokens": 10, "stop_ids": [2], "seed": 0}
    answer = responses(sample(model, [PROMPTS[0]], temperature=0, **settings))[0]
    assert len(answer) > 4
    fresh = branch(
        model, PROMPTS[0], [answer[:0], answer[:1], answer[:4]], num=2, temperature=0, **settings
    )
    assert fresh.prompt_index_N.tolist() == [0, 0, 1, 1, 2, 2]
    for row, cut in enumerate([0, 0, 1, 1, 4, 4]):
        rest = answer[cut:]
        assert responses(fresh)[row][: len(rest)] == rest


@torch.no_grad()
def test_branches_are_fresh_draws_given_the_prefix():
    model, prompts, prefixes = tiny(), PROMPTS[:2], [[6, 7], [8]]
    fresh = branch(
        model, prompts, prefixes, num=3, max_new_tokens=4, seed=2, stop_ids=[], temperature=1.0
    )
    rows = responses(fresh)
    assert len({tuple(row) for row in rows[:3]}) == 3
    for row, response in enumerate(rows):
        i = row // 3
        logp, _ = row_logp_entropy(model, prompts[i] + prefixes[i], response)
        torch.testing.assert_close(fresh.sampler_logp_NT[row], logp, atol=1e-4, rtol=0)


def test_branch_refuses_a_finished_prefix_and_unpaired_prompts():
    with pytest.raises(ValueError, match="prefix 1 ends with the stop token 2"):
        branch(tiny(), [1, 3], [[4], [4, 2]], num=1, max_new_tokens=2, seed=0, stop_ids=[2])
    with pytest.raises(ValueError, match="2 prompts for 3 prefixes"):
        branch(tiny(), PROMPTS[:2], [[4], [5], [6]], num=1, max_new_tokens=2, seed=0, stop_ids=[2])


def test_sampling_leaves_the_model_as_it_was():
    model = tiny(attention_dropout=0.9)
    expected = sample(model, PROMPTS, max_new_tokens=6, stop_ids=[], seed=0)
    model.train()
    rollouts = sample(model, PROMPTS, max_new_tokens=6, stop_ids=[], seed=0)
    assert model.training
    assert torch.equal(rollouts.token_ids_NT, expected.token_ids_NT)
    assert not rollouts.sampler_logp_NT.requires_grad


def test_the_global_random_state_is_neither_read_nor_changed():
    model = tiny()
    torch.manual_seed(1)
    first = sample(model, PROMPTS, max_new_tokens=6, stop_ids=[], seed=0)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)
    assert torch.equal(
        sample(model, PROMPTS, max_new_tokens=6, stop_ids=[], seed=0).token_ids_NT,
        first.token_ids_NT,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "no prompts"),
        ({"prompt_ids": [[3], []]}, "prompt 1 has no tokens"),
        ({"prompt_ids": [[3], [4] * 60]}, r"prompt 1 has 60 tokens.*64 positions"),
        ({"group_size": 0}, "group_size=0, expected at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.5}, "top_p=1.5"),
        ({"top_k": -1}, "top_k=-1"),
    ],
)
def test_bad_input_is_one_clear_line(changes, message):
    arguments = {"prompt_ids": PROMPTS, "max_new_tokens": 8, "stop_ids": [2], "seed": 0} | changes
    with pytest.raises(ValueError, match=message):
        sample(tiny(), **arguments)


def test_logits_that_are_not_finite_are_an_error_that_names_the_row():
    model = tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[8] = float("nan")
    with pytest.raises(ValueError, match=r"not finite in row 2 \(2 of 8 rows\)"):
        sample(model, PROMPTS, group_size=2, max_new_tokens=1, stop_ids=[2], seed=0)


def test_a_model_without_a_key_value_cache_is_an_error():
    model = MambaForCausalLM(
        MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=2)
    )
    with pytest.raises(ValueError, match="MambaModel takes no key-value cache"):
        sample(model, [[3]], max_new_tokens=2, stop_ids=[], seed=0)


def test_roomy_cache_holds_what_a_plain_one_holds():
    generator = torch.Generator().manual_seed(0)

    def states(rows, tokens):
        return torch.randn(rows, 2, tokens, 3, generator=generator)

    first = states(6, ROOM - 2)
    plain, roomy = DynamicLayer(), RoomyLayer(first, -first)
    plain.update(first, -first)
    alive = torch.tensor([True, False, True, False, False, True])
    for rows, keep in [
        (6, None),
        (6, None),
        (6, compaction(alive)),
        (3, torch.tensor([2, 0, 0, 1])),
        (4, None),
    ]:
        new = states(rows, 1)
        plain.update(new, -new)
        keys, values = roomy.update(new, -new)
        assert torch.equal(keys, plain.keys)
        assert torch.equal(values, plain.values)
        assert roomy.get_seq_length() == plain.get_seq_length()
        if keep is not None:
            plain.reorder_cache(keep)
            roomy.reorder_cache(keep)
            assert torch.equal(roomy.keys, plain.keys)
