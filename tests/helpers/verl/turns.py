"""verl's own agent loop workers without Ray: a model of the package in place of the rollout
servers, a dict in place of TransferQueue.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.rollout.replica import TokenOutput

from counterpoise.policy import Policy, load_model, locate
from counterpoise.sampling import sample
from helpers.verl.cases import Rollout

UNREAD = ("multi_modal_inputs", "raw_prompt", "prompt", "tools_kwargs", "interaction_kwargs")


def turn_config(task: Any, **changed: Any) -> Any:
    """verl's whole configuration for the package's model and an environment."""
    from hydra import compose, initialize_config_module

    place = locate("bundled_turns").place
    lines = [
        f"actor_rollout_ref.model.path={place}",
        "data.max_prompt_length=16",
        "data.max_response_length=32",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "algorithm.adv_estimator=counterpoise/turn_rloo",
        "trainer.v1.trainer_mode=counterpoise/sync",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    OmegaConf.set_struct(config, False)
    turns = {"environment": task, "max_turns": 4, "max_turn_tokens": 4, "chat": False}
    OmegaConf.update(config, "algorithm.counterpoise", {"turns": turns}, force_add=True)
    for path, value in changed.items():
        OmegaConf.update(config, path.replace("__", "."), value, force_add=True)
    return config


class Server:
    """What verl calls an LLM client: the model draws a turn; every request is kept."""

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        self.policy, self.seed, self.asked = policy, seed, []

    async def generate(self, request_id, *, prompt_ids, sampling_params, **others):
        self.asked.append((list(prompt_ids), dict(sampling_params)))
        self.seed += 1
        turn = sample(
            self.policy.model,
            [prompt_ids],
            max_new_tokens=sampling_params["max_tokens"],
            stop_ids=sampling_params["stop_token_ids"],
            seed=self.seed,
        )
        keep = turn.mask_NT[0]
        return TokenOutput(
            token_ids=turn.token_ids_NT[0][keep].tolist(),
            log_probs=turn.sampler_logp_NT[0][keep].tolist(),
            stop_reason="completed",
            extra_fields={"min_global_steps": self.seed, "max_global_steps": self.seed},
        )


class Scripted:
    """Turns by the number of replies that a row has read so far, as text."""

    def __init__(self, policy: Policy, *turns: str) -> None:
        self.policy, self.turns, self.asked, self.num = policy, turns, [], {}

    async def generate(self, request_id, *, prompt_ids, sampling_params, **others):
        self.asked.append((list(prompt_ids), dict(sampling_params)))
        number = self.num[request_id] = self.num.get(request_id, -1) + 1
        text = self.turns[number % len(self.turns)]
        ids = self.policy.tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = ids[: sampling_params["max_tokens"]]
        await asyncio.sleep(0)
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed")


def bundled() -> Policy:
    return load_model("bundled_turns")


def read_rows(path: Path, config: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """A data file as verl's own data set gives it."""
    from verl.utils.dataset.rl_dataset import RLHFDataset

    data = RLHFDataset(str(path), tokenizer, config.data)
    return [data[k] for k in range(len(data))]


def play_rows(monkeypatch: Any, config: Any, server: Any, rows: list[dict[str, Any]]):
    """The rollouts that verl's worker puts into its queue, ``rollout.n`` of each row; and what
    became of each prompt.
    """
    queue: dict[str, Rollout] = {}
    status: dict[str, str] = {}

    async def put_one(key, partition_id, tag, **others):
        status[key] = tag["status"]

    async def put(keys, fields, tags, partition_id):
        for k, key in enumerate(keys):
            own = {name: value[k] for name, value in fields.items()}
            own = {name: getattr(v, "data", v) for name, v in own.items() if name not in UNREAD}
            queue[key] = Rollout(key=key, fields=own, tag=tags[k])

    monkeypatch.setattr(agent_loop_tq.tq, "init", lambda: None)
    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put_one)
    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_batch_put", put)
    kind = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = kind(config, server)

    async def play():
        batch = [{**row, "uid": f"p{k}", "global_steps": 1} for k, row in enumerate(rows)]
        for row in batch:
            row.pop("dummy_tensor", None)
        await asyncio.gather(*(_prompt(worker, row) for row in batch))

    asyncio.run(play())
    return [queue[key] for key in sorted(queue)], status


async def _prompt(worker: Any, row: dict[str, Any]) -> None:
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    await worker._run_prompt(row, settings, trajectory)
