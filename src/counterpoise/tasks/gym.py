"""reasoning-gym datasets, with their own scorers."""

from __future__ import annotations

import hashlib
import importlib.util
import random
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import count
from typing import Any

from counterpoise.errors import check_number, check_text, check_whole, nearest
from counterpoise.types import Prompt

SPLITS = ("train", "test")
TEST_FRAC = 0.1
NUM_ITEMS = 20_000  # the most that every dataset takes: some build all their items at once
MAX_DRAWS = 2_000
INSTRUCTION = "{question}\nGive the final answer between <answer> and </answer>."

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Gym:
    """A reasoning-gym dataset by name.

    Args:
        name: e.g. ``basic_arithmetic``.
        threshold: scores of at least this much are reward 1.0 and all others 0.0, because some
            scorers give wrong text a few
            hundredths; None keeps the scores.
        instruction: what the model reads; ``{question}`` stands for the question.
        num_items: questions to draw from.
        params: parameters of the dataset itself, e.g. ``max_terms=3``.

    The scorer gets what stands in the last ``<answer>`` tag, or the whole text if there is none. A
    question belongs to ``test`` if a hash of its text says so (one in ten).

    >>> task = Gym("chain_sum")
    >>> prompt = next(task.prompts("train", seed=0))
    >>> (
    ...     task.reward(prompt, f"So it is <answer>{prompt.answer}</answer>"),
    ...     task.reward(prompt, "no idea"),
    ... )
    (1.0, 0.0)
    """

    def __init__(
        self,
        name: str,
        *,
        threshold: float | None = 0.99,
        instruction: str = INSTRUCTION,
        num_items: int = NUM_ITEMS,
        **params: Any,
    ) -> None:
        check_text("gym", name=name, instruction=instruction)
        check_number("gym", or_none=True, threshold=threshold)
        check_whole("gym", least=1, num_items=num_items)
        if "{question}" not in instruction:
            raise ValueError(f"gym: instruction must contain {{question}}, got {instruction!r}.")
        for reserved in ("seed", "size"):
            if reserved in params:
                raise ValueError(
                    f"gym:{name}: {reserved!r} is not yours to set: the run's seed chooses among"
                    " num_items questions."
                )
        self.name, self.threshold, self.instruction, self.num_items, self.params = (
            name,
            threshold,
            instruction,
            num_items,
            params,
        )
        self._check_scorer()

    def __getstate__(self) -> dict[str, Any]:
        # the dataset is made again where it is needed: not all of them can be pickled
        return {key: value for key, value in self.__dict__.items() if key != "_dataset"}

    @cached_property
    def _dataset(self) -> Any:
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ValueError(
                f"gym:{self.name} needs reasoning-gym: pip install 'counterpoise[gym]'."
            )
        from reasoning_gym.factory import DATASETS, create_dataset

        if self.name not in DATASETS:
            raise ValueError(
                f"unknown reasoning-gym dataset {self.name!r}. {nearest(self.name, DATASETS)}"
            )
        known = [
            key
            for key in DATASETS[self.name][1].__dataclass_fields__
            if key not in ("seed", "size")
        ]
        for key in self.params:
            if key not in known:
                raise ValueError(f"gym:{self.name} has no parameter {key!r}. {nearest(key, known)}")
        return create_dataset(self.name, seed=0, size=self.num_items, **self.params)

    def prompts(self, split: str, seed: int, start: int = 0) -> Iterator[Prompt]:
        """The endless stream of a split from position ``start``."""
        if split not in SPLITS:
            raise ValueError(f"gym: unknown split {split!r}. {nearest(split, SPLITS)}")
        return (self._prompt(split, seed, position) for position in count(start))

    def reward(self, prompt: Prompt, text: str) -> float:
        """The dataset's own score of the answer, cut at the threshold."""
        score = self._dataset.score_answer(final_answer(text), prompt.meta["entry"])
        return float(score) if self.threshold is None else float(score >= self.threshold)

    def answer_start(self, prompt: Prompt, text: str) -> int | None:
        """Where the text of the last ``<answer>`` tag begins; None without one."""
        tags = list(_ANSWER.finditer(text))
        return tags[-1].start(1) if tags else None

    def _prompt(self, split: str, seed: int, position: int) -> Prompt:
        rng = random.Random(f"gym/{self.name}/{split}/{seed}/{position}")
        for _ in range(MAX_DRAWS):
            index = rng.randrange(self.num_items)
            entry = self._dataset[index]
            if split_of(entry["question"]) == split:
                text = self.instruction.replace("{question}", entry["question"])
                answer = "" if entry["answer"] is None else str(entry["answer"])
                return Prompt(f"{self.name}/{index}", text, answer, {"entry": entry})
        raise ValueError(
            f"gym:{self.name}: no {split} question in {MAX_DRAWS} draws; the dataset has too few"
            " distinct questions."
        )

    def _check_scorer(self) -> None:
        """Some scorers give full marks to any text; a task like that teaches nothing."""
        entry = self._dataset[0]
        try:
            score = self._dataset.score_answer("no idea", entry)
        except Exception:
            return  # a scorer that raises on wrong text gives reward 0 in grade
        if score >= (1.0 if self.threshold is None else self.threshold):
            raise ValueError(
                f"gym:{self.name} scores the text 'no idea' with {score}: its rewards carry no"
                " signal."
            )


def final_answer(text: str) -> str:
    """What stands in the last ``<answer>`` tag, else the whole text, without spaces around it.

    >>> final_answer("3, no: <answer> 4 </answer>")
    '4'
    """
    answers = _ANSWER.findall(text)
    return (answers[-1] if answers else text).strip()


def split_of(question: str) -> str:
    """``train`` or ``test``, by a hash of the question."""
    digest = hashlib.sha256(question.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") < TEST_FRAC * 2**64 else "train"
