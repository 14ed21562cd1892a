"""Conversations of words as a ``rollout_func`` of TRL, with what each turn earned: the same
whatever the number of processes.
"""

from __future__ import annotations

import math

import torch

import counterpoise as cp
from counterpoise.hosts.trl import turn_reward
from helpers import trl_tiny

STATES = ("dark", "light", "")


def talked(prompts, trainer):
    """One to four turns of one to three words, a word or two between them; rewards are quarters."""
    out = {name: [] for name in FIELDS} | {"logprobs": None}
    place = {}
    for prompt in prompts:
        k = place[prompt] = place.get(prompt, -1) + 1
        gen = torch.Generator().manual_seed(1000 * sum(map(ord, prompt)) + k)
        row = one_row(gen)
        out["prompt_ids"].append(trainer.processing_class(prompt)["input_ids"])
        for name, value in row.items():
            out[name].append(value)
    return out


FIELDS = ("prompt_ids", "completion_ids", "env_mask", "turn_rewards", "turn_states", "turn_scores")


def one_row(gen):
    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=gen))

    ids, mask, num = [], [], number(1, 5)
    for turn in range(num):
        for drawn, count in ((1, number(1, 4)), (0, number(1, 3) if turn < num - 1 else 0)):
            ids += [number(2, len(trl_tiny.WORDS) + 2) for _ in range(count)]
            mask += [drawn] * count
    return {
        "completion_ids": [*ids, 1],
        "env_mask": [*mask, 1],
        "turn_rewards": [number(-2, 5) / 4 for _ in range(num)],
        "turn_states": [STATES[number(0, 3)] for _ in range(num)],
        "turn_scores": [None if number(0, 4) == 0 else number(0, 9) / 8 for _ in range(num)],
    }


def expected_batch(rollouts, group_size=4):
    """The TokenBatch of what ``talked`` returned, written down token by token."""
    ids, masks = rollouts["completion_ids"], rollouts["env_mask"]
    rewards, num = rollouts["turn_rewards"], len(ids)
    most, width = max(map(len, rewards)), max(map(len, ids))
    turn_NT = torch.full((num, width), -1)
    for row, mask in enumerate(masks):
        turn, before = -1, 0
        for t, drawn in enumerate(mask):
            turn += int(drawn and not before)
            turn_NT[row, t], before = turn if drawn else -1, drawn
    keys = [[-1 if not s else 10 * (r // group_size) + STATES.index(s) for s in row]
            for r, row in enumerate(rollouts["turn_states"])]  # fmt: skip

    def padded(rows, fill):
        return torch.tensor([[*row, *[fill] * (most - len(row))] for row in rows])

    scores = [[math.nan if s is None else s for s in row] for row in rollouts["turn_scores"]]
    return cp.TokenBatch.from_lists(
        ids,
        group=[row // group_size for row in range(num)],
        reward=[sum(row) for row in rewards],
        sampler_logp=[[-1.0] * len(row) for row in ids],
    ).replace(
        mask_NT=turn_NT >= 0,
        turn_NT=turn_NT,
        turn_reward_NU=padded(rewards, 0.0),
        turn_mask_NU=padded([[True] * len(row) for row in rewards], False),
        turn_score_NU=padded(scores, math.nan),
        state_NU=padded(keys, -1),
    )


class Heard:
    """A ``rollout_func`` that remembers what it returned; ``change`` edits it before."""

    def __init__(self, change=None):
        self.change, self.returned = change, []

    def __call__(self, prompts, trainer):
        out = talked(prompts, trainer)
        if self.change is not None:
            self.change(out)
        self.returned.append({name: value and [*value] for name, value in out.items()})
        return out


def train(folder, change=None, reward_funcs=turn_reward, **args):
    """One generation; the trainer, TRL's output for it and what was returned to TRL."""
    heard, outputs = Heard(change), []
    args = {"max_steps": 1, "max_completion_length": 32} | args
    trainer = trl_tiny.ours(folder, args=args, rollout_func=heard, reward_funcs=reward_funcs)
    take = trainer._take_batch
    trainer._take_batch = lambda output: outputs.append(dict(output)) or take(output)
    trainer.train()
    return trainer, outputs[0], heard.returned[0]
