"""``algorithm.counterpoise.turns``: an environment, its limits, and what all conversations of a
process share.
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from counterpoise.environments import Environment, is_environment
from counterpoise.errors import check_number, check_whole, nearest
from counterpoise.hosts.verl.episodes import OwnEpisode, Players
from counterpoise.hosts.verl.method import settings_of
from counterpoise.policy.bridge import Bridge
from counterpoise.policy.load import Policy, stop_tokens
from counterpoise.sampling.play import Limits, Play
from counterpoise.tasks import task
from counterpoise.types import Prompt

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedTokenizerBase

AGENT_LOOP = "counterpoise_turns"
WHERE = "algorithm.counterpoise.turns"


class TurnSettings(NamedTuple):
    """The mapping under ``algorithm.counterpoise.turns``.

    Args:
        environment: a name, or a mapping with ``name`` and parameters; None leaves conversations
            to an agent loop of the user's own.
        max_turns: turns of the model.
        max_turn_tokens: tokens drawn in one turn; None is all of ``data.max_response_length``.
        step_time_limit_s: seconds that the environment may take for one step.
        chat: False takes prompts and replies as plain text, without the chat template.
    """

    environment: str | dict[str, Any] | None = None
    max_turns: int = 8
    max_turn_tokens: int | None = None
    step_time_limit_s: float = 10.0
    chat: bool = True


def turn_settings(settings: Mapping[str, Any]) -> TurnSettings | None:
    """What ``algorithm.counterpoise`` says about turns, None if nothing.

    >>> turn_settings({"turns": {"environment": "guess", "max_turn": 4}})
    Traceback (most recent call last):
    ValueError: algorithm.counterpoise.turns has no setting 'max_turn'. Did you mean 'max_turns'?
    Known: chat, environment, max_turn_tokens, max_turns, step_time_limit_s.
    """
    given = settings.get("turns")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(
            f"{WHERE} must be a mapping, got {given!r}. For example"
            f" +{WHERE}.environment.name=guess."
        )
    for key in given:
        if key not in TurnSettings._fields:
            raise ValueError(
                f"{WHERE} has no setting {key!r}. {nearest(key, TurnSettings._fields)}"
            )
    out = TurnSettings(**given)
    check_whole(WHERE, least=1, max_turns=out.max_turns)
    check_whole(WHERE, least=1, or_none=True, max_turn_tokens=out.max_turn_tokens)
    check_number(WHERE, above=0, step_time_limit_s=out.step_time_limit_s)
    return out


def environment_of(settings: TurnSettings | None) -> Environment:
    """The environment that the settings name."""
    if settings is None or settings.environment is None:
        raise ValueError(
            f"agent loop {AGENT_LOOP!r} has no environment. Set +{WHERE}.environment.name, for"
            " example to guess."
        )
    built = task(settings.environment)
    if not is_environment(built):
        raise ValueError(
            f"{WHERE}.environment={settings.environment!r} is graded once, not played in turns."
            " Use verl's own agent loop and a reward function, or name an environment (guess,"
            " mastermind, lookup, gem:<id>, your.module:Class)."
        )
    return built


class Shared:
    """What all conversations of a process share; the bridge is checked here, once.

    Args:
        config: verl's whole configuration.
        tokenizer: verl's.
    """

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        settings = turn_settings(settings_of(config.algorithm))
        self.environment = environment_of(settings)
        assert settings is not None
        self.settings, self.rollout = settings, config.actor_rollout_ref.rollout
        model = config.actor_rollout_ref.model
        # its own: verl's is used by other threads
        own = copy.deepcopy(tokenizer)
        own.chat_template = model.get("custom_chat_template", None) or own.chat_template
        self.policy = Policy(
            None,  # pyright: ignore[reportArgumentType]  # verl's servers have it
            own,
            stop_tokens(_generation(model), own, str(model.path)),
            str(model.path),
        )
        template = config.data.get("apply_chat_template_kwargs", None) or {}
        self.bridge = Bridge(self.policy, settings.chat, **template)
        is_trusted = getattr(self.environment, "is_trusted", False)
        self.players = None if is_trusted else Players(self.environment)

    def play(self, prompt: Prompt, seed: int, prompt_length: int) -> Play:
        """One conversation that has not begun."""
        limits = self.limits(prompt_length)
        own = OwnEpisode(self.environment, prompt, seed, limits.step_time_limit_s, self.players)
        return Play(
            self.environment,
            [prompt],
            [seed],
            [prompt_length],
            limits=limits,
            bridge=self.bridge,
            decode=self.decode,
            stop_ids=self.policy.stop_ids,
            episodes=own,
        )

    def limits(self, prompt_length: int) -> Limits:
        """verl's ``response_length`` counts drawn tokens and replies."""
        room = self.rollout.response_length
        return Limits(
            max_turns=self.settings.max_turns,
            max_turn_tokens=self.settings.max_turn_tokens or room,
            max_new_tokens=room,
            max_row_tokens=prompt_length + room,
            max_positions=self.rollout.get("max_model_len", None),
            step_time_limit_s=self.settings.step_time_limit_s,
        )

    def decode(self, ids: list[int]) -> str:
        return self.policy.tokenizer.decode(ids, skip_special_tokens=True)


_SHARED: dict[str, Shared] = {}  # verl makes an agent loop per rollout


def shared(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> Shared:
    """The same for all conversations of a run in this process."""
    template = config.data.get("apply_chat_template_kwargs", None) or {}
    key = json.dumps(
        [settings_of(config.algorithm).get("turns"), str(config.actor_rollout_ref), str(template)]
    )
    if key not in _SHARED:
        _SHARED[key] = Shared(config, tokenizer)
    return _SHARED[key]


def check_conversations(config: DictConfig) -> None:
    """An error, before any worker starts, where the environment or the bridge cannot work."""
    settings = turn_settings(settings_of(config.algorithm))
    if settings is None or settings.environment is None:
        return
    environment_of(settings)
    from verl.utils.fs import copy_to_local
    from verl.utils.tokenizer import hf_tokenizer

    model = config.actor_rollout_ref.model
    place = copy_to_local(model.get("tokenizer_path", None) or model.path)
    trusts = model.get("trust_remote_code", False)
    shared(config, hf_tokenizer(place, trust_remote_code=trusts))


def _generation(model: DictConfig) -> Any:
    from verl.utils.fs import copy_to_local
    from verl.utils.model import get_generation_config

    trusts = model.get("trust_remote_code", False)
    return get_generation_config(copy_to_local(model.path), trust_remote_code=trusts)
