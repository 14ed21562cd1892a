"""``counterpoise init``"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from counterpoise.cli.show import Json, command_line, print_json, say

RECIPE = """\
# A recipe for counterpoise. Every key is explained in docs/reference/recipe.md; --set a.b=c
# overrides one for one run. Unknown keys are errors.
seed: 0
run_dir: runs/mine              # everything that happens is written here
model: bundled                  # or a Hugging Face folder, a hub id, a .gguf file
task: {name: "my_task:Sums"}    # your class, in my_task.py; or arithmetic, jsonl, gym:<name>
method: {name: grpo}            # `counterpoise methods` lists them; any axis can be changed:
                                # {name: dapo, plan: query_preserved, credit: ["my_rules:rule"]}
num_batches: 20                 # rounds of sampling
rollouts:
  prompts: 16                   # prompts per batch
  group_size: 8                 # rollouts per prompt
  max_new_tokens: 96            # longest answer
  temperature: 1.0
optimizer:
  lr: 3.0e-4                    # for the bundled model; 1e-6 to 1e-5 for larger ones
  updates_per_batch: 4          # a batch is cut into so many updates
  clip_norm: 1.0
eval: {every: 10, prompts: 100} # held-out prompts, every so many batches
ledger: {every: 5}              # record what updates did to every token, every so many batches
checkpoint_every: 10            # for --resume
keep_every: 10                  # checkpoints that stay, for replay and probe
"""

TASK = '''\
"""A task: prompts, and a reward for each answer. Change both."""

import random
import re
from itertools import count

from counterpoise import Prompt


class Sums:
    """Sums of four small numbers.

    Parameters come from the recipe: ``task: {name: "my_task:Sums", largest: 20}``.
    """

    def __init__(self, largest: int = 9) -> None:
        self.largest = largest

    def prompts(self, split, seed, start=0):
        """Prompt k depends on split, seed and k alone, so that a resumed run sees the same ones."""
        for k in count(start):
            draw = random.Random(f"{split}/{seed}/{k}")
            numbers = [draw.randint(1, self.largest) for _ in range(4)]
            question = " + ".join(map(str, numbers))
            yield Prompt(id=f"{split}-{k}", text=f"What is {question}?", answer=str(sum(numbers)))

    def reward(self, prompt, text):
        """1.0 if the last number of the answer is right."""
        numbers = re.findall(r"-?\\d+", text)
        return float(numbers[-1:] == [prompt.answer])
'''
FILES = {"recipe.yaml": RECIPE, "my_task.py": TASK}


def init(
    folder: Annotated[Path, typer.Argument(help="Where to write them.")] = Path("."),
    json_: Json = False,
) -> None:
    """Write a commented recipe and a task to change: recipe.yaml and my_task.py.

    Example: `counterpoise init mine`
    """
    for name in FILES:
        if (folder / name).exists():
            raise ValueError(f"init: {folder / name} exists. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    if json_:
        print_json({"files": [str(folder / name) for name in FILES]})
        return
    say(f"wrote {' and '.join(str(folder / name) for name in FILES)}")
    say(f"next: {command_line('train', folder / 'recipe.yaml')}")
