"""An environment of ours as TRL's ``rollout_func``: the model writes plain text, turn by turn.

Conversations are drawn by counterpoise's own sampler, from the model that TRL trains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from datasets import Dataset

from counterpoise.environments import Environment
from counterpoise.hosts.trl.environment import environment_of
from counterpoise.hosts.trl.told import turn_reward
from counterpoise.maths.reduce import derived_seed
from counterpoise.maths.trie import row_mask
from counterpoise.policy import Policy, encode_prompts
from counterpoise.policy.bridge import Bridge
from counterpoise.policy.load import stop_tokens
from counterpoise.rollouts import RolloutBatch
from counterpoise.sampling.play import Limits, Play, extra_fields
from counterpoise.trainer.conversations import decoder, play_out
from counterpoise.trainer.prompts import prompts_from
from counterpoise.types import Prompt

if TYPE_CHECKING:
    from counterpoise.hosts.trl.trainer import CreditMixin

MAX_DRAWN = 256  # without max_completion_length
EPISODE = "episode"  # of a prompt's message: rollout_func gets no other column


def as_rollout_func(
    environment: Environment | str | Mapping[str, Any],
    *,
    max_turns: int = 8,
    max_turn_tokens: int | None = None,
    chat: bool = True,
    num_prompts: int = 1024,
    seed: int = 0,
    step_time_limit_s: float = 10.0,
    **params: Any,
) -> dict[str, Any]:
    """What ``GRPOTrainer`` takes to play an environment in plain text: ``rollout_func``,
    ``train_dataset`` and ``reward_funcs``.

        CreditGRPOTrainer(model, args=args, **as_rollout_func("guess", n=16, max_turns=4))

    Args:
        environment: an environment, or the name of one as in a recipe (``task:``).
        max_turns: turns of the model; ``max_completion_length`` limits the tokens that it draws in
            all of them.
        max_turn_tokens: of one turn.
        chat: turns are messages of the model's chat template; False is plain text.
        num_prompts: rows of the data set; all rollouts of a row play the same episode.
        seed: of prompts and episodes.
        step_time_limit_s: seconds that one action may take, where the environment is not trusted.
        params: the environment's parameters, where it is named.
    """
    environment = environment_of(environment, params)
    prompts = prompts_from(environment, "train", seed, 0, num_prompts)  # pyright: ignore[reportArgumentType]
    rows = [
        [{"role": "user", "content": prompt.text, EPISODE: number}]
        for number, prompt in enumerate(prompts)
    ]
    limits = Limits(max_turns, max_turn_tokens or 0, 0, step_time_limit_s=step_time_limit_s)
    return {
        "rollout_func": Conversations(environment, prompts, limits, chat, seed),
        "train_dataset": Dataset.from_dict({"prompt": rows}),
        "reward_funcs": [turn_reward],
    }


class Conversations:
    """A ``rollout_func`` that plays an environment."""

    def __init__(
        self,
        environment: Environment,
        prompts: Sequence[Prompt],
        limits: Limits,
        chat: bool,
        seed: int,
    ) -> None:
        self.environment, self.prompts, self.limits = environment, prompts, limits
        self.chat, self.seed = chat, seed

    def __call__(
        self, prompts: Sequence[Sequence[Mapping[str, Any]]], trainer: CreditMixin
    ) -> dict[str, list[Any]]:
        """TRL repeats a prompt for each of its rollouts."""
        episodes = [self._episode(prompt) for prompt in prompts]
        policy = policy_of(trainer)
        asked = [self.prompts[number] for number in episodes]
        row_ids = encode_prompts(policy, [prompt.text for prompt in asked], chat=self.chat)
        play = self._play(policy, trainer, episodes, row_ids)
        rollouts = play_out(
            policy,
            play,
            asked,
            row_ids,
            range(len(asked)),
            max_length=max_drawn(trainer),
            temperature=trainer.temperature,
            top_p=trainer.top_p,
            top_k=trainer.top_k or 0,
            seed=sampling_seed(trainer, episodes[0]),
            max_rows=len(row_ids),
        )
        fields = [extra_fields(play, row) for row in range(len(asked))]
        return as_lists(rollouts) | {name: [one[name] for one in fields] for name in fields[0]}

    def encode_prompts(
        self, prompts: Sequence[Sequence[Mapping[str, Any]]], trainer: CreditMixin
    ) -> list[list[int]]:
        """Token ids of prompts, as conversations begin with them."""
        texts = [prompt[-1]["content"] for prompt in prompts]
        return encode_prompts(policy_of(trainer), texts, chat=self.chat)

    def _episode(self, prompt: Sequence[Mapping[str, Any]]) -> int:
        number = None if isinstance(prompt, str) else prompt[-1].get(EPISODE)
        if number is None:
            raise ValueError(
                f"rollout_func: the prompt {str(prompt)[:80]!r} does not say which episode it"
                " begins. Pass the train_dataset that as_rollout_func returned with it."
            )
        return number

    def _play(
        self,
        policy: Policy,
        trainer: CreditMixin,
        episodes: Sequence[int],
        row_ids: Sequence[Sequence[int]],
    ) -> Play:
        most, model = max_drawn(trainer), policy.model.config.get_text_config()
        limits = self.limits._replace(
            max_new_tokens=most,
            max_turn_tokens=self.limits.max_turn_tokens or most,
            max_positions=getattr(model, "max_position_embeddings", None),
        )
        return Play(
            self.environment,
            [self.prompts[number] for number in episodes],
            [derived_seed(self.seed, number, "episode") for number in episodes],
            [len(ids) for ids in row_ids],
            limits=limits,
            bridge=Bridge(policy, self.chat),
            decode=decoder(policy),
            stop_ids=policy.stop_ids,
        )


def policy_of(trainer: CreditMixin) -> Policy:
    """The model that TRL trains, as our sampler takes it."""
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "as_rollout_func samples from the whole model, which FSDP and DeepSpeed shard. Use one"
            " process or DDP, or as_trl, which plays by TRL's own generation."
        )
    unknown = [name for name in ("min_p", "repetition_penalty") if _is_set(trainer, name)]
    if unknown:
        raise ValueError(
            f"as_rollout_func: counterpoise's sampler has no {unknown[0]}. Leave it out; it has"
            " temperature, top_p and top_k."
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    tokenizer, name = (
        trainer.processing_class,
        getattr(model.config, "_name_or_path", "") or "model",
    )
    return Policy(model, tokenizer, stop_tokens(model.generation_config, tokenizer, name), name)


def max_drawn(trainer: CreditMixin) -> int:
    """Tokens that the model may draw in one rollout."""
    return trainer.max_completion_length or MAX_DRAWN


def _is_set(trainer: CreditMixin, name: str) -> bool:
    return getattr(trainer, name, None) not in (None, 0.0, 1.0)


def sampling_seed(trainer: CreditMixin, episode: int) -> int:
    """Another one for every generation of every process."""
    purpose = f"trl/{trainer.accelerator.process_index}/{trainer.model.training}/{episode}"
    return derived_seed(trainer.args.seed, trainer._step, purpose)


def as_lists(rollouts: RolloutBatch) -> dict[str, list[Any]]:
    """What TRL asks of a ``rollout_func``, replies in place."""
    batch, kept_NT = rollouts.batch, row_mask(rollouts.batch.mask_NT)

    def ragged(value_NT: Any) -> list[list[Any]]:
        return [row[keep].tolist() for row, keep in zip(value_NT.cpu(), kept_NT.cpu())]

    return {
        "prompt_ids": rollouts.prompt_ids,
        "completion_ids": ragged(batch.token_ids_NT),
        "logprobs": ragged(batch.sampler_logp_NT),
        "env_mask": ragged(batch.mask_NT.long()),
    }
