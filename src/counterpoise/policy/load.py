"""Policies: a causal LM with its tokenizer and stop tokens, from the package, a folder, the hub or
a GGUF file.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as hf_logging

from counterpoise.models import find_model
from counterpoise.run.environment import cache_folder
from counterpoise.run.files import write_folder

TURN_END = "<|im_end|>"
# left unset, Transformers asks on stdin whether the folder's Python may run
NO_CODE: dict[str, Any] = {"trust_remote_code": False}


class Policy(NamedTuple):
    """A model that can be sampled and trained.

    Args:
        model: a Hugging Face causal LM.
        tokenizer: its tokenizer; it always has a pad token.
        stop_ids: tokens that end a response.
        name: what the recipe called it.
    """

    model: PreTrainedModel
    tokenizer: Any
    stop_ids: tuple[int, ...]
    name: str


def load_model(
    spec: str, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Policy:
    """Load a model and its tokenizer, ready to sample and to train.

    A missing pad token becomes the end-of-sequence token (nothing is resized). A GGUF file is
    de-quantised once into a plain Hugging Face folder, which later calls load in seconds: in
    ``COUNTERPOISE_CACHE``, by default ``~/.cache/counterpoise``.

    Args:
        spec: what ``find_model`` knows.
        dtype: of the weights.
    """
    with _loading(spec) as place:
        tokenizer = AutoTokenizer.from_pretrained(place, **NO_CODE)
        model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **NO_CODE)
    stop_ids = stop_tokens(getattr(model, "generation_config", None), tokenizer, spec)
    _set_pad(model, tokenizer)
    return Policy(model.to(device), tokenizer, stop_ids, spec)


def load_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model without its weights."""
    with _loading(spec) as place:
        return AutoTokenizer.from_pretrained(place, **NO_CODE)


@contextmanager
def _loading(spec: str) -> Iterator[str]:
    """Where a model can be loaded from; what goes wrong there is one line that names it."""
    source = find_model(spec)
    with quiet():
        try:
            file = source.gguf_file
            yield source.place if file is None else convert_gguf(source.place, file)
        except (OSError, ValueError, ImportError, SafetensorError) as error:
            hub = "" if Path(source.place).is_dir() else " of the hub"
            raise ValueError(
                f"model {spec!r}{hub} could not be loaded: {_reason(error)}"
            ) from error


def convert_gguf(place: str, gguf_file: str) -> str:
    """The cache folder with the weights of a GGUF file in float32; made if missing."""
    folder = gguf_folder(Path(place, gguf_file))
    if not (folder / "config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=gguf_file, **NO_CODE)
        model = plain(
            AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, gguf_file=gguf_file, **NO_CODE
            )
        )

        def fill(folder: Path) -> None:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        write_folder(folder, fill)
    return str(folder)


def gguf_folder(file: Path) -> Path:
    """Where the converted weights of a GGUF file lie: by its content, so that another file of the
    same name, size and time is another model.
    """
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while chunk := content.read(1 << 24):
            digest.update(chunk)
    return cache_folder("models") / f"{file.stem}-{digest.hexdigest()[:16]}"


def plain(model: PreTrainedModel) -> Any:
    """The same weights in a model without a quantisation config, which refuses to be saved."""
    settings = model.config.to_dict()
    settings.pop("quantization_config", None)
    rebuilt = AutoModelForCausalLM.from_config(
        type(model.config).from_dict(settings), dtype=model.dtype, **NO_CODE
    )
    rebuilt.load_state_dict(model.state_dict())
    return rebuilt.eval()


def stop_tokens(
    generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, spec: str
) -> tuple[int, ...]:
    """The tokens that end a turn of a model; ``spec`` names it in the error."""
    tokens = [
        tokenizer.eos_token_id,
        tokenizer.get_vocab().get(TURN_END),
        *_list(getattr(generation, "eos_token_id", None)),
    ]
    stop_ids = tuple(sorted({token for token in tokens if token is not None}))
    if not stop_ids:
        raise ValueError(
            f"model {spec!r}: the tokenizer has no end-of-sequence token, so no answer could end."
            " Set eos_token in its config."
        )
    return stop_ids


def _list(value: int | Sequence[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _set_pad(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or TURN_END
    model.config.pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    # padding never reaches the loss; an embedding that drops the pad row's gradient would drop that
    # of a real token when pad is eos
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = None


def encode_prompts(
    policy: Policy,
    texts: Sequence[str],
    *,
    chat: bool | None = None,
    max_prompt_tokens: int | None = None,
) -> list[list[int]]:
    """Token ids of each prompt, as one user turn of the model's chat template, or as plain text
    with ``chat=False``.

    Args:
        texts: the prompts.
        chat: None and True use the chat template (an error when there is none); False takes the
            text as it is.
        max_prompt_tokens: the first prompt that is longer is an error.
    """
    is_chat = chat is None or chat
    texts = [_turn(policy, text) for text in texts] if is_chat else list(texts)
    ids = policy.tokenizer(texts, add_special_tokens=not is_chat)["input_ids"] if texts else []
    for i, prompt in enumerate(ids):
        if max_prompt_tokens is not None and len(prompt) > max_prompt_tokens:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens, more than"
                f" max_prompt_tokens={max_prompt_tokens}: {texts[i][:60]!r}. Raise the limit or"
                " filter the task."
            )
    return ids


def decode_texts(tokenizer: PreTrainedTokenizerBase, rows: Sequence[list[int]]) -> list[str]:
    """The text of each row of token ids, special tokens left out; as ``batch_decode``, which looks
    at the type of every single id.
    """
    is_fast = isinstance(tokenizer, PreTrainedTokenizerFast)
    is_plain = is_fast and type(tokenizer)._decode is PreTrainedTokenizerFast._decode
    if is_plain and not tokenizer.clean_up_tokenization_spaces:
        backend: Any = tokenizer.backend_tokenizer
        return backend.decode_batch(list(rows), skip_special_tokens=True)
    return tokenizer.batch_decode(list(rows), skip_special_tokens=True)


def _turn(policy: Policy, text: str) -> str:
    if policy.tokenizer.chat_template is None:
        raise ValueError(
            f"model {policy.name!r} has no chat template. Set chat: false to give it prompts as"
            " plain text."
        )
    return policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )


def add_lora(
    model: PreTrainedModel,
    *,
    r: int = 16,
    alpha: float = 32,
    target_modules: str | Sequence[str] = "all-linear",
) -> Any:
    """The model with trainable low-rank adapters (peft), its own weights frozen: ``W x + (alpha /
    r) B A x``.

    Args:
        r: rank.
        target_modules: names of linear layers; ``all-linear`` is all but the head.

    Reference: Hu et al. 2021, arXiv 2106.09685.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError("lora: peft is not installed. Run: pip install peft")
    from peft import LoraConfig, get_peft_model

    modules = target_modules if isinstance(target_modules, str) else list(target_modules)
    rank: Any = {"r": r, "lora_alpha": alpha}  # peft's annotation says int, its code takes floats
    return get_peft_model(model, LoraConfig(**rank, target_modules=modules, task_type="CAUSAL_LM"))


def _reason(error: Exception) -> str:
    """One line; a folder that wants its own Python to run is told that it does not."""
    text = str(error).strip() or type(error).__name__
    if "trust_remote_code" in text:
        return "it needs code of its own (auto_map in config.json), and counterpoise runs no code"
    return text.splitlines()[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Loading and saving bars off for the block: a run has one progress bar, its own."""
    was_on = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            hf_logging.enable_progress_bar()
