"""Rollouts for verl's trainer without a rollout engine: a Hugging Face model, read from verl's last
checkpoint, samples them.

verl's rollout servers, and the sending of weights to them, are switched off. ``Sampler`` is what
verl calls an agent loop manager: it puts finished rollouts into TransferQueue. Loaded by every
process of a run, after ``helpers.verl.on_cpu``."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
import transfer_queue as tq
from verl.checkpoint_engine.base import CheckpointEngineManager
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.replica import RolloutReplicaRegistry

PROMPT_LEN = 3

PPOTrainer._enable_hybrid_replicas = False
CheckpointEngineManager.update_weights = lambda self, global_steps=None: {}
RolloutReplicaRegistry.register("vllm", lambda: None)


def _noted(update_actor):
    """verl's own update, after the order of the rows was written down."""

    @functools.wraps(update_actor)
    def update(self, batch, metrics):
        path = Path(self.config.trainer.default_local_dir, f"order_{self.global_steps}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(batch.keys))
        return update_actor(self, batch, metrics)

    return update


PPOTrainer._update_actor = _noted(PPOTrainer._update_actor)


class Manager:
    """``actor_rollout_ref.rollout.agent.agent_loop_manager_class``: samples with verl's last
    weights; what it sampled is also kept beside the checkpoints.
    """

    def __init__(self, config):
        self.config = config

    @classmethod
    def create(cls, config, **others):
        return cls(config)

    def generate_sequences(self, prompts):
        batch_number, folder = prompts["global_steps"], Path(self.config.trainer.default_local_dir)
        trained = folder / f"global_step_{batch_number - 1}" / "actor" / "huggingface"
        place = trained if trained.exists() else self.config.actor_rollout_ref.model.path
        kept = self.sample(str(place), prompts, batch_number)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(kept, folder / f"rollouts_{batch_number}.pt")


class Sampler(Manager):
    """A Hugging Face model, token by token."""

    def __init__(self, config):
        super().__init__(config)
        self.generator = torch.Generator().manual_seed(0)

    def sample(self, place, prompts, batch_number):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
        kept = {}
        for k, uid in enumerate(prompts["uid"]):
            kept |= self.prompt(model, [3 + k % 5, 4, 5], uid, batch_number)
        return kept

    def prompt(self, model, prompt, uid, batch_number):
        """All rollouts of one prompt, put into the queue under verl's keys."""
        rows = [
            self.rollout(model, prompt, uid) for _ in range(self.config.actor_rollout_ref.rollout.n)
        ]
        keys = [f"{uid}_{session}_0" for session in range(len(rows))]
        versions = {
            "global_steps": batch_number,
            "min_global_steps": batch_number - 1,
            "max_global_steps": batch_number - 1,
        }
        tags = [
            {
                "status": "success",
                "prompt_len": PROMPT_LEN,
                "response_len": n,
                "seq_len": PROMPT_LEN + n,
            }
            | versions
            for n in (len(row["responses"]) for row in rows)
        ]
        tq.kv_put(key=uid, partition_id="train", tag={"status": "running"})
        tq.kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(rows), tags=tags, partition_id="train"
        )
        tq.kv_put(key=uid, partition_id="train", tag={"status": "finished"})
        return dict(zip(keys, rows))

    @torch.no_grad()
    def rollout(self, model, prompt, uid):
        """2 to 6 tokens; reward 1 where more than half of them are even."""
        ids, logp = list(prompt), []
        for _ in range(int(torch.randint(2, 7, (), generator=self.generator))):
            logp_V = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(torch.multinomial(logp_V.exp(), 1, generator=self.generator)))
            logp.append(float(logp_V[ids[-1]]))
        response = torch.tensor(ids[PROMPT_LEN:])
        ones = torch.ones_like(response)
        scores = torch.zeros(len(response))
        scores[-1] = float((response % 2 == 0).float().mean() > 0.5)
        return {
            "prompts": torch.tensor(prompt),
            "responses": response,
            "response_mask": ones,
            "loss_mask": ones,
            "input_ids": torch.tensor(ids),
            "position_ids": torch.arange(len(ids)),
            "rm_scores": scores,
            "rollout_log_probs": torch.tensor(logp),
            "uid": uid,
            "num_turns": 2,
            "extra_fields": {},
            "multi_modal_inputs": {},
        }
