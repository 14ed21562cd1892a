"""The start of the built-in games knows how to write an action and not which one is good."""

from __future__ import annotations

import pytest
import torch

from counterpoise.environments.guess import Guess
from counterpoise.environments.lookup import ANSWERS, Lookup
from counterpoise.environments.mastermind import Mastermind
from counterpoise.environments.values import transcript, tree, values
from counterpoise.policy import load_model
from counterpoise.policy.actions import action_probabilities

LOOKUP = Lookup()
SUM = LOOKUP.prompt("be", "040070")


@pytest.fixture(scope="module")
def start():
    return load_model("bundled_turns")


def test_a_character_is_a_token_and_the_semicolon_ends_a_turn(start):
    text = "1-g:8;<4;>?abc:1b1w=!+"
    ids = start.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text) and start.tokenizer.decode(ids) == text
    assert start.tokenizer.decode(start.stop_ids) == ";"
    assert start.tokenizer.decode(ids, skip_special_tokens=True) == text.replace(";", "")
    assert sum(p.numel() for p in start.model.parameters()) < 400_000


@pytest.mark.parametrize(
    ("game", "prompt", "value"),
    [
        (Guess(n=8, turns=2), Guess(n=8).prompt(3), 1 - (7 / 8) ** 2),
        (Guess(turns=2), Guess().prompt(3), 1 - (15 / 16) ** 2),
        (Mastermind(turns=2), Mastermind().prompt("abc"), 1 - (26 / 27) ** 2),
    ],
)
def test_the_start_guesses_blindly(start, game, prompt, value):
    histories = tree(game, prompt)
    probability_HA = action_probabilities(start, prompt, histories)
    assert probability_HA.sum(1).min() > 0.99
    assert values(histories, probability_HA).value_H[0].item() == pytest.approx(value, rel=0.03)


def test_the_start_can_add_and_does_not_know_what_to_ask(start):
    histories = tree(LOOKUP, SUM, is_secret_known=True)
    probability_HA = action_probabilities(start, SUM, histories)
    calls_H6, answers_HA = probability_HA[:, :6], probability_HA[:, 6:]
    assert probability_HA.sum(1).min() > 0.99
    assert (calls_H6 / calls_H6.sum(1, keepdim=True)).sub(1 / 6).abs().max() < 0.05
    knows_H = torch.tensor([{"b", "e"} <= dict(state.known).keys() for state in histories.states])
    right_H = answers_HA[:, ANSWERS.index("!1")] / answers_HA.sum(1)
    first_H = torch.tensor([len(history) == 2 for history in histories.histories]) & knows_H
    assert right_H[first_H].min() > 0.6
    assert answers_HA.sum(1).sub(0.25).abs().max() < 0.1  # and not when to answer


def test_probabilities_are_those_of_the_whole_action(start):
    """Against a forward of the full text, row by row."""
    game = Mastermind(turns=2)
    prompt = game.prompt("abc")
    histories = tree(game, prompt)
    some = histories._replace(histories=histories.histories[:6])
    probability_HA = action_probabilities(start, prompt, some, temperature=0.7, max_rows=40)
    for history, row in zip(some.histories, probability_HA):
        for at in (0, 13, 26):
            text = transcript(prompt, history)
            whole = start.tokenizer(f"{text}{game.actions[at]};", return_tensors="pt").input_ids
            with torch.no_grad():
                logp_TV = (start.model(whole).logits[0] / 0.7).log_softmax(-1)
            logp = logp_TV[range(len(text) - 1, len(text) + 3), whole[0, len(text) :]].sum()
            assert row[at].item() == pytest.approx(logp.exp().item(), rel=1e-3)
