"""DelTA inside TRL on a CPU: the bundled model learns arithmetic, nothing is downloaded.

About four minutes on two cores.

    python examples/trl_delta.py
    python examples/trl_delta.py --method dfpo_min --max_steps 8  # any setting of both configs
    python examples/trl_delta.py --config mine.yaml               # the same as a file
    counterpoise view runs/trl_delta/counterpoise                 # what each update did
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
    "output_dir": "runs/trl_delta",
    "method": "delta",
    "plan": "query_preserved",  # the rollouts of a prompt share an update
    "ledger_every": 10,
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "steps_per_generation": 4,  # 32 prompts x 8 rollouts, four updates
    "max_steps": 48,
    "max_completion_length": 96,
    "learning_rate": 3e-4,
    "warmup_steps": 8,
    "lr_scheduler_type": "linear",
    "logging_steps": 4,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}


def is_correct(prompts, completions, answer, **columns):
    """The reward: 1 if the closing sentence names the right number."""
    rows = zip(prompts, completions, answer)
    return [TASK.reward(Prompt("", p[0]["content"], a), c[0]["content"]) for p, c, a in rows]


if __name__ == "__main__":
    parser = TrlParser(CreditGRPOConfig)
    parser.set_defaults(**SETTINGS)
    (args,) = parser.parse_args_and_config()
    asked = islice(TASK.prompts("train", seed=args.seed), 32 * 32)
    rows = [{"prompt": [{"role": "user", "content": p.text}], "answer": p.answer} for p in asked]
    model, data = locate("bundled").place, Dataset.from_list(rows)
    CreditGRPOTrainer(model, is_correct, args=args, train_dataset=data).train()
