"""A teacher inside TRL on a CPU: a model that adds better scores every token that the policy drew.

    python examples/trl_teacher.py

The teacher is a bundled model with the same tokenizer and reads the prompt alone, so no reward is
needed: the one here only shows the progress. OPSD's own teacher is the first policy after it has
read the solution (a column of the dataset); it needs a model that reads:

    method="opsd", solution_column="answer"
"""

from itertools import islice

from datasets import Dataset
from trl import TrlParser

from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer
from counterpoise.policy import locate
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.types import Prompt

TASK = Arithmetic()
SETTINGS = {
    "output_dir": "runs/trl_teacher",
    "method": "opsd",
    "method_axes": '{"credit": {"source": "prompt", "model": "bundled_varied"}}',
    "num_generations": 2,
    "per_device_train_batch_size": 128,
    "max_steps": 20,
    "max_completion_length": 96,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "logging_steps": 2,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def is_correct(prompts, completions, answer, **columns):
    """1 if the closing sentence names the right number."""
    rows = zip(prompts, completions, answer)
    return [TASK.reward(Prompt("", p[0]["content"], a), c[0]["content"]) for p, c, a in rows]


if __name__ == "__main__":
    parser = TrlParser(CreditGRPOConfig)
    parser.set_defaults(**SETTINGS)
    (args,) = parser.parse_args_and_config()
    asked = islice(TASK.prompts("train", seed=args.seed), 64 * 32)
    rows = [{"prompt": [{"role": "user", "content": p.text}], "answer": p.answer} for p in asked]
    model, data = locate("bundled").place, Dataset.from_list(rows)
    CreditGRPOTrainer(model, is_correct, args=args, train_dataset=data).train()
