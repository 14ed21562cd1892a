"""Prompts -> rollouts -> rewards -> a TokenBatch with the columns that the method needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from counterpoise.catalogue.method import Method
from counterpoise.environments import is_environment
from counterpoise.maths.reduce import derived_seed
from counterpoise.policy import Policy, decode_texts, encode_prompts, measure
from counterpoise.policy.offsets import tokens_from
from counterpoise.policy.precision import autocast
from counterpoise.rollouts import Completions, RolloutBatch
from counterpoise.sampling import SAMPLED
from counterpoise.sampling.draw import share_openings, uniforms
from counterpoise.stage import call, success_of
from counterpoise.tasks import Grades, Task
from counterpoise.trainer.checks import SCORE, VALUE, check_one_turn, check_scores
from counterpoise.trainer.completions import State, complete_states
from counterpoise.trainer.config import Config, ConfigError
from counterpoise.trainer.conversations import hold, without_lost
from counterpoise.trainer.judge import Judged, grader_of, sample_and_grade
from counterpoise.trainer.prompts import prompts_from
from counterpoise.types import Prompt, TokenBatch

# ``trainer.teacher`` and ``trainer.importance`` measure them
APART = {"teacher_logp_NT", "has_teacher_N", "importance_NT"}


def collect(
    method: Method, sampler: RolloutSampler, saved: RolloutBatch | None = None
) -> RolloutBatch:
    """Sample and grade one batch, or take a saved one, then let the stages of the method that
    sample more do so.
    """
    rollouts = sampler.more() if saved is None else saved
    for stage in method.collectors:
        assert stage.collect is not None
        rollouts = call(stage.collect, rollouts, sampler, **stage.settings)
    return rollouts


def measure_columns(
    policy: Policy,
    method: Method,
    config: Config,
    collected: RolloutBatch,
    reference: Any = None,
    *,
    also: frozenset[str] = frozenset(),
) -> RolloutBatch:
    """The batch with the columns that the method needs, and ``also`` these, where the sampler did
    not give them.
    """
    batch = collected.batch
    needs = (method.needs - APART) | also
    missing = {name for name in needs if getattr(batch, name, None) is None}
    check_scores(method, SCORE not in missing)
    if VALUE in missing:
        raise ConfigError(
            f"method: {method.name} reads {VALUE}, which fresh completions give where a batch is"
            " collected: in counterpoise train, in replay, and in the probes localisation and"
            " token_value."
        )
    if not missing:
        return collected
    with autocast(policy.model):
        columns = measure(
            policy.model,
            collected.prompt_ids,
            batch.token_ids_NT,
            batch.mask_NT,
            missing,
            temperature=config.rollouts.temperature,
            token_budget=config.token_budget,
            ref_model=reference,
        )
    return collected._replace(batch=batch.replace(**columns))


def grade_rollouts(
    task: Task, pairs: Sequence[tuple[Prompt, str]], config: Config, where: str
) -> Grades:
    """Rewards under the limits of the recipe."""
    grader = grader_of(task, [prompt for prompt, _ in pairs], config, where)
    grader.add({row: text for row, (_, text) in enumerate(pairs)})
    return grader.grades()


class RolloutSampler:
    """Everything that is sampled for one batch: prompts of the stream in rounds, and what the
    ``collect`` hook of a stage asks for (``stage.Sampler``).
    """

    def __init__(
        self,
        policy: Policy,
        task: Task,
        config: Config,
        batch_number: int,
        *,
        start: int = 0,
        needs: frozenset[str] = frozenset(),
        success: float | None = None,
    ) -> None:
        self.policy, self.task, self.config = policy, task, config
        self.success = success_of(config.task) if success is None else success
        self.batch_number, self.start, self.needs, self.num_rounds = batch_number, start, needs, 0
        self.num_more, self.num_more_tokens, self.more_s = 0, 0, 0.0

    @property
    def num_prompts(self) -> int:
        """Prompts taken from the stream so far."""
        return self.num_rounds * self.config.rollouts.prompts

    def more(self) -> RolloutBatch:
        settings, first = self.config.rollouts, self.start + self.num_prompts
        prompts = prompts_from(self.task, "train", self.config.seed, first, settings.prompts)
        prompt_ids = self._encode([p.text for p in prompts], settings.max_prompt_tokens)
        purpose = f"rollouts/{self.num_rounds}"
        if is_environment(self.task):
            self.num_rounds += 1
            whole = hold(
                self.policy,
                self.task,
                prompts,
                prompt_ids,
                self.config,
                group_size=settings.group_size,
                seed=derived_seed(self.config.seed, self.batch_number, purpose),
                temperature=settings.temperature,
                needs=self.needs,
                success=self.success,
            )
            where = f"batch {self.batch_number}"
            return without_lost(whole, self.config.grader_max_failed_frac, where)
        group = [p for p in range(len(prompts)) for _ in range(settings.group_size)]
        judged = self._sample(
            prompt_ids,
            [prompts[p] for p in group],
            purpose=purpose,
            group_size=settings.group_size,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_rows=settings.max_rows or len(group),
            needs=self.needs,
            uniform_NT=self._uniforms(len(prompt_ids), purpose),
        )
        self.num_rounds += 1
        row_ids = [prompt_ids[p] for p in group]
        return self._graded(judged, prompts, judged.rollouts.prompt_index_N.clone(), row_ids)

    def answer(
        self,
        rollouts: RolloutBatch,
        rows: Sequence[int],
        prompts: Sequence[str],
        *,
        samples: int,
        purpose: str,
    ) -> RolloutBatch:
        settings, began = self.config.rollouts, time.perf_counter()
        if is_environment(self.task):
            raise ConfigError(
                "task: a stage of the method answers other prompts, and an environment plays its"
                " own alone. Take a task with one turn, or a method without corrections."
            )
        limit = settings.max_prompt_tokens + 2 * settings.max_new_tokens + 256
        owners, group = [row for row in rows for _ in range(samples)], rollouts.batch.group_N
        judged = self._sample(
            self._encode(list(prompts), limit),
            [rollouts.prompts[p] for p in group[owners].tolist()],
            purpose=purpose,
            group_size=samples,
            max_rows=settings.max_rows or 1024,
        )
        source_N = judged.rollouts.prompt_index_N
        row_ids = [rollouts.prompt_ids[row] for row in owners]
        graded = self._graded(judged, rollouts.prompts, group[owners], row_ids)
        self._count(len(owners), int(judged.rollouts.mask_NT.sum()), began)
        return graded._replace(batch=graded.batch.replace(extra={"source_N": source_N}))

    def score(self, rollouts: RolloutBatch) -> RolloutBatch:
        batch = rollouts.batch
        with autocast(self.policy.model):
            columns = measure(
                self.policy.model,
                rollouts.prompt_ids,
                batch.token_ids_NT,
                batch.mask_NT,
                {"trainer_logp_NT", "entropy_NT"},
                temperature=self.config.rollouts.temperature,
                token_budget=self.config.token_budget,
            )
        return rollouts._replace(
            batch=batch.replace(
                sampler_logp_NT=columns["trainer_logp_NT"], entropy_NT=columns["entropy_NT"]
            )
        )

    def complete(
        self,
        rollouts: RolloutBatch,
        places: Sequence[tuple[int, int]],
        *,
        samples: int,
        purpose: str,
    ) -> Completions:
        check_one_turn(self.task)
        began, batch = time.perf_counter(), rollouts.batch
        ids_NT, group = batch.token_ids_NT.tolist(), batch.group_N.tolist()
        states = [State(rollouts.prompt_ids[row], ids_NT[row][:num]) for row, num in places]
        ends = complete_states(
            self.policy,
            states,
            samples,
            self.config.rollouts,
            lambda part: derived_seed(self.config.seed, self.batch_number, f"{purpose}/{part}"),
        )
        texts = decode_texts(self.policy.tokenizer, ends.answers)
        prompts = [rollouts.prompts[group[places[k][0]]] for k in ends.source]
        where = f"batch {self.batch_number}"
        graded = grade_rollouts(self.task, list(zip(prompts, texts)), self.config, where)
        self._count(len(texts), ends.num_tokens, began)
        return Completions(
            torch.tensor(ends.source),
            torch.tensor(graded.reward, dtype=torch.float64),
            graded.num_faults,
            graded.messages,
        )

    def tokens_at(
        self, rollouts: RolloutBatch, offsets: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        check_one_turn(self.task)
        batch = rollouts.batch
        length = batch.length_N.tolist()
        ids = [row[:num] for row, num in zip(batch.token_ids_NT.tolist(), length)]
        tokens = tokens_from(self.policy.tokenizer, ids, rollouts.texts, offsets)
        return [sorted({t for t in row if 0 < t < num}) for row, num in zip(tokens, length)]

    def _count(self, num: int, num_tokens: int, began: float) -> None:
        """What stages asked for beside the rollouts of prompts: how much, and how long it took."""
        self.num_more += num
        self.num_more_tokens += num_tokens
        self.more_s += time.perf_counter() - began

    def _encode(self, texts: list[str], limit: int) -> list[list[int]]:
        return encode_prompts(self.policy, texts, chat=self.config.chat, max_prompt_tokens=limit)

    def _uniforms(self, num_prompts: int, purpose: str) -> Tensor | None:
        """Random streams of groups that share their openings; None where none does."""
        settings = self.config.rollouts
        if not settings.fork_tokens:
            return None
        seed = derived_seed(self.config.seed, self.batch_number, purpose)
        rows = range(num_prompts * settings.group_size)
        uniform_NT = uniforms(seed, rows, settings.max_new_tokens)
        return share_openings(uniform_NT, settings.group_size, settings.fork_tokens)

    def _sample(
        self, prompt_ids: list[list[int]], asked: list[Prompt], *, purpose: str, **settings: Any
    ) -> Judged:
        return sample_and_grade(
            self.policy,
            self.task,
            self.config,
            prompt_ids,
            asked,
            f"batch {self.batch_number}",
            temperature=self.config.rollouts.temperature,
            seed=derived_seed(self.config.seed, self.batch_number, purpose),
            **settings,
        )

    def _graded(
        self, judged: Judged, prompts: list[Prompt], group_N: Tensor, row_ids: list[list[int]]
    ) -> RolloutBatch:
        """A batch of rollouts; rollout i answers ``prompts[group_N[i]]``."""
        rollouts, texts, graded = judged
        batch = TokenBatch(
            token_ids_NT=rollouts.token_ids_NT.clone(),
            mask_NT=rollouts.mask_NT.clone(),
            group_N=group_N,
            reward_N=torch.tensor(
                graded.reward, dtype=torch.float32, device=rollouts.mask_NT.device
            ),
            sampler_logp_NT=rollouts.sampler_logp_NT.clone(),
            entropy_NT=rollouts.entropy_NT.clone(),
            max_length=self.config.rollouts.max_new_tokens,
            success=self.success,
        ).replace(**{name: getattr(rollouts, name) for name in SAMPLED})
        return RolloutBatch(
            prompts=prompts,
            prompt_ids=row_ids,
            texts=texts,
            stop_reason=list(rollouts.stop_reason),
            batch=batch,
            num_grader_failures=graded.num_faults,
            grader_messages=graded.messages,
            feedback=list(graded.feedback) or None,
        )
