"""DelTA inside TRL on a CPU: the bundled model learns arithmetic, nothing is downloaded.

About four minutes on two cores.

python examples/trl_delta.py
python examples/trl_delta.py --method dfpo_min --max_steps 8       any setting of GRPOConfig and CreditGRPOConfig
python examples/trl_delta.py --config mine.yaml                    the same as a file
counterpoise view runs/trl_delta/counterpoise                      what each update did to each token
"""

from __future__ import annotations

from itertools import islice

from datasets import Dataset
from trl import TrlParser

from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer
from counterpoise.policy.load import locate
from counterpoise.tasks.arithmetic import Arithmetic
from counterpoise.types import Prompt

TASK = Arithmetic()
SETTINGS = {
    "output_dir": "runs/trl_delta",
    "method": "delta",
    "plan": "query_preserved",  # all rollouts of a prompt meet in one update
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
    texts = [completion[0]["content"] for completion in completions]
    return [
        TASK.reward(Prompt("", question[0]["content"], right), text)
        for question, text, right in zip(prompts, texts, answer)
    ]


if __name__ == "__main__":
    parser = TrlParser(CreditGRPOConfig)
    parser.set_defaults(**SETTINGS)
    (args,) = parser.parse_args_and_config()
    asked = list(islice(TASK.prompts("train", seed=args.seed), 32 * 32))
    rows = [
        {"prompt": [{"role": "user", "content": prompt.text}], "answer": prompt.answer}
        for prompt in asked
    ]
    model = locate("bundled").place
    CreditGRPOTrainer(
        model=model, reward_funcs=is_correct, args=args, train_dataset=Dataset.from_list(rows)
    ).train()
