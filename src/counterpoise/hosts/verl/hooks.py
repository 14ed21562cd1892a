"""What counterpoise calls and overrides of verl: looked at, so that no version number decides.

In the tested version all of it is as expected. In another one the names and arguments must be the
same; functions whose code differs from the tested version are named.
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

TESTED = "0.9.1"


class Hook(NamedTuple):
    """``arguments`` in verl's order; of a function that we override these are all of them, of one
    that we call the others have defaults. ``code``: digest of the source in the tested version.
    """

    arguments: str
    code: str
    is_overridden: bool = False


BASE, CORE = "verl.trainer.ppo.v1.trainer_base:PPOTrainer.", "verl.trainer.ppo.core_algos:"
LOOP = "verl.experimental.agent_loop.agent_loop:"
LOSSES = {  # what estimators and losses stand on
    f"{CORE}register_adv_est": Hook("name_or_enum", "3778b1a5"),
    f"{CORE}register_policy_loss": Hook("name", "ca4a2190"),
    f"{CORE}agg_loss": Hook("loss_mat loss_mask loss_agg_mode", "f64efb50"),
    # verl calls every policy loss, ours too, with the arguments of this one
    f"{CORE}compute_policy_loss_vanilla": Hook(
        "old_log_prob log_prob advantages response_mask loss_agg_mode config rollout_is_weights",
        "6fcbd1b2",
        is_overridden=True,
    ),
}
TRAINERS = {  # what the trainers and the agent loop stand on
    f"{BASE}__init__": Hook("self config", "4e4c19f9", is_overridden=True),
    f"{BASE}_compute_advantage": Hook("self batch metrics", "96bd7600", is_overridden=True),
    f"{BASE}_balance_batch": Hook(
        "self batch metrics logging_prefix keep_minibatch", "87892a09", is_overridden=True
    ),
    f"{BASE}_save_checkpoint": Hook("self", "28b0b71a", is_overridden=True),
    f"{BASE}_load_checkpoint": Hook("self", "8b82c516", is_overridden=True),
    "verl.trainer.ppo.ray_trainer:compute_advantage": Hook("data adv_estimator", "7a31f4b5"),
    "verl.trainer.ppo.v1.utils:compute_advantage_for_multi_trajectories": Hook(
        "data batch_keys adv_estimator", "dad3e3b3"
    ),
    "verl.trainer.ppo.padding_utils:upsample_batch_to_divisible_size": Hook(
        "batch batch_multiple eos_token_id", "44551c82"
    ),
    "verl.utils.seqlen_balancing:calculate_workload": Hook("seqlen_list", "ab070efe"),
    "verl.utils.seqlen_balancing:get_seqlen_balanced_partitions": Hook(
        "seqlen_list k_partitions equal_size", "8aa26278"
    ),
    "verl.utils.seqlen_balancing:log_seqlen_unbalance": Hook(
        "seqlen_list partitions prefix", "c2d94e4c"
    ),
    f"{LOOP}AgentLoopBase.run": Hook("self sampling_params kwargs", "9363aabc", is_overridden=True),
    f"{LOOP}AgentLoopBase.ct_build_initial_tokens": Hook("self messages", "94d58bce"),
    f"{LOOP}AgentLoopBase._cap_text_prompt_length": Hook("self prompt_ids", "8d832ee7"),
    f"{LOOP}register": Hook("agent_name", "61cbed16"),
    "verl.workers.rollout.llm_server:LLMServerClient.generate": Hook(
        "self request_id prompt_ids sampling_params", "77d32d13"
    ),
    "transfer_queue:kv_batch_get": Hook("keys partition_id select_fields", "4c295a31"),
    "transfer_queue:kv_clear": Hook("keys partition_id", "6e83b2fc"),
    "transfer_queue:KVBatchMeta.select_keys": Hook("self keys_to_select", "eb05112f"),
}


def look_at(hooks: Mapping[str, Hook]) -> list[str]:
    """The functions whose code is not the tested one; an error if one is missing or takes other
    arguments.
    """
    changed = []
    for path, hook in hooks.items():
        function = _function(path)
        _check_arguments(path, hook, function)
        if digest(function) != hook.code:
            changed.append(path.rpartition(":")[2])
    return changed


def line_on(version: str, hooks: Mapping[str, Hook]) -> str:
    """What was looked at, in words; an error where something does not fit."""
    changed = look_at(hooks)
    code = f"not with the tested code: {', '.join(changed)}" if changed else "with the tested code"
    return (
        f"verl {version} ({TESTED} is tested): {len(hooks)} functions that counterpoise calls or"
        f" overrides take the arguments it expects, {code}"
    )


def digest(function: Callable[..., Any]) -> str:
    """A digest of a function's source, white space apart."""
    source = "".join(inspect.getsource(inspect.unwrap(function)).split())
    return hashlib.sha256(source.encode()).hexdigest()[:8]


def _function(path: str) -> Callable[..., Any]:
    module, _, names = path.partition(":")
    home: Any = importlib.import_module(module)
    for name in names.split("."):
        if not hasattr(home, name):
            raise ValueError(f"{module} has no {names}, which counterpoise needs")
        home = getattr(home, name)
    return home


def _check_arguments(path: str, hook: Hook, function: Callable[..., Any]) -> None:
    expected, parameters = hook.arguments.split(), inspect.signature(function).parameters
    more = [p for p in parameters.values() if p.name not in expected]
    is_known = [name for name in parameters if name in expected] == expected
    if not is_known or any(hook.is_overridden or _is_required(p) for p in more):
        raise ValueError(
            f"{path.rpartition(':')[2]} takes ({', '.join(parameters)}), expected"
            f" ({', '.join(expected)}{'' if hook.is_overridden else ', ...'})"
        )


def _is_required(parameter: inspect.Parameter) -> bool:
    variadic = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variadic
