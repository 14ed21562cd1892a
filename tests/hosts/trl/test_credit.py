"""The credit that TRL trains on is the core's, on columns that an independent forward confirms."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
import counterpoise.hosts.trl.trainer as host
from counterpoise.stage import Stage
from helpers import trl_tiny

pytestmark = pytest.mark.hosts
ONE_STEP = {"max_steps": 1}
# one update a generation: TRL scores nothing itself, so the columns come from a forward of ours
ALIGNED = {"steps_per_generation": 2, "max_steps": 1}


@pytest.fixture
def batches(monkeypatch):
    """Every TokenBatch that a trainer builds, with TRL's own dict beside it and the policy's
    weights at that moment.
    """
    seen, build = [], host.token_batch

    def watched(trainer, made, output, *args):
        batch = build(trainer, made, output, *args)
        head_VD = (
            None if batch.head_VD is None else batch.head_VD.clone()
        )  # the column is the live weight
        seen.append((batch.replace(head_VD=head_VD), dict(output), trl_tiny.weights(trainer)))
        return batch

    monkeypatch.setattr(host, "token_batch", watched)
    return seen


def by_plain_forward(weights, output, temperature):
    """Log-probs, entropies and hidden states of each completion token: the model's own logits, one
    row at a time, no padding.
    """
    model = trl_tiny.tiny_model(0)
    model.load_state_dict(weights)
    logp, entropy, hidden = [], [], []
    for row in range(len(output["completion_ids"])):
        prompt = output["prompt_ids"][row][output["prompt_mask"][row].bool()]
        response = output["completion_ids"][row][output["completion_mask"][row].bool()]
        with torch.no_grad():
            out = model(input_ids=torch.cat([prompt, response])[None], output_hidden_states=True)
        at = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        logp_TV = torch.log_softmax(out.logits[0, at] / temperature, dim=-1)
        logp.append(logp_TV.gather(1, response[:, None])[:, 0])
        entropy.append(-(logp_TV.exp() * logp_TV).sum(-1))
        hidden.append(out.hidden_states[-1][0, at])
    return torch.cat(logp), torch.cat(entropy), torch.cat(hidden)


@pytest.mark.parametrize("when", ["scored by TRL", "scored by us"])
def test_columns_are_what_a_plain_forward_gives(when, tmp_path, batches):
    args = {
        "method": "delta",
        "method_axes": {"credit": ["delta", "top_entropy"]},
        "temperature": 0.7,
    }
    trainer = trl_tiny.ours(
        tmp_path, args=args | (ONE_STEP if when == "scored by TRL" else ALIGNED)
    )
    trainer.train()
    batch, output, weights = batches[0]
    assert ("old_per_token_logps" in output) == (when == "scored by TRL")
    logp_M, entropy_M, hidden_MD = by_plain_forward(weights, output, 0.7)
    mask_NT = batch.mask_NT
    torch.testing.assert_close(batch.sampler_logp_NT[mask_NT], logp_M, rtol=0, atol=2e-6)
    torch.testing.assert_close(batch.entropy_NT[mask_NT], entropy_M, rtol=0, atol=2e-6)
    torch.testing.assert_close(batch.hidden_NTD[mask_NT], hidden_MD, rtol=0, atol=2e-6)


@pytest.mark.parametrize("proxy", ["topk", "head"])
@pytest.mark.parametrize("bf16", [False, True])
def test_columns_of_the_head(proxy, bf16, tmp_path, batches):
    """In mixed precision too, where accelerate changes the model's forward."""
    args = {"method": "delta", "method_axes": {"credit": {"proxy": proxy}}, "bf16": bf16}
    trainer = trl_tiny.ours(tmp_path, args=args | ONE_STEP)
    trainer.train()
    batch, output, weights = batches[0]
    assert torch.equal(batch.head_VD, weights["lm_head.weight"])
    if proxy == "topk" and not bf16:
        _, _, hidden_MD = by_plain_forward(weights, output, 1.0)
        best = torch.log_softmax(hidden_MD @ weights["lm_head.weight"].T, dim=-1).topk(14)
        assert torch.equal(batch.topk_ids_NTK[batch.mask_NT], best.indices)
        torch.testing.assert_close(
            batch.topk_logp_NTK[batch.mask_NT], best.values, rtol=0, atol=5e-6
        )


SCORED = ["igpo", "turn_credit"]


@pytest.mark.parametrize("name", SCORED)
def test_presets_that_read_scores_of_turns_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=f"the method '{name}' reads turn_score_NU"):
        trl_tiny.ours(tmp_path, args={"method": name} | ONE_STEP)


SAMPLED_MORE = ["spo_chain", "vine_ppo"]


@pytest.mark.parametrize("name", SAMPLED_MORE)
def test_presets_that_sample_more_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="prefix_value samples more .* TRL samples by itself"):
        trl_tiny.ours(tmp_path, args={"method": name} | ONE_STEP)


TAUGHT = ["opsd", "sdpo", "top_d"]  # ``test_teacher``
UNMEASURED = {
    "vimpo": "ref_kl_NT, the KL of whole distributions",
    "oar": "importance_NT, the influence of tokens on the answer",
}


@pytest.mark.parametrize("name", UNMEASURED)
def test_presets_whose_columns_trl_cannot_measure_are_refused(name, tmp_path):
    line = f"the method '{name}' reads {UNMEASURED[name]}.*Use counterpoise train"
    with pytest.raises(ValueError, match=line):
        trl_tiny.ours(tmp_path, args={"method": name} | ONE_STEP)


LEFT_OUT = {*SCORED, *SAMPLED_MORE, *TAUGHT, *UNMEASURED}


@pytest.mark.parametrize("name", sorted(set(cp.methods()) - LEFT_OUT))
def test_every_preset_trains_on_its_credit(name, tmp_path, batches):
    """For each preset: the rows of the first micro-batch carry the core's credit, and an update
    follows.
    """
    axes = trl_tiny.axes_of(name)
    trainer = trl_tiny.ours(tmp_path, args={"method": name, "method_axes": axes} | ONE_STEP)
    start = trl_tiny.weights(trainer)
    trainer.train()
    batch, _, _ = batches[0]
    expected = cp.method(name, **axes).assign(batch, seed=trainer.args.seed)
    assert float(expected.credit_NT.abs().sum()) > 0
    micro = trainer._buffered_inputs[0]
    row_B = micro["cp_row"]
    advantages = (
        micro["advantages"]
        if micro["advantages"].ndim == 2
        else micro["advantages"][:, None] * batch.mask_NT[row_B]
    )
    assert torch.equal(advantages, expected.credit_NT[row_B])
    assert 0 < trl_tiny.largest_gap(start, trl_tiny.weights(trainer)) < math.inf


def test_groups_and_rewards(tmp_path, batches):
    """Groups by position; the reward is the weighted sum of the functions, also where two of them
    have the same name.
    """
    functions = [
        lambda completions, **kw: [float(len(text)) for text in completions] for _ in range(2)
    ]
    trainer = trl_tiny.ours(
        tmp_path,
        args={"method": "dapo", "reward_weights": [1.0, 0.5]} | ONE_STEP,
        reward_funcs=functions,
    )
    trainer.train()
    batch, output, _ = batches[0]
    assert batch.group_N.tolist() == [row // 4 for row in range(32)]
    texts = trainer.processing_class.batch_decode(
        output["completion_ids"], skip_special_tokens=True
    )
    assert batch.reward_N.tolist() == [1.5 * len(text) for text in texts]


def test_a_reward_function_may_skip_rows(tmp_path, batches):
    """None of one function leaves the others' sum; None of all: ``test_left_out``."""

    def some(completions, **kwargs):
        return [None if k % 2 else 1.0 for k in range(len(completions))]

    both = trl_tiny.ours(
        tmp_path, args={"method": "dapo"} | ONE_STEP, reward_funcs=[some, trl_tiny.graded]
    )
    both.train()
    batch, output, _ = batches[0]
    texts = both.processing_class.batch_decode(output["completion_ids"], skip_special_tokens=True)
    assert batch.reward_N.tolist() == [
        g + (k % 2 == 0) for k, g in enumerate(trl_tiny.graded(texts))
    ]


def test_weights_on_trls_advantages(tmp_path, batches):
    """``method_advantage=False``: the method's weights, TRL's advantages (here: batch scaling)."""
    args = {"method": "delta", "method_advantage": False, "scale_rewards": "batch"}
    trainer = trl_tiny.ours(tmp_path, args=args | ONE_STEP)
    trainer.train()
    batch, output, _ = batches[0]
    reward_N = batch.reward_N
    centred_N = (reward_N.view(-1, 4) - reward_N.view(-1, 4).mean(1, keepdim=True)).flatten()
    torch.testing.assert_close(output["advantages"], centred_N / (reward_N.std() + 1e-4))
    fixed = dataclasses.replace(
        cp.method("delta"), advantage=Stage(lambda reward_N, group_N: output["advantages"])
    )
    micro = trainer._buffered_inputs[0]
    assert torch.equal(micro["advantages"], fixed.assign(batch).credit_NT[micro["cp_row"]])


def test_the_completions_table_shows_our_advantages(tmp_path):
    import pandas as pd

    trainer = trl_tiny.ours(
        tmp_path,
        args={"method": "rloo", "log_completions": True, "num_completions_to_print": 1} | ONE_STEP,
    )
    trainer.train()
    table = pd.read_parquet(next((tmp_path / "completions").glob("*.parquet")))
    expected = cp.method("rloo").advantage(
        torch.tensor(table["graded"].to_numpy()), torch.arange(32) // 4
    )
    assert table["advantage"].to_numpy() == pytest.approx(expected.numpy(), abs=1e-6)


def test_tokens_of_a_tool_have_no_credit(tmp_path, batches):
    """TRL's env_mask (what an environment wrote) is no part of the batch, and the loss does not see
    it.
    """

    def with_tool(prompts, trainer):
        out = trl_tiny.told(prompts, trainer)
        return out | {
            "env_mask": [[int(k != 1) for k in range(len(ids))] for ids in out["completion_ids"]]
        }

    trainer = trl_tiny.ours(
        tmp_path, args={"method": "dfpo_min"} | ONE_STEP, rollout_func=with_tool
    )
    trainer.train()
    batch, output, _ = batches[0]
    assert not batch.mask_NT[:, 1].any()
    assert torch.equal(batch.mask_NT, (output["completion_mask"] * output["tool_mask"]).bool())
    assert all((micro["cp_rows"].scale_NT[:, 1] == 0).all() for micro in trainer._buffered_inputs)


def test_one_rollout_a_prompt(tmp_path, batches):
    """TRL wants two; a method that does not compare the rollouts of a prompt trains with one."""
    trainer = trl_tiny.ours(tmp_path, args={"method": "crf_ntf", "num_generations": 1} | ONE_STEP)
    start = trl_tiny.weights(trainer)
    trainer.train()
    batch, _, _ = batches[0]
    assert batch.group_N.tolist() == list(range(32))
    assert trl_tiny.largest_gap(start, trl_tiny.weights(trainer)) > 0


def test_evaluation_is_trls(tmp_path):
    args = {
        "method": "dfpo_min",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
    }
    trainer = trl_tiny.ours(tmp_path, args=args | ONE_STEP, eval_dataset=trl_tiny.prompts(4))
    trainer.train()
    assert any("eval_reward" in row for row in trainer.state.log_history)


def test_the_mixin_alone(tmp_path, batches):
    """On somebody's own subclass of GRPOTrainer, whose reward is its own too."""

    class Mine(trl_tiny.GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            return 2 * super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    class Credited(host.CreditMixin, Mine):
        pass

    trainer = trl_tiny.ours(tmp_path, args={"method": "dapo"} | ONE_STEP, cls=Credited)
    trainer.train()
    assert set(batches[0][0].reward_N.tolist()) == {0.0, 2.0}
