"""verl's agent loop that plays an environment of counterpoise: ``agent_name: counterpoise_turns``.

A row is prompt, turn, reply, turn, reply ... What the model drew is never tokenised again; replies
are put in as tokens, with ``response_mask`` 0. What a turn earned travels in ``extra_fields``
(``hosts.verl.turns``).
"""

# verl lives in an environment of its own
# pyright: reportMissingImports=false

from __future__ import annotations

import time
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)
from verl.workers.rollout.replica import TokenOutput

from counterpoise.hosts.verl.conversations import AGENT_LOOP, shared
from counterpoise.hosts.verl.data import episode_of
from counterpoise.hosts.verl.episodes import OwnEpisode
from counterpoise.policy import encode_prompts
from counterpoise.sampling.play import CHECKED, FAILED, Play, extra_fields
from counterpoise.types import Prompt


class Row:
    """The tokens of one conversation after its prompt, as they come."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logp: list[float] | None = []
        self.fields: dict[str, Any] = {}
        self.experts: Any = None
        # set, all of them: verl drops what was not
        self.metrics = AgentLoopMetrics(generate_sequences=0.0, tool_calls=0.0, num_preempted=-1)

    def draw(self, turn: TokenOutput) -> None:
        """What the model drew."""
        self.ids += turn.token_ids
        self.logp = None if self.logp is None or not turn.log_probs else self.logp + turn.log_probs
        self.fields = {**turn.extra_fields, **_first_version(self.fields)}
        self.experts = self.experts if turn.routed_experts is None else turn.routed_experts
        if turn.num_preempted is not None:
            self.metrics.num_preempted = max(self.metrics.num_preempted, 0) + turn.num_preempted

    def read(self, ids: list[int]) -> None:
        """What the environment said."""
        self.ids += ids
        self.logp = None if self.logp is None else self.logp + [0.0] * len(ids)


def _first_version(fields: dict[str, Any]) -> dict[str, Any]:
    """The version of the weights with which a conversation began: it counts, whatever follows."""
    return {key: fields[key] for key in ("min_global_steps",) if key in fields}


@register(AGENT_LOOP)
class TurnAgentLoop(AgentLoopBase):
    """One conversation with the environment of ``algorithm.counterpoise.turns``."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.shared = shared(self.config, self.tokenizer)

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt, seed = episode_of(kwargs)
        prompt_ids = await self._prompt_ids(prompt, list(kwargs["raw_prompt"]))
        play, row = self.shared.play(prompt, seed, len(prompt_ids)), Row()
        request = {"request_id": uuid4().hex, "priority": int(kwargs.get("priority", 0))}
        limit = play.first_limit(0)
        while limit:
            asked = {**sampling_params, "max_tokens": limit - len(row.ids)}
            asked["stop_token_ids"] = list(self.shared.policy.stop_ids)
            start = time.monotonic()
            turn = await self.server_manager.generate(
                prompt_ids=prompt_ids + row.ids, sampling_params=asked, **request
            )
            row.metrics.generate_sequences += time.monotonic() - start
            limit = await self._answer(play, row, turn)
        await _check(play)
        return _output(play, prompt_ids, row)

    async def _answer(self, play: Play, row: Row, turn: TokenOutput) -> int:
        """The environment's reply to a turn; tokens at which the next turn ends, 0 for none."""
        if not turn.token_ids:
            play.rows[0].end_reason = "failed"
            play.rows[0].message = f"the server drew no token ({turn.stop_reason})"
            return 0
        row.draw(turn)
        play.hear(0, row.ids)
        start, episode = time.monotonic(), play.episodes
        assert isinstance(episode, OwnEpisode)
        await episode.arrive()
        row.metrics.tool_calls += time.monotonic() - start
        (answer,) = play.answers(wait=False)
        if answer.token_ids is None:
            return 0
        row.read(answer.token_ids)
        return answer.limit

    async def _prompt_ids(self, prompt: Prompt, messages: list[dict[str, Any]]) -> list[int]:
        if self.shared.settings.chat:
            return await self.ct_build_initial_tokens(messages)
        (ids,) = encode_prompts(self.shared.policy, [prompt.text], chat=False)
        return self._cap_text_prompt_length(list(ids))


async def _check(play: Play) -> None:
    """Play one conversation in so many again: an environment whose replies differ is an error."""
    episode = play.episodes
    assert isinstance(episode, OwnEpisode)
    if episode.call % CHECKED == 0 and play.rows[0].end_reason not in FAILED:
        episode.send_again([0])
        await episode.arrive()


def _output(play: Play, prompt_ids: list[int], row: Row) -> AgentLoopOutput:
    """What verl keeps of a conversation. Where the environment failed no token is trained on."""
    own = play.rows[0]
    if not own.spans:  # verl needs a token to put the reward on
        row.read([play.stop_ids[0]])
    ids = row.ids[: own.spans[-1][1] if own.spans else 1]
    is_failed, mask = own.end_reason in FAILED, [0] * len(ids)
    for start, end in [] if is_failed else own.spans:
        mask[start:end] = [1] * (end - start)
    fields = extra_fields(play, 0)
    return AgentLoopOutput(
        prompt_ids=prompt_ids,
        response_ids=ids,
        response_mask=mask,
        response_logprobs=None if row.logp is None else row.logp[: len(ids)],
        routed_experts=row.experts,
        reward_score=sum(fields["turn_rewards"]),
        num_turns=2 * len(own.spans),
        metrics=row.metrics,
        extra_fields={**row.fields, **fields, "reward_extra_info": {}},
    )
