"""Conversations for verl's trainer without a rollout engine: verl's own agent loop worker, in the
process of the trainer, with a model read from verl's last checkpoint as its server.
"""

from __future__ import annotations

import asyncio
import threading

import torch
from tensordict import NonTensorData, NonTensorStack
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from helpers.verl.sampler import Manager  # the module also switches verl's rollout servers off


class TurnSampler(Manager):
    """Conversations by verl's agent loop worker."""

    def sample(self, place, prompts, batch_number):
        from counterpoise.policy import load_model
        from helpers.verl.turns import Server

        kept = {}
        worker = keeping(kept)(self.config, Server(load_model(place), 1000 * batch_number))
        rows = [row_of(prompts, k) for k in range(len(prompts))]
        in_a_loop(hold(worker, rows, batch_number))
        return kept


def keeping(kept):
    """verl's worker class, which also keeps what it puts into the queue."""

    class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
        async def _agent_loop_postprocess(self, output, validate, **kwargs):
            row = output.as_dict() | {"uid": kwargs["uid"]}
            row["input_ids"] = torch.cat([row["prompts"], row["responses"]])
            kept[f"{kwargs['uid']}_{kwargs['session_id']}_0"] = row
            await super()._agent_loop_postprocess(output, validate, **kwargs)

    return Worker


def row_of(prompts, k):
    """One row of verl's batch of prompts, as plain values."""
    out = {}
    for name, value in prompts.items():
        if isinstance(value, NonTensorStack | NonTensorData):
            value = value[k].data if isinstance(value, NonTensorStack) else value.data
        elif isinstance(value, torch.Tensor):
            value = value[k]
        out[name] = value
    return out


async def hold(worker, rows, batch_number):
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True}
    trajectory = {"step": batch_number, "sample_index": 0, "rollout_n": 0, "validate": False}
    await asyncio.gather(*(worker._run_prompt(row, settings, trajectory) for row in rows))


def in_a_loop(work):
    """Run to its end in a thread of its own: the trainer's has a loop already."""
    errors = []

    def run():
        try:
            asyncio.run(work)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
