"""An environment of words, and a tokenizer whose words are calls of ``act``: what ``as_trl`` makes
of it is played by TRL's own loop with a tiny model.
"""

from __future__ import annotations

import dataclasses
from itertools import count, islice

from counterpoise.environments import Reply
from counterpoise.types import Prompt
from helpers import trl_tiny
from helpers.trl_tools import TEMPLATE, Caller

CALLS = ("w3", "w5", "w7")
TOOLS = {"max_completion_length": 26, "max_tool_calling_iterations": 3, "learning_rate": 5e-3}


@dataclasses.dataclass
class Walk:
    """An episode of at most three steps."""

    goal: str
    told: bool
    steps: tuple[str, ...] = ()

    def step(self, action: str) -> Reply:
        self.steps += (action,)
        reward = 1.0 if action == self.goal else -0.25 * self.steps.count(action)
        return Reply(
            text="w1 w2" if action == self.goal else "w4",
            reward=reward,
            is_done=len(self.steps) == 3,
            state="/".join(sorted(self.steps)) if self.told else "",
            score=len(set(self.steps)) / 4 if self.told else None,
            metrics={"repeats": float(len(self.steps) - len(set(self.steps)))},
        )


class Words:
    """The goal is one of the words that call."""

    is_trusted = True

    def __init__(self, told: bool = True) -> None:
        self.told = told

    def prompts(self, split, seed, start=0):
        texts = trl_tiny.prompts(48)["prompt"]
        return (Prompt(str(k), texts[k % 48], "", {"goal": CALLS[k % 3]}) for k in count(start))

    def start(self, prompt, seed):
        return Walk(prompt.meta["goal"], self.told)

    def first_state(self, prompt):
        return "start" if self.told else ""


class Failing(Words):
    """Some prompts have no goal."""

    num_good = 5

    def prompts(self, split, seed, start=0):
        for k, prompt in enumerate(islice(super().prompts(split, seed, start), 48)):
            yield prompt if k % 6 < self.num_good else prompt._replace(meta={})


class Broken(Failing):
    num_good = 0


class Actor(Caller):
    """w3, w5 and w7 in a response are calls of ``act``, w9 one with a wrong argument, w11 one of
    another tool.
    """

    def parse_response(self, ids, **kwargs):
        text = self.decode(ids, skip_special_tokens=True)
        calls = [call_of(word) for word in text.split() if word in (*CALLS, "w9", "w11")]
        return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def call_of(word):
    name, argument = ("look", "text") if word == "w11" else ("act", "text")
    argument = "word" if word == "w9" else argument
    return {"type": "function", "function": {"name": name, "arguments": {argument: word}}}


def tokenizer():
    words = trl_tiny.tiny_tokenizer()
    words.__class__, words.chat_template = Actor, TEMPLATE
    return words
