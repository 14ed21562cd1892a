"""Rollouts with a tool and with an environment, by TRL's own loop: a completion that names the word
w3 calls, the answer comes back as tokens that are not the model's.
"""

from __future__ import annotations

from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from helpers import trl_tiny

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }} "
    "{% for call in message['tool_calls'] or [] %}"
    "{{ call['function']['name'] }} {{ call['function']['arguments'] | tojson }} {% endfor %}"
    "{% if message['role'] == 'assistant' %}<eos> {% endif %}{% endfor %}"
)
TOOLS = {"max_completion_length": 18, "max_tool_calling_iterations": 2, "learning_rate": 5e-3}


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: what to look up.

    Returns:
        str: two other words.
    """
    return {"w3": "w1 w2", "w5": "w4 w6"}.get(word, "w0 w8")


class Library:
    """The same as an environment, which keeps count."""

    def reset(self, **columns) -> str | None:
        self.num_calls = 0

    def look_up(self, word: str) -> str:
        """Look a word up.

        Args:
            word: what to look up.

        Returns:
            str: two other words.
        """
        self.num_calls += 1
        return look_up(word) if self.num_calls < 2 else "w11"


class Caller(PreTrainedTokenizerFast):
    """The tokenizer of words; w3, w5 and w9 in a response are calls of the tool."""

    response_schema = {"type": "object"}  # TRL looks whether there is one

    def parse_response(self, ids, **kwargs):
        text = self.decode(ids, skip_special_tokens=True)
        calls = [
            {"type": "function", "function": {"name": "look_up", "arguments": {"word": word}}}
            for word in text.split()
            if word in ("w3", "w5", "w9")
        ]
        return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def tokenizer():
    words = trl_tiny.tiny_tokenizer()
    words.__class__, words.chat_template = Caller, TEMPLATE
    return words


def prompts():
    texts = trl_tiny.prompts()["prompt"]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in texts]})


def graded(completions, **columns):
    """As ``trl_tiny.graded``, on what the model said last."""
    return trl_tiny.graded([messages[-1].get("content") or "" for messages in completions])
