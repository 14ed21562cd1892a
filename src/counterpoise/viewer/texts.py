"""The texts of token ids, from what a run folder has: its tokenizer, or another batch's table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from counterpoise.run.read import RunFolder, is_inside


def token_texts(run: RunFolder, ids: Sequence[int]) -> list[str]:
    """The text of each id; ``⟨id⟩`` where the run does not tell."""
    known: dict[int, str] = {}
    tokenizer = tokenizer_file(run)
    if tokenizer is not None:
        known = _decode(run, tokenizer, ids)
    if not known:
        for batch in run.batches("tokens")[-1:]:
            table = run.table("tokens", batch, ("token_id", "text"))
            if table is not None and {"token_id", "text"} <= set(table.column_names):
                pairs = table.group_by(["token_id", "text"]).aggregate([]).to_pydict()
                known = dict(zip(pairs["token_id"], map(str, pairs["text"])))
    return [known.get(i, f"⟨{i}⟩") for i in ids]


def _decode(run: RunFolder, file: Path, ids: Sequence[int]) -> dict[int, str]:
    try:
        return decode_ids(file, ids)
    except Exception as error:  # what tokenizers raises for a broken file has no narrower type
        run.note(f"{file.name} cannot be read ({error}); token texts come from elsewhere.")
        return {}


def tokenizer_file(run: RunFolder) -> Path | None:
    """A tokenizer.json of the run: beside its manifest or in its last checkpoint."""
    files = [
        run.path / "tokenizer.json",
        *sorted(run.path.glob("checkpoints/*/tokenizer.json"), reverse=True),
    ]
    return next((file for file in files if file.is_file() and is_inside(run.path, file)), None)


def decode_ids(file: Path, ids: Sequence[int]) -> dict[int, str]:
    """Texts of ids under a tokenizer file; empty without the tokenizers package.

    An id alone may be part of a character.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return {}
    tokenizer = Tokenizer.from_file(str(file))
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    return {
        i: tokenizer.decode([i], skip_special_tokens=False) or tokenizer.id_to_token(i) or ""
        for i in ids
        if 0 <= i < size
    }
