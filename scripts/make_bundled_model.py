"""Make the bundled model: a small Llama that half-knows the built-in task, and its tokenizer.

    python scripts/make_bundled_model.py --out src/counterpoise/policy/bundled

and the starts of other regimes from it (docs/results/regimes.md has every command):

    python scripts/make_bundled_model.py --init bundled --style fixed --lr 1e-3 --max-steps 60 \\
        --first-check 60 --check-every 60 --half --out src/counterpoise/policy/starts/fixed

Supervised training on worked answers to train-split problems, drawn fresh for every batch, until
the model solves the target share of fresh train-split problems when sampled at temperature 1. The
held-out (test) split is touched once, to print the final accuracy. Two CPU cores, float32, under 20
minutes."""

from __future__ import annotations

import argparse
import itertools
import random
import string
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from scipy.stats import binomtest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from counterpoise.policy import load_model
from counterpoise.sampling import sample
from counterpoise.tasks import arithmetic, phrases
from counterpoise.types import Prompt

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
# a word or sign with the space before it; every digit by itself, so that numbers have to be
# computed
PIECE = r" ?[A-Za-z]+| ?[0-9]| ?[^A-Za-z0-9\s]|\s"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the task as whole tokens; any other ASCII text falls back to characters, so that
    decoding is lossless.
    """
    vocabulary = {
        token: number
        for number, token in enumerate(itertools.chain(SPECIAL, string.printable, _words()))
    }
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token="<unk>", continuing_subword_prefix="")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _words() -> list[str]:
    said = (
        *phrases.OPENINGS,
        *phrases.STARTS,
        *phrases.CONNECTIVES,
        *phrases.PLUS,
        *phrases.MINUS,
        *phrases.RESULTS,
        phrases.CLOSING,
        "What is",
    )
    words = sorted({word.strip(".") for phrase in said for word in phrase.split()} - {"{}", ""})
    signs = [" " + sign for sign in "0123456789+-"]
    return [*(" " + word for word in words), *(word for word in words if len(word) > 1), *signs]


def make_model(
    tokenizer: PreTrainedTokenizerFast, hidden: int, layers: int, heads: int
) -> LlamaForCausalLM:
    """A Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def chat(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """The text the model reads before it answers."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return text


def demonstrations(style: str, difficulty: str, seed: int, start: int) -> Iterator[tuple[str, str]]:
    """(question, worked answer) of train-split problems, three of four of this difficulty."""
    names = ("easy", difficulty)
    tasks = {name: arithmetic.Arithmetic(name, style=style) for name in names}
    streams = {name: task.prompts("train", seed, start) for name, task in tasks.items()}
    for position in itertools.count(start):
        rng = random.Random(f"demonstration/{seed}/{position}")
        name = difficulty if rng.random() < 0.75 else "easy"
        prompt = next(streams[name])
        yield prompt.text, tasks[name].demonstration(prompt, rng)


def batches(
    pairs: Iterator[tuple[str, str]], size: int, num_sorted: int
) -> Iterator[list[tuple[str, str]]]:
    """Batches of the stream; with ``num_sorted`` above 1, so many at a time are sorted by length,
    so that little is padding.
    """
    for number in itertools.count():
        block = list(itertools.islice(pairs, num_sorted * size))
        if num_sorted > 1:
            block.sort(key=lambda pair: len(pair[1]))
        cuts = [block[at : at + size] for at in range(0, len(block), size)]
        yield from random.Random(number).sample(cuts, len(cuts))


def supervised_batch(
    tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> dict[str, Tensor]:
    """Right-padded ids and labels; the loss counts the answer's tokens alone."""
    questions = [tokenizer(chat(tokenizer, question)).input_ids for question, _ in pairs]
    answers = [[*tokenizer(answer).input_ids, tokenizer.eos_token_id] for _, answer in pairs]
    width = max(len(q) + len(a) for q, a in zip(questions, answers))
    ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), -100)
    for row, (question, answer) in enumerate(zip(questions, answers)):
        ids[row, : len(question) + len(answer)] = torch.tensor(question + answer)
        labels[row, len(question) : len(question) + len(answer)] = torch.tensor(answer)
    return {"input_ids": ids, "labels": labels}


def num_solved(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[Prompt],
    *,
    greedy: bool = False,
    sound: bool = False,
) -> int:
    """Sample one answer per prompt at temperature 1 (or greedily) and count the right ones, or
    those without a wrong step: a small model that cannot do a task is right by luck now and then.
    """
    prompt_ids = [tokenizer(chat(tokenizer, prompt.text)).input_ids for prompt in prompts]
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    rollouts = sample(
        model,
        prompt_ids,
        max_new_tokens=192,
        stop_ids=[stop],
        pad_id=pad,
        seed=0,
        temperature=0.0 if greedy else 1.0,
        max_rows=512,
    )
    kept = zip(rollouts.token_ids_NT.cpu(), rollouts.mask_NT.cpu())
    responses = [row[keep].tolist() for row, keep in kept]
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    task = arithmetic.Arithmetic()
    return sum(
        task.reward(prompt, text) == 1
        and not (sound and task.first_error(prompt, text) is not None)
        for prompt, text in zip(prompts, texts)
    )


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> None:
    """AdamW with warm-up until the model solves about the target share of fresh train-split
    problems at temperature 1.

    The weights are taken as they are, at a high learning rate that makes them jump by ten points
    from check to check. Their running mean is smoother, but RL then hardly moves it (LOG.md).
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    warmup = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda batch_number: (
            min(1.0, (batch_number + 1) / args.warmup)
            * (1 - batch_number / args.max_steps if args.decay else 1)
        ),
    )
    pairs = demonstrations(args.style, args.difficulty, args.seed, 0)
    # answers of the style free differ in length
    taken = batches(pairs, args.batch_size, 8 if args.style == "free" else 1)
    checks = list(
        itertools.islice(
            arithmetic.Arithmetic(args.difficulty).prompts("train", seed=args.seed + 1), 512
        )
    )
    began = time.time()
    for batch_number in range(1, args.max_steps + 1):
        columns = supervised_batch(tokenizer, next(taken))
        loss = model(**{name: column.to(args.device) for name, column in columns.items()}).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        warmup.step()
        if batch_number >= args.first_check and batch_number % args.check_every == 0:
            solved = num_solved(model, tokenizer, checks, sound=args.sound)
            solved_frac = solved / len(checks)
            print(
                f"batch {batch_number}  loss {loss.item():.4f}  solved {solved_frac:.3f}"
                f"  {time.time() - began:.0f} s",
                flush=True,
            )
            if args.target <= solved_frac <= args.target + args.margin:
                return


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the model and tokenizer files"
    )
    parser.add_argument("--style", choices=arithmetic.STYLES, default="ordered")
    parser.add_argument("--difficulty", choices=arithmetic.DIFFICULTIES, default="medium")
    parser.add_argument(
        "--init", help="train on from this model instead of random weights, for example bundled"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--half", action="store_true", help="store the weights as float16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--decay", action="store_true", help="the rate falls to 0 over max-steps")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument(
        "--target",
        type=float,
        default=0.33,
        help="stop when this share of fresh train-split problems is solved",
    )

    parser.add_argument("--margin", type=float, default=0.06, help="and at most this much more")
    parser.add_argument(
        "--sound", action="store_true", help="count only answers without a wrong step"
    )
    parser.add_argument("--check-every", type=int, default=10)
    parser.add_argument("--first-check", type=int, default=450)
    parser.add_argument("--max-steps", type=int, default=2000)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = (
        load_model(args.init).model
        if args.init
        else make_model(tokenizer, args.hidden, args.layers, args.heads)
    )
    model.to(args.device)
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens",
        flush=True,
    )
    train(model, tokenizer, args)
    (model.half() if args.half else model).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    model.float()  # with --half, the weights as they are stored
    held_out = list(
        itertools.islice(arithmetic.Arithmetic(args.difficulty).prompts("test", seed=0), 2048)
    )
    for name, greedy in (("temperature 1", False), ("greedy", True)):
        solved = num_solved(model, tokenizer, held_out, greedy=greedy)
        low, high = binomtest(solved, len(held_out)).proportion_ci(method="wilson")
        print(
            f"held-out, {name}: {solved / len(held_out):.3f} [{low:.3f}, {high:.3f}]"
            f" of {len(held_out)} problems",
            flush=True,
        )


if __name__ == "__main__":
    main()
