"""Tiny trainings through TRL, all made in code: a model of two layers, a tokenizer of words,
prompts, a reward. Nothing is downloaded.
"""

from __future__ import annotations

import os
import warnings

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from counterpoise.hosts.trl import CreditGRPOConfig, CreditGRPOTrainer
from counterpoise.hosts.trl.selftest import WORDS, tiny_model, tiny_tokenizer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
SMALL = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "max_completion_length": 6,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 8,
    "max_steps": 8,
    "learning_rate": 5e-3,
    "lr_scheduler_type": "constant",
    "seed": 3,
}


# the tiny model is undecided everywhere: GTPO's filter would leave nothing
GTPO = {
    "credit": [
        {
            "name": "conflict",
            "multiply": True,
            "divide": True,
            "rule": {"name": "entropy_filter", "limit": 10.0},
        }
    ]
}


def axes_of(name: str) -> dict:
    """The axes with which a preset learns something from the tiny model."""
    return GTPO if name == "gtpo" else {}


def prompts(count=48):
    return Dataset.from_dict(
        {"prompt": [f"w{k % 12} w{(5 * k + 1) % 12} w{k // 12}" for k in range(count)]}
    )


def graded(completions, **kwargs):
    """1 for a completion with an even number of words from the first half of the vocabulary."""
    low = set(WORDS[:6])
    return [float(sum(word in low for word in text.split()) % 2 == 0) for text in completions]


def told(prompts, trainer):
    """Completions that depend on the prompt and the place in its group alone: the same whatever the
    number of processes.
    """
    prompt_ids, completion_ids, place = [], [], {}
    for prompt in prompts:
        k = place[prompt] = place.get(prompt, -1) + 1
        gen = torch.Generator().manual_seed(1000 * sum(map(ord, prompt)) + k)
        length = int(torch.randint(2, 7, (1,), generator=gen))
        ids = torch.randint(2, len(WORDS) + 2, (length,), generator=gen).tolist()
        prompt_ids.append(trainer.processing_class(prompt)["input_ids"])
        completion_ids.append([*ids[:-1], 1])
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def plain(tmp_path, *, args=None, seed=0, **kwargs):
    """TRL's own trainer."""
    config = GRPOConfig(output_dir=str(tmp_path), **SMALL | (args or {}))
    return _trainer(GRPOTrainer, config, seed, kwargs)


def ours(tmp_path, *, args=None, seed=0, cls=CreditGRPOTrainer, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        config = CreditGRPOConfig(output_dir=str(tmp_path), **SMALL | (args or {}))
        return _trainer(cls, config, seed, kwargs)


def _trainer(cls, config, seed, kwargs):
    settings = {
        "model": None,
        "reward_funcs": graded,
        "train_dataset": prompts(),
        "processing_class": tiny_tokenizer(),
    } | kwargs
    settings["model"] = settings["model"] if settings["model"] is not None else tiny_model(seed)
    return cls(args=config, **settings)


def weights(trainer):
    module = trainer.accelerator.unwrap_model(trainer.model)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_identical(first, second):
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), (
            f"{name}: {(first[name] - second[name]).abs().max()}"
        )


def largest_gap(first, second):
    return max(float((first[name] - second[name]).abs().max()) for name in first)
