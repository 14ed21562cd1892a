"""Tools and environments, by TRL's own loop: what they said is context, never credit."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
from counterpoise.run.read import open_run
from counterpoise.run.rollouts import read_rollouts
from helpers import trl_tiny, trl_tools

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(trl.__version__ < "1.16", reason="environment_factory of TRL 1.16"),
    pytest.mark.filterwarnings("ignore:The tokenizer has a legacy:FutureWarning"),
]
REPLIES = {
    "tool": {"tools": [trl_tools.look_up]},
    "env": {"environment_factory": trl_tools.Library},
}
METHODS = {
    "dapo": {},
    "gtpo": {},
    "delta": {},
    "ktae": {},
    "dfpo_min": {},
    "tpo": {},
    "turn_rloo": {},
    "gigpo": {},
    "shared_prefix": {"method": "dapo", "method_axes": {"credit": ["shared_prefix"]}},
}


def trained(folder, replies="tool", **args):
    trainer = trl_tiny.ours(
        folder,
        args=trl_tools.TOOLS | {"ledger_every": 1, "max_steps": 4} | args,
        processing_class=trl_tools.tokenizer(),
        train_dataset=trl_tools.prompts(),
        reward_funcs=trl_tools.graded,
        **REPLIES[replies],
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("replies", REPLIES)
@pytest.mark.parametrize("method", METHODS)
def test_replies_get_no_credit(replies, method, tmp_path):
    """The rollouts are whole in the file, replies masked; credit is the core's on those masks."""
    trainer = trained(tmp_path, replies, **{"method": method} | METHODS[method])
    micro = trainer._buffered_inputs[0]
    is_reply_NT = (micro["completion_mask"] * (1 - micro["tool_mask"])).bool()
    assert is_reply_NT.any()
    assert (micro["cp_credit"][is_reply_NT] == 0).all()
    folder = tmp_path / "counterpoise"
    assert open_run(folder).problems == []
    batch = read_rollouts(folder / "rollouts" / "batch_000000.parquet").batch
    is_hole_NT = ~batch.mask_NT & (batch.mask_NT.flip(1).cumsum(1).flip(1) > 0)
    assert is_hole_NT.any()
    table = pq.read_table(folder / "rollouts" / "batch_000000.parquet").to_pandas()
    replies_said = [
        ids[~mask].tolist() for ids, mask in zip(table["token_ids"], table["loss_mask"])
    ]
    words = {token for row in replies_said for token in row}
    assert words <= set(range(14))
    settings = trainer.credit_setup.method
    if not settings.needs:
        expected = settings.assign(batch).credit_NT
        written = torch.tensor([c for row in table["credit"] for c in row])
        row_NT = batch.mask_NT.flip(1).cumsum(1).flip(1) > 0
        torch.testing.assert_close(written, expected[row_NT], rtol=1e-4, atol=1e-5)


def test_the_ledger_balances(tmp_path):
    """With SGD an update is the sum of the gradients of the model's tokens: nothing is left for
    "rest", and no reply has a row.
    """
    sgd = {"optim": "sgd", "learning_rate": 0.005, "max_grad_norm": 0.5}
    trainer = trained(tmp_path, method="dapo", **sgd)
    tokens = pq.read_table(
        tmp_path / "counterpoise" / "tokens" / "batch_000000.parquet"
    ).to_pandas()
    masks = [micro["completion_mask"] * micro["tool_mask"] for micro in trainer._buffered_inputs]
    assert len(tokens) == sum(int(mask.sum()) for mask in masks)
    size = tokens["predicted"].abs().max()
    assert tokens["part_sign_rest"].abs().max() < 1e-3 * size
    assert tokens[["predicted", "delta"]].corr().iloc[0, 1] > 0.99


def test_signs_in_the_ledger_are_those_of_turns(tmp_path):
    """A turn is compared with those rollouts that also got to it, so a rollout has two numbers."""
    trained(tmp_path, method="turn_rloo", plan="query_preserved")
    tokens = pq.read_table(
        tmp_path / "counterpoise" / "tokens" / "batch_000000.parquet"
    ).to_pandas()
    assert (np.sign(tokens["credit"]) == tokens["sign"]).all()
    assert tokens.groupby("rollout")["credit"].nunique().max() > 1
    assert (np.sign(tokens["advantage"]) != tokens["sign"]).any()


def test_a_reply_that_differs_ends_what_rollouts_share(tmp_path):
    """``env_mask``: the same word of the model after another reply is another context. Four
    rollouts share what is before the reply, two the same reply and the word after it.
    """

    def rollouts(prompts, trainer):
        place, out = {}, {"prompt_ids": [], "completion_ids": [], "env_mask": [], "logprobs": None}
        for prompt in prompts:
            k = place[prompt] = place.get(prompt, -1) + 1
            out["prompt_ids"].append(trainer.processing_class(prompt)["input_ids"])
            out["completion_ids"].append([4, 5, 6 + k % 2, 7, 8 + k // 2, 1])
            out["env_mask"].append([1, 1, 0, 1, 1, 1])
        return out

    def by_place(completions, **columns):
        return [float(k % 4 < 2) for k in range(len(completions))]

    args = {"method": "dapo", "method_axes": {"credit": ["shared_prefix"]}, "max_steps": 1}
    trainer = trl_tiny.ours(tmp_path, args=args, rollout_func=rollouts, reward_funcs=by_place)
    trainer.train()
    share_T = torch.tensor([0.25, 0.25, 0.0, 0.5, 1.0, 1.0])
    for micro in trainer._buffered_inputs:
        expected_NT = micro["cp_advantage"][:, None] * share_T
        assert expected_NT.abs().sum() > 0
        torch.testing.assert_close(micro["cp_credit"], expected_NT)
