"""A character's token: several characters per token, bytes of one character, special tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from counterpoise.policy import load_model
from counterpoise.policy.offsets import positions_at, token_at, written
from counterpoise.tasks.arithmetic import Arithmetic, demonstration

BUNDLED = load_model("bundled")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, two joined pairs of letters, and a special token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: k for k, letter in enumerate([*letters, "ab", "cd", "<end>"])}
    core = Tokenizer(models.BPE(vocab, [("a", "b"), ("c", "d")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>")


def test_every_character_of_a_demonstration_lies_in_its_token():
    prompt = next(Arithmetic().prompts("train", 0))
    text = demonstration(prompt, random.Random(0))
    ids = BUNDLED.tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [BUNDLED.tokenizer.decode([one]) for one in ids]
    expected = [k for k, piece in enumerate(pieces) for _ in piece]
    assert "".join(pieces) == text
    assert [token_at(BUNDLED.tokenizer, ids, at) for at in range(len(text))] == expected


@pytest.mark.parametrize("special", [0, 1])
def test_behind_the_text_is_the_stop_token_or_nothing(special: int):
    ids = BUNDLED.tokenizer("Start with 7.", add_special_tokens=False)["input_ids"]
    row = [*ids, *[BUNDLED.stop_ids[0]] * special]
    assert token_at(BUNDLED.tokenizer, row, len("Start with 7.")) == (len(ids) if special else None)


@given(st.text(alphabet="abcdé漢🙂 ", min_size=1, max_size=12), st.integers(0, 12))
def test_bytes_of_a_character_belong_to_it(text: str, place: int):
    """The token that completes a character: the last of its bytes, whatever stands around it."""
    tokenizer = byte_tokenizer()
    ids = tokenizer(text)["input_ids"]
    ends = []  # by hand: bytes written after each token
    total = 0
    for one in tokenizer.convert_ids_to_tokens(ids):
        total += len(one)
        ends.append(total)
    row = [*ids[:place], tokenizer.eos_token_id, *ids[place:]]
    for at in range(len(text)):
        num_bytes = len(text[: at + 1].encode())
        plain = next(k for k, end in enumerate(ends) if end >= num_bytes)
        assert token_at(tokenizer, ids, at) == plain
        assert token_at(tokenizer, row, at) == plain + (plain >= min(place, len(ids)))


@given(
    st.lists(st.text(alphabet="abcdé🙂 ", min_size=1, max_size=9), min_size=1, max_size=4),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_positions_of_many_rows_are_those_of_single_ones(texts, place: int, offset: int):
    """Holes, padding, special tokens; rows whose tokens add up to the text and rows whose do not;
    one without an offset.
    """
    tokenizer = byte_tokenizer()
    rows = [tokenizer(text)["input_ids"] for text in texts]
    rows = [[*ids[:place], tokenizer.eos_token_id, *ids[place:], 7] for ids in rows]  # 7: a hole
    width = max(map(len, rows))
    ids_NT = torch.tensor([ids + [0] * (width - len(ids)) for ids in [*rows, rows[0]]])
    mask_NT = torch.tensor([[t < len(ids) - 1 for t in range(width)] for ids in [*rows, rows[0]]])
    offsets = [min(offset, len(text)) for text in texts]
    expected = [token_at(tokenizer, ids[:-1], at) for ids, at in zip(rows, offsets)]
    own = written(tokenizer, ids_NT, mask_NT)
    expected = [-1 if at is None else at for at in [*expected, None]]
    assert positions_at(tokenizer, own, [*offsets, None]) == expected
