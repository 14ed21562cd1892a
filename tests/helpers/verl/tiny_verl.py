"""A tiny model with a tokenizer, and a data set, as verl reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

WORDS = ["<pad>", "<s>", "</s>", *[f"w{k}" for k in range(29)]]


def make_model_and_data(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from helpers.tiny_models import tiny

    tiny(
        vocab_size=len(WORDS), max_position_embeddings=256, tie_word_embeddings=False
    ).save_pretrained(folder / "model")
    words = Tokenizer(
        models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<pad>")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"w{k} w1 w2"}],
            "data_source": "none",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": k},
        }
        for k in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "data.parquet")


def model_with(folder: Path) -> Any:
    """The model before training."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder / "model", attn_implementation="eager"
    ).eval()
