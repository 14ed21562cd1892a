"""A scripted other side, and conversations with it."""

from __future__ import annotations

import random

import torch

from counterpoise.sampling.conversation import converse
from counterpoise.sampling.slots import Answer

PROMPTS = [[3, 4, 5], [6], [3, 4, 5], [7, 8, 9, 10, 11], [6, 6], [12, 3]] * 3
MAX_TOKENS = 200


class Script:
    """Another side whose answers depend on what was said alone; it may take its time."""

    def __init__(self, *, num_turns=4, longest=6, seed=0, delay=0):
        self.num_turns, self.longest, self.delay = num_turns, longest, delay
        self.rng, self.turns, self.open = random.Random(seed), {}, []
        self.heard = []

    def first_limit(self, row):
        return 3 + row % 5

    def hear(self, row, token_ids):
        self.heard.append((row, tuple(token_ids)))
        self.turns[row] = self.turns.get(row, 0) + 1
        self.open.append((self.rng.randint(0, self.delay), row, token_ids))

    def answers(self, *, wait):
        self.open = [(left - 1, row, ids) for left, row, ids in self.open]
        while wait and self.open and min(self.open)[0] > 0:
            self.open = [(left - 1, row, ids) for left, row, ids in self.open]
        ready = [one for one in self.open if one[0] <= 0]
        self.open = [one for one in self.open if one[0] > 0]
        return [self._answer(row, ids) for _, row, ids in ready]

    def _answer(self, row, ids):
        own = random.Random(f"{row} {ids}")
        said = [own.randint(0, 15) for _ in range(own.randint(0, self.longest))]
        length = len(ids) + len(said)
        if self.turns[row] == self.num_turns or length + 1 >= MAX_TOKENS:
            return Answer(row)
        return Answer(row, said, min(MAX_TOKENS, length + own.randint(1, 7)))


def play(model, *, engine, script=None, **settings):
    script = script or Script()
    given = {"stop_ids": [2], "seed": 5, "max_tokens": MAX_TOKENS, **settings}
    return converse(model, PROMPTS, script, engine=engine, **given), script


def assert_equal_conversations(first, second):
    (a, script_a), (b, script_b) = first, second
    assert sorted(script_a.heard) == sorted(script_b.heard)
    assert torch.equal(a.token_ids_NT, b.token_ids_NT)
    assert torch.equal(a.mask_NT, b.mask_NT)
    assert a.stop_reason == b.stop_reason
