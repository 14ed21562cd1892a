"""A softmax table over strings: a policy small enough that expectations and gradients are exact.

For tests and for teaching.

The language is every string of ``length`` letters. A context is a prompt and the prefix written so
far, a node of a trie, with a row of logits of its own; rollouts that share a prefix share those
parameters and no others.

Axes: C contexts, A letters, P prompts, L letters of a string, M = A^L strings, N rollouts, T = L
    tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from counterpoise.errors import nearest
from counterpoise.types import Prompt

SPLITS = ("train", "test")


@dataclasses.dataclass(frozen=True)
class Tabular:
    """Each prompt has a hidden string; the reward is 1 for it and ``partial`` times the share of
    right letters otherwise.

    Args:
        alphabet: the letters, each one token.
        length: letters of a string.
        num_prompts: distinct prompts, named ``0``, ``1``, ...
        partial: reward for a string that is right in places; 0 gives 0/1 rewards.

    Both splits have the same prompts: the table cannot generalise from one prompt to another.

    >>> task = Tabular("ab", length=3)
    >>> prompt = next(task.prompts("train", seed=0))
    >>> prompt.answer, task.reward(prompt, prompt.answer), task.reward(prompt, "zzz")
    ('aab', 1.0, 0.0)
    """

    is_trusted = True

    alphabet: str = "ab"
    length: int = 3
    num_prompts: int = 1
    partial: float = 0.0

    def __post_init__(self) -> None:
        if len(set(self.alphabet)) != len(self.alphabet) or len(self.alphabet) < 2:
            raise ValueError(
                f"tabular: alphabet needs at least two different letters, got {self.alphabet!r}."
            )
        if self.length < 1 or self.num_prompts < 1:
            raise ValueError(
                f"tabular: length and num_prompts must be at least 1, got {self.length} and"
                f" {self.num_prompts}."
            )

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The prompts in turn; ``test`` ends after each came once.

        The hidden strings depend on the table's sizes, not on the seed.
        """
        if split not in SPLITS:
            raise ValueError(f"tabular: unknown split {split!r}. {nearest(split, SPLITS)}")
        positions = count(start) if split == "train" else range(start, self.num_prompts)
        return (self.prompt((position + seed) % self.num_prompts) for position in positions)

    def prompt(self, number: int) -> Prompt:
        rng = random.Random(f"tabular/{self.alphabet}/{self.length}/{number}")
        return Prompt(
            str(number), str(number), "".join(rng.choice(self.alphabet) for _ in range(self.length))
        )

    def reward(self, prompt: Prompt, text: str) -> float:
        if text == prompt.answer:
            return 1.0
        return self.partial * sum(a == b for a, b in zip(text, prompt.answer)) / self.length


class TabularOutput(NamedTuple):
    """Named like the output of a Hugging Face causal LM."""

    logits: Tensor


class TabularPolicy(nn.Module):
    """Softmax table: pi(a | context) = exp(logits[context, a]) / sum_b exp(logits[context, b]).

    Token ids below A are letters; A + p stands for prompt p and comes first in ``input_ids``, so
    that ``forward`` reads like a causal
    LM: the logits at a position are those of the next letter.

    >>> policy = TabularPolicy(num_letters=2, length=2)
    >>> policy.logits.shape  # the contexts "", "a", "b"
    torch.Size([3, 2])
    """

    def __init__(
        self,
        num_letters: int,
        length: int,
        num_prompts: int = 1,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        self.num_letters, self.length, self.num_prompts = num_letters, length, num_prompts
        self.contexts_per_prompt = sum(num_letters**depth for depth in range(length))
        self.logits = nn.Parameter(
            torch.zeros(num_prompts * self.contexts_per_prompt, num_letters, dtype=dtype)
        )

    def context_NT(self, prompt_N: Tensor, token_ids_NT: Tensor) -> Tensor:
        """The row of the table that each token was drawn from.

        Breadth-first numbering: the node of prefix y_1..y_t is first(t) + its value as a number in
        base A, first(t) = 1 + A + .. + A^(t-1)."""
        node_N = torch.zeros_like(prompt_N)
        nodes = []
        for depth in range(token_ids_NT.shape[1]):
            nodes.append(node_N)
            node_N = node_N * self.num_letters + token_ids_NT[:, depth] + 1
        return torch.stack(nodes, 1) + prompt_N[:, None] * self.contexts_per_prompt

    def logp_NT(self, prompt_N: Tensor, token_ids_NT: Tensor) -> Tensor:
        """Log-prob of each token, differentiable by ``logits``."""
        logp_NTA = self.logits[self.context_NT(prompt_N, token_ids_NT)].log_softmax(-1)
        return logp_NTA.gather(2, token_ids_NT[:, :, None])[:, :, 0]

    def forward(self, input_ids: Tensor) -> TabularOutput:
        """Next-letter logits [N, S, A] for prompt token and letters; position L, after the last
        letter, has none and is not returned.
        """
        prompt_N, token_ids_NT = input_ids[:, 0] - self.num_letters, input_ids[:, 1:]
        padded_NT = torch.cat([token_ids_NT, torch.zeros_like(token_ids_NT[:, :1])], 1)[
            :, : self.length
        ]
        return TabularOutput(self.logits[self.context_NT(prompt_N, padded_NT)])

    @torch.no_grad()
    def sample(self, prompt_N: Tensor, generator: torch.Generator) -> Tensor:
        """One string a prompt, drawn letter by letter."""
        token_ids_NT = torch.zeros(len(prompt_N), self.length, dtype=torch.long)
        for depth in range(self.length):
            context_N = self.context_NT(prompt_N, token_ids_NT)[:, depth]
            token_ids_NT[:, depth] = torch.multinomial(
                self.logits[context_N].softmax(-1), 1, generator=generator
            )[:, 0]
        return token_ids_NT


def all_strings(num_letters: int, length: int) -> Tensor:
    """Every string as token ids [M, L], in dictionary order."""
    return torch.tensor(list(itertools.product(range(num_letters), repeat=length)))


def reward_table(task: Tabular) -> Tensor:
    """The reward of every string for every prompt, [P, M], strings in the order of ``all_strings``."""
    strings = ["".join(letters) for letters in itertools.product(task.alphabet, repeat=task.length)]
    prompts = [task.prompt(number) for number in range(task.num_prompts)]
    return torch.tensor(
        [[task.reward(prompt, text) for text in strings] for prompt in prompts], dtype=torch.float64
    )


def expected_reward(policy: TabularPolicy, reward_PM: Tensor) -> Tensor:
    """J = 1/P sum_p sum_y pi(y | p) R(p, y), summed over every string; differentiable.

    Its gradient by ``policy.logits`` is the exact policy gradient, 1/P sum_p sum_y pi(y | p) R(p,
    y) grad log pi(y | p).

    >>> policy = TabularPolicy(num_letters=2, length=3)
    >>> round(expected_reward(policy, reward_table(Tabular("ab", length=3))).item(), 6)  # one string of eight
    0.125
    """
    strings_ML = all_strings(policy.num_letters, policy.length)
    num_prompts, num_strings = reward_PM.shape
    prompt_N = torch.arange(num_prompts).repeat_interleave(num_strings)
    logp_N = policy.logp_NT(prompt_N, strings_ML.repeat(num_prompts, 1)).sum(1)
    return (logp_N.exp() * reward_PM.reshape(-1).to(logp_N.dtype)).sum() / num_prompts
