"""Turns inside TRL: a small model guesses a number and is told "smaller" or "larger" each time.

    python examples/trl_guess.py --max_steps 40

The bundled model knows digits and nothing of the game; the mean reward rises within a minute on a
CPU. Any field of CreditGRPOConfig can follow on the command line.
"""

from trl import TrlParser

from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer, as_rollout_func
from counterpoise.policy import load_model

DEFAULTS = {
    "output_dir": "runs/trl_guess",
    "method": "turn_rloo",
    "learning_rate": 4e-4,
    "lr_scheduler_type": "constant",
    "num_generations": 8,
    "per_device_train_batch_size": 64,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_completion_length": 8,
    "max_steps": 80,
    "ledger_every": 10,
    "logging_steps": 10,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
}


def main() -> None:
    parser = TrlParser(CreditGRPOConfig)
    parser.set_defaults(**DEFAULTS)
    (args,) = parser.parse_args_and_config()
    policy = load_model("bundled_turns")
    game = as_rollout_func("guess", n=4, turns=2, max_turns=2, max_turn_tokens=4, chat=False)
    trainer = CreditGRPOTrainer(
        model=policy.model, processing_class=policy.tokenizer, args=args, **game
    )
    trainer.train()


if __name__ == "__main__":
    main()
