"""Our environments inside TRL: plain text by counterpoise's own sampler (``as_rollout_func``)."""

from __future__ import annotations

import dataclasses
from itertools import islice

import pyarrow.parquet as pq
import pytest
import torch

pytest.importorskip("trl", reason="TRL is not installed: pip install counterpoise[trl]")
import counterpoise as cp
from counterpoise.environments import Reply
from counterpoise.environments.guess import Guess
from counterpoise.hosts.trl import as_rollout_func
from counterpoise.hosts.trl.conversations import sampling_seed
from counterpoise.policy import encode_prompts, load_model
from counterpoise.run.read import open_run
from counterpoise.trainer.config import parse_config
from counterpoise.trainer.conversations import hold
from helpers import rooms, trl_tiny

pytestmark = pytest.mark.hosts
METHODS = ("turn_rloo", "gigpo", "mt_grpo", "igpo", "turn_credit")
LIMITS = {"max_turns": 2, "max_turn_tokens": 4}
ARGS = {
    "method": "turn_rloo",
    "max_completion_length": 8,
    "num_generations": 8,
    "per_device_train_batch_size": 32,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_steps": 1,
}


@dataclasses.dataclass(frozen=True)
class Silent:
    """Answers with nothing, so that two turns meet without a token between them."""

    is_trusted = True

    def prompts(self, split, seed, start=0):
        return Guess(n=4).prompts(split, seed, start)

    def start(self, prompt, seed):
        return self

    def step(self, action):
        return Reply("", reward=float(len(action)))


def trainer_of(folder, environment, make=trl_tiny.ours, **args):
    policy = load_model("bundled_turns")
    play = as_rollout_func(environment, chat=False, num_prompts=64, **LIMITS)
    return make(
        folder, args=ARGS | args, model=policy.model, processing_class=policy.tokenizer, **play
    )


def trained(folder, environment, **args):
    """The trainer, TRL's dict of its first generation, the episodes that were played and the seed
    of sampling.
    """
    trainer = trainer_of(folder, environment, **args)
    outputs, asked, take, play = [], [], trainer._take_batch, trainer.rollout_func

    def watched(prompts, own):
        episodes = [prompt[0]["episode"] for prompt in prompts]
        asked.append((episodes, sampling_seed(own, episodes[0])))
        return play(prompts, own)

    trainer.rollout_func = watched
    trainer._take_batch = lambda output: outputs.append(dict(output)) or take(output)
    trainer.train()
    return trainer, outputs[0], *asked[0]


def held(environment, episodes, seed):
    """The same generation by counterpoise's own trainer."""
    policy, stream = load_model("bundled_turns"), list(islice(environment.prompts("train", 0), 64))
    prompts = [stream[episode] for episode in episodes[::8]]
    rollouts = {"prompts": 8, "group_size": 8, "max_new_tokens": 8, **LIMITS}
    task, method = {"name": "guess"}, {"name": "turn_rloo"}
    recipe = {"model": "bundled_turns", "chat": False, "task": task, "method": method}
    config = parse_config({**recipe, "rollouts": rollouts})
    ids = encode_prompts(policy, [prompt.text for prompt in prompts], chat=False)
    sampling = {"group_size": 8, "seed": seed, "temperature": 1.0}
    return hold(policy, environment, prompts, ids, config, **sampling).batch


@pytest.mark.parametrize("method", METHODS)
def test_rows_and_credit_are_those_of_counterpoise_train(method, tmp_path):
    """The same seed draws the same tokens, and on them every turn gets the same credit."""
    game = Guess(n=4, turns=2, cost=0.125)
    _, output, episodes, seed = trained(tmp_path, game, method=method)
    own = held(game, episodes, seed)
    mask_NT = output["completion_mask"].bool()
    assert torch.equal(output["completion_ids"][mask_NT], own.token_ids_NT[mask_NT])
    assert torch.equal((output["completion_mask"] * output["tool_mask"]).bool(), own.mask_NT)
    expected = cp.method(method).assign(own)
    torch.testing.assert_close(output["cp_credit"], expected.credit_NT, rtol=0, atol=2e-6)
    assert expected.credit_NT.abs().sum() > 0
    assert (output["cp_credit"][~own.mask_NT] == 0).all()
    if method != "mt_grpo":  # here the rewards of all first turns are equal
        assert (expected.advantage_NU[:, 0] != expected.advantage_NU[:, 1]).any()


def test_a_model_learns(tmp_path):
    """From guesses among all digits to guesses in the range."""
    args = {"per_device_train_batch_size": 64, "max_steps": 40, "learning_rate": 4e-4}
    trainer = trainer_of(tmp_path, Guess(n=4, turns=2), **args)
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:2]) / 2 + 0.1


def test_uniform_is_plain_trl(tmp_path):
    args = {name: value for name, value in ARGS.items() if name != "method"} | {"max_steps": 4}

    def make(folder, **settings):
        return trl_tiny.plain(folder, **settings | {"args": args})

    plain = trainer_of(tmp_path / "a", Guess(n=4), make)
    plain.train()
    ours = trainer_of(tmp_path / "b", Guess(n=4), method="uniform", ledger_every=1, max_steps=4)
    ours.train()
    trl_tiny.assert_identical(trl_tiny.weights(plain), trl_tiny.weights(ours))


def test_turns_that_meet(tmp_path):
    """Spans tell them apart where the mask cannot; the run folder has them."""
    _, output, episodes, seed = trained(tmp_path, Silent(), ledger_every=1, max_steps=2)
    own = held(Silent(), episodes, seed)
    assert torch.equal(output["cp_turn"], own.turn_NT)
    assert (own.turn_NT.amax(1) == 1).any()
    expected = cp.method("turn_rloo").assign(own).credit_NT
    torch.testing.assert_close(output["cp_credit"], expected, rtol=0, atol=2e-6)
    folder = tmp_path / "counterpoise"
    assert open_run(folder).problems == []
    table = pq.read_table(folder / "rollouts" / "batch_000000.parquet").to_pandas()
    assert [len(row) for row in table["turn_action"]] == (own.turn_NT.amax(1) + 1).tolist()


def test_an_environment_that_fails_costs_its_rollouts(tmp_path):
    """One prompt in seven; the others are compared as if it were not there."""
    trainer, output, episodes, _ = trained(tmp_path, rooms.Broken(when=1))
    is_out_N = torch.tensor([episode % 7 == 0 for episode in episodes])
    assert is_out_N.any()
    assert torch.equal(output["cp_row"] == -1, is_out_N)
    left_out = trainer.state.log_history[0]["credit/left_out_frac"]
    assert left_out == pytest.approx(float(is_out_N.float().mean()))
    assert (output["cp_credit"][is_out_N] == 0).all()
    assert output["cp_credit"][~is_out_N].abs().sum() > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [({"min_p": 0.1}, "has no min_p"), ({"repetition_penalty": 1.2}, "has no repetition_penalty")],
)
def test_sampling_that_we_do_not_have(args, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, Guess(n=4), **args).train()


def test_another_dataset(tmp_path):
    policy = load_model("bundled_turns")
    play = as_rollout_func("guess", n=4, chat=False) | {"train_dataset": trl_tiny.prompts()}
    model = {"model": policy.model, "processing_class": policy.tokenizer}
    with pytest.raises(ValueError, match="does not say which episode it begins"):
        trl_tiny.ours(tmp_path, args=ARGS, **model, **play).train()
