"""Rollouts: batched sampling with a key-value cache from any Hugging Face causal LM.

A prompt is read once and its cache is spread over its rollouts. Every row draws from a random
stream of its own, so that how rows are batched, dropped or shared changes no token (up to rounding
of the logits, which depends on the batch's shape).

Axes: N rollouts, T response tokens, B rows in flight, L tokens in the cache, P distinct prompts in
    flight.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from counterpoise.policy.backbone import Backbone, backbone, evaluating, last_logits
from counterpoise.sampling.cache import compaction, spread
from counterpoise.sampling.checks import check_cache, check_prompts, check_settings
from counterpoise.sampling.draw import Draw, argmax, draw, truncate, uniforms
from counterpoise.sampling.engine import engine_for
from counterpoise.sampling.slots import Settings as engine_settings
from counterpoise.sampling.slots import Watch, asked_of_engine, engine_extras, rows_of

COMPACT_FRAC = (
    0.9  # stopped rows leave the running batch once no more than this share of it is alive
)
SYNC_STEPS = 8  # on an accelerator, how often the host asks who is still alive


class Rollouts(NamedTuple):
    """Finished rollouts, right-padded, prompt by prompt in the order of the prompts.

    Args:
        prompt_index_N: which prompt each row answers.
        token_ids_NT: response tokens, the stop token included; padding is ``pad_id``.
        mask_NT: True on response tokens.
        sampler_logp_NT: log-prob of each token under the distribution it was drawn from (after
            temperature, top-k, top-p); float32.
        entropy_NT: entropy of that distribution, in nats; float32.
        stop_reason: "stop" (a stop token came) or "length" (``max_new_tokens`` was reached), per
            row.
        hidden_NTD, topk_ids_NTK, topk_logp_NTK: as ``measure`` gives them, where the engine was
            asked for them; else None.
    """

    prompt_index_N: Tensor
    token_ids_NT: Tensor
    mask_NT: Tensor
    sampler_logp_NT: Tensor
    entropy_NT: Tensor
    stop_reason: tuple[str, ...]
    hidden_NTD: Tensor | None = None
    topk_ids_NTK: Tensor | None = None
    topk_logp_NTK: Tensor | None = None


class _Settings(NamedTuple):
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_S: Tensor
    greedy: bool


class _Columns(NamedTuple):
    """Whole-call buffers that every wave writes its rows into."""

    token_ids_NT: Tensor
    sampler_logp_NT: Tensor
    entropy_NT: Tensor
    length_N: Tensor
    uniform_NT: Tensor


class _Running(NamedTuple):
    """Rows in flight: where each belongs, whether it still runs, its last position, and the cache
    they share.
    """

    row_B: Tensor
    alive_B: Tensor
    position_B: Tensor
    mask_BL: Tensor | None
    cache: Any


def sample(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    *,
    group_size: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop_ids: Sequence[int],
    pad_id: int = 0,
    seed: int,
    max_rows: int = 1024,
    engine: bool = True,
    needs: frozenset[str] | set[str] = frozenset(),
    topk: int = 20,
    uniform_NT: Tensor | None = None,
    watch: Watch | None = None,
) -> Rollouts:
    """Draw ``group_size`` answers to every prompt from ``softmax(z / temperature)``, truncated to
    top-k and then to the nucleus top-p.

    ``temperature=0`` takes the likeliest token; its log-prob and entropy are then those of the
    distribution at temperature 1, untruncated. A row's tokens depend on its prompt, the seed and
    the row's number, never on the other rows.

    Args:
        model: a Hugging Face causal LM.
        prompt_ids: token ids of each prompt, at least one token each.
        group_size: G, rollouts of one prompt; row ``p * G + g`` is the g-th of prompt p.
        stop_ids: tokens that end a response; they are part of it.
        pad_id: fills ``token_ids_NT`` after the end.
        seed: with the row's number it decides every draw.
        max_rows: rows in flight at once; lower it when memory runs out.
        engine: take the fast engine where it knows the model; False always takes the generic path.
        needs: further columns (``SAMPLED``) that the engine takes from the pass that draws the
            tokens; others are ignored, and so are these on the generic path: ``measure`` has them
            all.
        topk: K of the candidates.
        uniform_NT: the numbers in [0, 1) by which each row draws, in place of the seed's.
        watch: hears of rows that have stopped, and their tokens, every row once: while others still
            run (the engine), or at the end.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(
    ...     vocab_size=16,
    ...     hidden_size=8,
    ...     intermediate_size=16,
    ...     num_hidden_layers=1,
    ...     num_attention_heads=2,
    ... )
    >>> rollouts = sample(
    ...     LlamaForCausalLM(config),
    ...     [[1, 2], [3]],
    ...     group_size=2,
    ...     max_new_tokens=3,
    ...     stop_ids=[0],
    ...     seed=0,
    ... )
    >>> rollouts.prompt_index_N.tolist(), len(rollouts.stop_reason)
    ([0, 0, 1, 1], 4)
    """
    greedy = temperature == 0
    check_settings(
        {"group_size": group_size, "max_new_tokens": max_new_tokens, "max_rows": max_rows},
        temperature,
        top_p,
        top_k,
    )
    check_prompts(model, prompt_ids, max_new_tokens)
    prompt_index = [p for p in range(len(prompt_ids)) for _ in range(group_size)]
    stop_S = torch.tensor(sorted(set(stop_ids)), dtype=torch.long, device=model.device)
    settings = _Settings(
        max_new_tokens, 1.0 if greedy else temperature, top_p, top_k, stop_S, greedy
    )
    num, extras = len(prompt_index), {}
    if uniform_NT is None:
        uniform_NT = uniforms(seed, range(num), 0 if greedy else max_new_tokens)
    columns = _columns(uniform_NT.to(model.device), max_new_tokens)
    prompts, fast = [prompt_ids[p] for p in prompt_index], engine_for(model) if engine else None
    with evaluating(model), torch.no_grad():
        if fast is None:
            _waves(model, prompts, settings, columns, max_rows)
            if watch is not None:
                watch(range(num), rows_of(columns.token_ids_NT, columns.length_N))
        else:
            how = engine_settings(
                max_new_tokens,
                settings.temperature,
                top_p,
                top_k,
                tuple(stop_S.tolist()),
                greedy,
                *asked_of_engine(needs, topk, model.config.vocab_size),
            )
            filled = fast.fill(model, prompts, columns.uniform_NT, how, max_rows, watch=watch)
            token_ids_NT, logp_NT, entropy_NT, length_N = (
                column[:-1].clone() for column in filled[:4]
            )
            columns = _Columns(token_ids_NT, logp_NT, entropy_NT, length_N, columns.uniform_NT)
            extras = engine_extras(filled, needs, columns.length_N)
    return _finished(columns, prompt_index, pad_id, stop_S)._replace(**extras)


def _waves(
    model: PreTrainedModel,
    prompts: list[Sequence[int]],
    settings: _Settings,
    columns: _Columns,
    max_rows: int,
) -> None:
    """The generic path, for any causal LM with a cache."""
    parts = backbone(model)
    check_cache(parts.decoder, _arguments(type(parts.decoder)))
    # waves of similar prompt length need little padding; a row's own stream makes the order
    # immaterial
    order = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
    for start in range(0, len(order), max_rows):
        rows = order[start : start + max_rows]
        _wave(model, parts, rows, [prompts[row] for row in rows], settings, columns)


def _wave(
    model: PreTrainedModel,
    parts: Backbone,
    rows: list[int],
    prompts: list[Sequence[int]],
    settings: _Settings,
    columns: _Columns,
) -> None:
    running, logits_BV = _prefill(model, parts, rows, prompts, settings)
    for t in range(settings.max_new_tokens):
        drawn = _pick(logits_BV, columns, running.row_B, t, settings)
        _write(columns, running, t, drawn)
        token_B = drawn.token_N
        running = running._replace(alive_B=running.alive_B & ~torch.isin(token_B, settings.stop_S))
        if t + 1 == settings.max_new_tokens:
            return
        if model.device.type == "cpu" or t % SYNC_STEPS == SYNC_STEPS - 1:
            num_alive = int(running.alive_B.sum())
            if num_alive == 0:
                return
            if num_alive <= COMPACT_FRAC * len(token_B):
                keep_R = compaction(running.alive_B)
                running, token_B = _compacted(running, keep_R), token_B[keep_R]
        running, logits_BV = _step(model, parts, running, token_B, settings)


def _prefill(
    model: PreTrainedModel,
    parts: Backbone,
    rows: list[int],
    prompts: list[Sequence[int]],
    settings: _Settings,
) -> tuple[_Running, Tensor]:
    """Read each distinct prompt once, left-padded, then give every rollout a row; also the logits
    of its first token.
    """
    distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    width = max(len(prompt) for prompt in distinct)
    ids_PL = torch.tensor(
        [[*[0] * (width - len(prompt)), *prompt] for prompt in distinct], device=model.device
    )
    length_P = torch.tensor([len(prompt) for prompt in distinct], device=model.device)
    position_PL = torch.arange(width, device=model.device) - (width - length_P)[:, None]
    mask_PL = position_PL >= 0 if min(map(len, distinct)) < width else None
    cache = DynamicCache(config=model.config)
    inputs = _inputs(parts, ids_PL, mask_PL, position_PL.clamp_min(0), cache)
    logits_PV = last_logits(model, parts, inputs, settings.temperature)
    number = {prompt: p for p, prompt in enumerate(distinct)}
    pick_B = torch.tensor([number[tuple(prompt)] for prompt in prompts], device=model.device)
    running = _Running(
        row_B=torch.tensor(rows, device=model.device),
        alive_B=torch.ones(len(rows), dtype=torch.bool, device=model.device),
        position_B=length_P[pick_B] - 1,
        mask_BL=None if mask_PL is None else mask_PL[pick_B],
        cache=spread(cache, pick_B),
    )
    return running, logits_PV[pick_B]


def _step(
    model: PreTrainedModel, parts: Backbone, running: _Running, token_B: Tensor, settings: _Settings
) -> tuple[_Running, Tensor]:
    mask_BL = (
        None
        if running.mask_BL is None
        else torch.nn.functional.pad(running.mask_BL, (0, 1), value=True)
    )
    running = running._replace(position_B=running.position_B + 1, mask_BL=mask_BL)
    inputs = _inputs(parts, token_B[:, None], mask_BL, running.position_B[:, None], running.cache)
    return running, last_logits(model, parts, inputs, settings.temperature)


def _compacted(running: _Running, keep_R: Tensor) -> _Running:
    running.cache.reorder_cache(keep_R)
    return _Running(
        row_B=running.row_B[keep_R],
        alive_B=running.alive_B[keep_R],
        position_B=running.position_B[keep_R],
        mask_BL=None if running.mask_BL is None else running.mask_BL[keep_R],
        cache=running.cache,
    )


def _inputs(
    parts: Backbone, ids_BL: Tensor, mask_BL: Tensor | None, position_BL: Tensor, cache: Any
) -> dict[str, Any]:
    inputs = {
        "input_ids": ids_BL,
        "attention_mask": mask_BL,
        "past_key_values": cache,
        "use_cache": True,
    }
    # models with relative positions (ALiBi) read them off the attention mask instead
    return inputs | (
        {"position_ids": position_BL} if "position_ids" in _arguments(type(parts.decoder)) else {}
    )


@functools.cache
def _arguments(decoder: type) -> frozenset[str]:
    return frozenset(inspect.signature(decoder.forward).parameters)


def _pick(logits_BV: Tensor, columns: _Columns, row_B: Tensor, t: int, settings: _Settings) -> Draw:
    if settings.greedy:
        return argmax(logits_BV)
    return draw(
        truncate(logits_BV, top_k=settings.top_k, top_p=settings.top_p),
        columns.uniform_NT[row_B, t],
    )


def _write(columns: _Columns, running: _Running, t: int, drawn: Draw) -> None:
    # rows that stopped run on until the next compaction; what they draw is cut off by length_N
    row_B = running.row_B
    columns.token_ids_NT[row_B, t] = drawn.token_N
    columns.sampler_logp_NT[row_B, t] = drawn.logp_N.float()
    columns.entropy_NT[row_B, t] = drawn.entropy_N.float()
    columns.length_N[row_B] += running.alive_B


def _columns(uniform_NT: Tensor, num: int) -> _Columns:
    n, device = len(uniform_NT), uniform_NT.device
    return _Columns(
        token_ids_NT=torch.zeros(n, num, dtype=torch.long, device=device),
        sampler_logp_NT=torch.zeros(n, num, device=device),
        entropy_NT=torch.zeros(n, num, device=device),
        length_N=torch.zeros(n, dtype=torch.long, device=device),
        uniform_NT=uniform_NT,
    )


def _finished(columns: _Columns, prompt_index: list[int], pad_id: int, stop_S: Tensor) -> Rollouts:
    width = int(columns.length_N.max())
    mask_NT = torch.arange(width, device=columns.length_N.device) < columns.length_N[:, None]
    token_ids_NT = columns.token_ids_NT[:, :width].masked_fill(~mask_NT, pad_id)
    sampler_logp_NT = columns.sampler_logp_NT[:, :width] * mask_NT
    check_logits(sampler_logp_NT)
    is_stop_N = torch.isin(token_ids_NT.gather(1, columns.length_N[:, None] - 1)[:, 0], stop_S)
    return Rollouts(
        prompt_index_N=torch.tensor(prompt_index, device=mask_NT.device),
        token_ids_NT=token_ids_NT,
        mask_NT=mask_NT,
        sampler_logp_NT=sampler_logp_NT,
        entropy_NT=columns.entropy_NT[:, :width] * mask_NT,
        stop_reason=tuple("stop" if is_stop else "length" for is_stop in is_stop_N.tolist()),
    )


def check_logits(sampler_logp_NT: Tensor) -> None:
    """Log-probs are finite, or the model has diverged."""
    bad_N = ~torch.isfinite(sampler_logp_NT).all(1)
    if bad_N.any():
        raise ValueError(
            f"sample: the model's logits are not finite in row {int(bad_N.nonzero()[0])}"
            f" ({int(bad_N.sum())} of {len(bad_N)} rows). The weights have diverged: lower the"
            " learning rate or go back to an earlier checkpoint."
        )
