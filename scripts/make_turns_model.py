"""Make the start of the built-in games: a small Llama that plays any legal action.

    python scripts/make_turns_model.py --out src/counterpoise/policy/starts/turns

Supervised training on whole conversations of a player that draws every action evenly among the
legal ones, in all three games: the model then knows how an action is written and what is answered,
and nothing about which action is good. It also learns to add two digits that were looked up, from
lessons in which the look-ups are given: asking for them is left to RL. Characters are tokens, ``;``
ends a turn. Two CPU cores, float32, some minutes. Prints the exact value of the start in each game.
"""

from __future__ import annotations

import argparse
import itertools
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from make_bundled_model import make_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from counterpoise.environments.guess import Guess
from counterpoise.environments.lookup import ANSWERS, Lookup
from counterpoise.environments.mastermind import Mastermind
from counterpoise.environments.values import STOP, tree, values
from counterpoise.policy import load_model
from counterpoise.policy.actions import action_probabilities

CHARACTERS = string.digits + string.ascii_lowercase + "<>=?!+-:"
# the games and how often each is played; longer than they are, so that no turn is the last one
GAMES = (
    (Guess(n=16, turns=5), 0.3),
    (Guess(n=8, turns=4), 0.1),
    (Mastermind(turns=4), 0.2),
    (Mastermind(letters=2, turns=4), 0.1),
    (Lookup(turns=8), 0.3),
)
LESSONS = 0.3  # of the rows after the sums are learned
ANSWER_FRAC = 0.25  # of a lookup player's turns


class Row(NamedTuple):
    """A transcript, and the place of the first character that the loss counts."""

    text: str
    first: int


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per character."""
    vocabulary = {token: at for at, token in enumerate(["<pad>", "<unk>", STOP, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token=STOP,
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def action_of(game: Guess | Mastermind | Lookup, notes: str, rng: random.Random) -> str:
    """A legal action; of a sum whose digits are known, the right answer."""
    if not isinstance(game, Lookup):
        return rng.choice(game.actions)
    if rng.random() > ANSWER_FRAC:
        return rng.choice(game.actions[: game.letters])
    return f"!{notes}" if notes else rng.choice(ANSWERS)


def episode(game: Guess | Mastermind | Lookup, rng: random.Random) -> Row:
    """One game of the player."""
    prompt = next(game.prompts("train", 0, start=rng.randrange(10**9)))
    text, play, reply = prompt.text, game.start(prompt, 0), None
    while reply is None or not reply.is_done:
        notes = prompt.answer if reply is not None and reply.score == 1 else ""
        action = action_of(game, notes, rng)
        reply = play.step(action)
        text += action + STOP + ("" if reply.is_done else reply.text)
    return Row(text, len(prompt.text))


def lesson(game: Lookup, rng: random.Random) -> Row:
    """Both look-ups and a right answer; only its digit is taught, not when to ask or answer."""
    prompt = next(game.prompts("train", 1, start=rng.randrange(10**9)))
    play, text = game.start(prompt, 0), prompt.text
    for letter in rng.sample(prompt.text[0] + prompt.text[2], 2):
        text += letter + STOP + play.step(letter).text
    text += f"!{prompt.answer}"
    return Row(text, len(text) - 1)


def lessons(seed: int) -> Iterator[Row]:
    rng = random.Random(seed)
    while True:
        yield lesson(Lookup(), rng)


def episodes(seed: int) -> Iterator[Row]:
    """Games of the player, and some lessons, lest the sums be forgotten."""
    rng = random.Random(seed)
    games, shares = zip(*GAMES)
    while True:
        is_lesson = rng.random() < LESSONS
        game = rng.choices(games, shares)[0]
        yield lesson(Lookup(), rng) if is_lesson else episode(game, rng)


def supervised_batch(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> dict[str, Tensor]:
    """Right-padded ids and labels."""
    width = max(len(row.text) for row in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    for at, row in enumerate(rows):
        row_ids = torch.tensor(tokenizer(row.text).input_ids)
        ids[at, : len(row_ids)] = row_ids
        labels[at, row.first : len(row_ids)] = row_ids[row.first :]
    return {"input_ids": ids, "labels": labels}


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: Iterator[Row],
    args: argparse.Namespace,
    *,
    steps: int,
    until: float = 0.0,
) -> None:
    """AdamW with warm-up; the rate falls to 0, so that even chances become even. ``until`` ends it
    as soon as the loss is there.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 50) * (1 if until else 1 - step / steps)
    )
    for step in range(1, steps + 1):
        rows = list(itertools.islice(stream, args.batch_size))
        batch = supervised_batch(tokenizer, rows)
        loss = model(**{name: value.to(args.device) for name, value in batch.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            print(f"update {step}  loss {loss.item():.4f}", flush=True)
        if loss.item() < until:
            return


def report(folder: Path) -> None:
    """The exact value of the stored start in each game."""
    policy = load_model(str(folder))
    lookup = Lookup()
    cases = {
        "guess": (Guess(), Guess().prompt(1), False),
        "guess, n 8, 3 turns": (Guess(8, 3), Guess(8, 3).prompt(1), False),
        "mastermind": (Mastermind(), Mastermind().prompt("aaa"), False),
        "lookup of one table": (lookup, lookup.prompt("be", "040070"), True),
    }
    for name, (game, prompt, is_secret_known) in cases.items():
        histories = tree(game, prompt, is_secret_known=is_secret_known)
        probability_HA = action_probabilities(policy, prompt, histories)
        value = values(histories, probability_HA).value_H[0].item()
        legal = probability_HA.sum(1).min().item()
        print(f"{name}: exact value {value:.4f}, legal after any history >= {legal:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for model and tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--sum-steps", type=int, default=3000, help="at most, of the sums alone")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, args.hidden, args.layers, args.heads).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")
    train(model, tokenizer, lessons(args.seed), args, steps=args.sum_steps, until=0.02)
    train(model, tokenizer, episodes(args.seed), args, steps=args.steps)
    model.cpu().half().save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    report(args.out)


if __name__ == "__main__":
    main()
