"""Tiny trainings that sample with vLLM's stand-in: ``trl_vllm.py OUT SCENARIO...`` in one process
or, by torchrun, in two; those named ``fsdp2/SCENARIO``, which come last, by FSDP2.

``helpers/vllm_stand_in`` has to be on PYTHONPATH: TRL imports vllm when it is imported itself.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import torch
from accelerate.utils import gather_object
from trl.distributed import DistributedBackend
from trl.generation import vllm_generation
from vllm import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent))
from counterpoise.hosts.trl.batch import gather_columns
from counterpoise.hosts.trl.live import live_columns
from counterpoise.hosts.trl.state import credit_state
from helpers import trl_ranks, trl_tiny

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
# narrow enough that each mode acts on the small gap between the stand-in and the trainer
NARROW = {"vllm_importance_sampling_clip_max": 1.002, "vllm_importance_sampling_clip_min": 0.998}
GAP = "sampling/sampling_logp_difference/mean"
SLEEP = {"vllm_enable_sleep_mode": True}
SERVER = {"vllm_mode": "server"}
LEDGER = {"method": "uniform", "ledger_every": 1, "ledger_own_tokens": 0}
WHOLE = {"method": "delta", "plan": "query_preserved"}
FADE = {"method": "fade", "success": 0.5}
CORRECTIONS = {mode: NARROW | {"vllm_importance_sampling_mode": mode} for mode in MODES}
SCENARIOS = {
    **{f"plain/{mode}": correction for mode, correction in CORRECTIONS.items()},
    # the ledger makes the method's whole path run, which uniform alone leaves out
    **{f"ledger/{mode}": LEDGER | correction for mode, correction in CORRECTIONS.items()},
    "uniform": {"method": "uniform"} | CORRECTIONS["token_mask"],
    "delta": {"method": "delta"},
    "ntf_whitened": {"method": "ntf_whitened"},
    "fade": FADE,
    "whole_prompts": WHOLE,
    "asleep": WHOLE | SLEEP,
    "unsent": WHOLE | {"is_unsent": True},
    "asleep_unsent": WHOLE | SLEEP | {"is_unsent": True},
    "server/plain": SERVER,
    "server/ledger": SERVER | LEDGER,
    "server/delta": SERVER | WHOLE,
    "server/fade": SERVER | FADE | {"plan": "reward_balanced"},
    "server/dfpo_min": SERVER | {"method": "dfpo_min"},
}


def graded(completions, **columns):
    """Rewards of many values: nearly every update moves the weights."""
    return [(sum(map(ord, text)) % 7) / 6 for text in completions]


class Client:
    """TRL's client of a vLLM server, and the server."""

    def __init__(self, folder, base_url, group_port, connection_timeout):
        self.llm = LLM(folder, logprobs_mode="processed_logprobs")

    def init_communicator(self, device):
        self.device = device

    def get_server_info(self):
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, named_params):
        """The server knows before what it gets: names, types, shapes."""
        engine, sent = self.llm.engine, []
        for name, value in named_params:
            sent.append((name, str(value.dtype).removeprefix("torch."), list(value.shape)))
            engine.load_weights([(name, value)])
        if sent != metadata or {name for name, *_ in sent} != set(engine.weights):
            raise ValueError(f"update_named_params: announced {metadata}, got {sent}.")

    def reset_prefix_cache(self):
        self.llm.reset_prefix_cache()

    def generate(self, prompts, features, structured_outputs_regex, generation_kwargs, **params):
        """``n`` completions of each prompt, one after another."""
        if features or structured_outputs_regex or generation_kwargs:
            raise NotImplementedError("generate: the stand-in knows tokens and the sampler alone.")
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(requests, sampling_params=SamplingParams(**params))
        logprobs, ids = vllm_generation.extract_logprobs(outputs)
        return {
            "prompt_ids": prompts,
            "completion_ids": [row.token_ids for output in outputs for row in output.outputs],
            "logprobs": logprobs,
            "logprob_token_ids": ids,
        }


@functools.cache
def saved_model():
    """The folder from which vLLM reads its own copy."""
    folder = tempfile.mkdtemp()
    trl_tiny.tiny_model(0).save_pretrained(folder)
    return folder


def build(name, world, folder):
    """The trainer of a scenario; 16 rollouts a generation whatever the world."""
    vllm_generation.VLLMClient = functools.partial(Client, saved_model())
    sizes = {"per_device_train_batch_size": 4 // world, "steps_per_generation": 4}
    args = trl_ranks.ARGS | sizes | {"use_vllm": True} | SCENARIOS[name]
    args.pop("is_unsent", None)
    make = trl_tiny.ours if "method" in args else trl_tiny.plain
    model = trl_tiny.tiny_model(0)
    model.name_or_path = saved_model()
    return make(folder, args=args, model=model, reward_funcs=graded)


def run(name, world, *, sharded=False):
    """What the stand-in drew and with which weights, what credit it got, and where that led."""
    folder = Path(tempfile.mkdtemp())
    trainer = build(name, world, folder)
    assert trainer.accelerator.num_processes == world, (trainer.accelerator.num_processes, world)
    if sharded:
        trl_ranks.shard_fully(trainer)
        trainer.vllm_generation._dist = DistributedBackend(trainer.accelerator)
    if SCENARIOS[name].get("is_unsent"):
        leave_out_sending(trainer)
    result = {"world": world, "requests": [], "gaps": [], "rows": [], "error": ""}
    watch_engine(trainer, result)
    if hasattr(trainer, "credit_setup"):
        watch_rows(trainer, result)
        result["credit"], result["plans"] = trl_ranks.watch_batches(trainer)
    result["start"] = trl_tiny.weights(trainer)
    try:
        trainer.train()
    except RuntimeError as error:
        if name != "asleep_unsent":
            raise
        result["error"] = str(error)
    return result | {
        # in colocate mode every process draws the rollouts of its own prompts
        "requests": [gather_object(rows) for rows in result["requests"] or [[], []]],
        "gaps": gather_object(result["gaps"]),
        "weights": trl_ranks.whole(trl_tiny.weights(trainer)),
        "num_sharded": sum(hasattr(p, "full_tensor") for p in trainer.model.parameters()),
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "controller": _controller(trainer),
        "trl_gaps": [row[GAP] for row in trainer.state.log_history if GAP in row],
        "ledger_gaps": ledger_gaps(folder),
    }


def ledger_gaps(folder):
    """Mean |trainer - sampler| log-prob of each generation, by the ledger."""
    files = sorted(folder.glob("counterpoise/tokens/*.parquet"))
    gaps = [pq.read_table(file, columns=["sampler_gap"])["sampler_gap"] for file in files]
    return [float(np.abs(gap.to_numpy()).mean()) for gap in gaps]


def _controller(trainer):
    state = credit_state(trainer).method_state if hasattr(trainer, "credit_setup") else None
    return (state or {}).get("controller")


def leave_out_sending(trainer):
    """From the second generation on: what a forgotten call would do."""
    send = trainer.vllm_generation.sync_weights
    trainer.vllm_generation.sync_weights = lambda: None if trainer.state.global_step else send()


def watch_engine(trainer, result):
    """Note what is drawn, and how far the stand-in's weights are then from the trainer's."""
    generation = trainer.vllm_generation
    generate, now = generation.generate, {}

    def watched_generate(*args, **kwargs):
        now.update(trl_ranks.whole(trl_tiny.weights(trainer)))  # by all ranks
        return generate(*args, **kwargs)

    generation.generate = watched_generate
    holder = getattr(generation, "vllm_client", generation)
    if not hasattr(holder, "llm"):
        return  # the main process alone talks to a server
    engine, draw = holder.llm.engine, holder.llm.engine.draw

    def watched_draw(prompts, params):
        result["gaps"].append(trl_tiny.largest_gap(now, engine.weights))
        rows = draw(prompts, params)
        result["requests"].append([(ids, row.token_ids) for ids, row in zip(prompts, rows)])
        return rows

    engine.draw = watched_draw


def watch_rows(trainer, result):
    """Note each rollout as the method sees it: prompt, completion, number of its prompt, reward."""
    take = trainer._take_batch
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")

    def watched(output):
        own = {name: output[name] for name in (*names, "cp_row", "cp_group", "cp_reward")}
        columns = live_columns(gather_columns(trainer, own))
        prompts, completions = (
            [
                ids[mask.bool()].tolist()
                for ids, mask in zip(columns[f"{part}_ids"], columns[f"{part}_mask"])
            ]
            for part in ("prompt", "completion")
        )
        by_row = (columns[name].tolist() for name in ("cp_group", "cp_reward"))
        result["rows"].append(list(zip(prompts, completions, *by_row)))
        take(output)

    trainer._take_batch = watched


def main(out, names):
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", 1))
    results = {}
    for name in names:
        plain = name.removeprefix("fsdp2/")
        with mock.patch.dict(os.environ):  # TRL sets torchrun's variables for vLLM
            results[name] = run(plain, world, sharded=plain != name)
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
