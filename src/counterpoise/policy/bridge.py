"""What stands between two turns of the model, as tokens: the end of its turn, what was said to it,
the beginning of its next turn.

What the model drew is never tokenised again. With a chat template the bridge is what the template
puts after an assistant's turn; that is checked once, on conversations made up for it. Without one
(plain text) it is the text that was said.
"""

from __future__ import annotations

from typing import Any

from counterpoise.errors import ConfigError
from counterpoise.policy.load import Policy

ASKED, SAID = "A question.", "Some words."
KNOWN = 10_000  # replies whose tokens are remembered
PROBES = ("Yes.", "12 7", "Two\nlines", "  room  ", "{'a': [1]}")


class Bridge:
    """Tokens from the end of one turn to the beginning of the next.

    Args:
        policy: its tokenizer, template and stop tokens.
        chat: as in ``encode_prompts``: False is plain text.
        settings: what else the template is given (``enable_thinking``).
    """

    def __init__(self, policy: Policy, chat: bool | None, **settings: object) -> None:
        self.policy, self.tokenizer, self.settings = policy, policy.tokenizer, settings
        self.is_chat = chat is None or chat
        self.stop, self.head, self.tail, self.trims = policy.stop_ids[0], "", "", False
        self.known: dict[str, list[int]] = {}  # replies come again and again
        self.specials = [token for token in self.tokenizer.all_special_tokens if token]
        if self.is_chat:
            self._read_template()
            for said in PROBES:
                self._check(said)

    def __call__(self, said: str, *, is_stopped: bool) -> list[int]:
        """Tokens after a turn; a turn that was cut (not ``is_stopped``) gets its stop token too.

        Special tokens that somebody writes into ``said`` stay text.
        """
        if said not in self.known:
            if len(self.known) >= KNOWN:
                self.known.clear()
            self.known[said] = self._encode(said)
        return ([] if is_stopped else [self.stop]) + self.known[said]

    def _encode(self, said: str) -> list[int]:
        said = said.strip() if self.trims else said
        if not any(special in said for special in self.specials):
            return self._ids(self.head + said + self.tail)
        return self._ids(self.head) + self._plain(said) + self._ids(self.tail)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def _plain(self, text: str) -> list[int]:
        """The text without a special token in it, whatever it says."""
        backend: Any = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            for special in self.specials:
                text = text.replace(special, special[:1] + " " + special[1:])
            return self._ids(text)
        was = backend.encode_special_tokens
        backend.encode_special_tokens = True
        try:
            return list(backend.encode(text, add_special_tokens=False).ids)
        finally:
            backend.encode_special_tokens = was

    def _render(self, *turns: str, is_asked: bool) -> str:
        """The template's text of turns of user and assistant, the user first."""
        roles = ("user", "assistant")
        messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(turns)]
        text: Any = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=is_asked, **self.settings
        )
        return text

    def _read_template(self) -> None:
        """Find the text around what is said: after the assistant's stop token."""
        mark = "\u2301mark\u2301"
        whole = self._render(ASKED, SAID, mark, is_asked=True)
        said_at = whole.find(SAID)
        stops = [self.tokenizer.decode([token]) for token in self.policy.stop_ids]
        after = whole[said_at + len(SAID) :] if said_at >= 0 else ""
        at = {stop: after.find(stop) for stop in stops}
        here = {stop: place for stop, place in at.items() if 0 <= place < after.find(mark)}
        if not here or mark not in after:
            raise self._error(f"after an assistant's turn it has none of the stop tokens {stops}")
        stop = min(here, key=lambda one: here[one])
        if here[stop]:
            raise self._error(f"it puts {after[: here[stop]]!r} before the stop token {stop!r}")
        self.stop = self.policy.stop_ids[stops.index(stop)]
        self.head, _, self.tail = after[len(stop) :].partition(mark)
        self.trims = f" {mark} " not in self._render(ASKED, SAID, f" {mark} ", is_asked=True)

    def _check(self, said: str) -> None:
        """Prompt, turn and bridge, token by token, are the whole conversation as the template has
        it.
        """
        start = self._ids(self._render(ASKED, is_asked=True))
        parts = start + self._ids(SAID) + [self.stop] + self(said, is_stopped=True)
        whole = self._ids(self._render(ASKED, SAID, said, is_asked=True))
        if parts != whole:
            raise self._error(
                f"prompt, answer and reply {said!r} one after the other are"
                f" {self.tokenizer.decode(parts)!r}, and the template makes"
                f" {self.tokenizer.decode(whole)!r} of them"
            )

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(
            f"model {self.policy.name!r}: its chat template cannot be used for turns: {problem}."
            " Set chat: false, or give the model a template that leaves earlier turns as they are."
        )
