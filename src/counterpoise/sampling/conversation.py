"""Rollouts of several turns: the model draws a turn, the other side answers, the row goes on.

A row is prompt, turn, answer, turn, answer ... What the model drew is never tokenised again, and
answers are put in as tokens. The draw at token t of a row depends on (seed, row, t) alone, so that
neither the batch nor the time an answer takes changes a token.

Axes: N rollouts, T tokens after the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.policy.backbone import evaluating
from counterpoise.sampling.checks import check_prompts, check_settings
from counterpoise.sampling.draw import uniforms
from counterpoise.sampling.engine import engine_for
from counterpoise.sampling.sample import Rollouts, check_logits, sample
from counterpoise.sampling.slots import Answer, Dialogue, Settings, asked_of_engine, engine_extras


def converse(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    dialogue: Dialogue,
    *,
    max_tokens: int,
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
) -> Rollouts:
    """One conversation per prompt.

    The result is that of ``sample`` with the other side's tokens in place: ``mask_NT`` is True on
    all tokens of a row, its own and the other's (the dialogue knows which are which), and
    ``sampler_logp_NT``, ``entropy_NT`` mean nothing on the other's. ``stop_reason`` is that of a
    row's last turn.

    Args:
        prompt_ids: one per row; rows of one prompt repeat it.
        dialogue: the other side, with the limits of every turn.
        max_tokens: of a row after its prompt, answers included.
        engine: False samples every turn afresh from the prompt and all that was said.
    """
    greedy = temperature == 0
    check_settings({"max_tokens": max_tokens, "max_rows": max_rows}, temperature, top_p, top_k)
    check_prompts(model, prompt_ids, 1)
    uniform_NT = uniforms(seed, range(len(prompt_ids)), 0 if greedy else max_tokens)
    fast = engine_for(model) if engine else None
    how = Settings(
        max_tokens,
        1.0 if greedy else temperature,
        top_p,
        top_k,
        tuple(sorted(set(stop_ids))),
        greedy,
        *asked_of_engine(needs, topk, model.config.vocab_size),
        has_turns=True,
    )
    if fast is None:
        how = how._replace(temperature=temperature)
        return _turn_by_turn(model, prompt_ids, dialogue, uniform_NT, how, pad_id, max_rows)
    with evaluating(model), torch.no_grad():
        uniform_NT = uniform_NT.to(model.device)
        filled = fast.fill(model, prompt_ids, uniform_NT, how, max_rows, dialogue)
        token_ids_NT, logp_NT, entropy_NT, length_N = (column[:-1].clone() for column in filled[:4])
        extras = engine_extras(filled, needs, length_N)
    rollouts = _rollouts(token_ids_NT, logp_NT, entropy_NT, length_N, stop_ids, pad_id)
    return rollouts._replace(**extras)


def _rollouts(
    token_ids_NT: Tensor,
    logp_NT: Tensor,
    entropy_NT: Tensor,
    length_N: Tensor,
    stop_ids: Sequence[int],
    pad_id: int,
) -> Rollouts:
    width, device = int(length_N.max()), length_N.device
    mask_NT = torch.arange(width, device=device) < length_N[:, None]
    token_ids_NT = token_ids_NT[:, :width].masked_fill(~mask_NT, pad_id)
    logp_NT, entropy_NT = (column[:, :width] * mask_NT for column in (logp_NT, entropy_NT))
    check_logits(logp_NT)
    last_N = token_ids_NT.gather(1, length_N[:, None] - 1)[:, 0].tolist()
    return Rollouts(
        prompt_index_N=torch.arange(len(mask_NT), device=device),
        token_ids_NT=token_ids_NT,
        mask_NT=mask_NT,
        sampler_logp_NT=logp_NT,
        entropy_NT=entropy_NT,
        stop_reason=tuple("stop" if token in stop_ids else "length" for token in last_N),
    )


def _turn_by_turn(
    model: PreTrainedModel,
    prompt_ids: Sequence[Sequence[int]],
    dialogue: Dialogue,
    uniform_NT: Tensor,
    settings: Settings,
    pad_id: int,
    max_rows: int,
) -> Rollouts:
    """Every turn is sampled from the prompt and all that was said: for models that the engine does
    not know, and the law that the engine must obey.
    """
    num, size = len(prompt_ids), (len(prompt_ids), settings.max_new_tokens)
    token_ids_NT, length_N = torch.zeros(size, dtype=torch.long), torch.zeros(num, dtype=torch.long)
    logp_NT, entropy_NT = torch.zeros(size), torch.zeros(size)
    active = [Answer(row, [], dialogue.first_limit(row)) for row in range(num)]
    num_open = num
    while num_open:
        for answer in active:
            given, start = answer.token_ids or [], int(length_N[answer.row])
            token_ids_NT[answer.row, start : start + len(given)] = torch.tensor(
                given, dtype=torch.long
            )
            length_N[answer.row] += len(given)
        # rows with equal room for the next turn are sampled together
        rooms = [answer.limit - int(length_N[answer.row]) for answer in active]
        for room in sorted(set(rooms)):
            rows = [answer.row for answer, own in zip(active, rooms) if own == room]
            starts = length_N[rows].tolist()
            turn = sample(
                model,
                [
                    [*prompt_ids[row], *token_ids_NT[row, :start].tolist()]
                    for row, start in zip(rows, starts)
                ],
                max_new_tokens=room,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k,
                stop_ids=settings.stop_ids,
                pad_id=pad_id,
                seed=0,
                max_rows=max_rows,
                engine=False,
                uniform_NT=torch.stack(
                    [uniform_NT[row, start : start + room] for row, start in zip(rows, starts)]
                ),
            )
            for k, (row, start) in enumerate(zip(rows, starts)):
                end = start + int(turn.mask_NT[k].sum())
                part = slice(start, end)
                token_ids_NT[row, part] = turn.token_ids_NT[k, : end - start].cpu()
                logp_NT[row, part] = turn.sampler_logp_NT[k, : end - start].cpu()
                entropy_NT[row, part] = turn.entropy_NT[k, : end - start].cpu()
                length_N[row] = end
                dialogue.hear(row, token_ids_NT[row, :end].tolist())
        answers = dialogue.answers(wait=True)
        active = [answer for answer in answers if answer.token_ids is not None]
        num_open -= len(answers) - len(active)
    token_ids_NT, length_N = token_ids_NT.to(model.device), length_N.to(model.device)
    logp_NT, entropy_NT = logp_NT.to(model.device), entropy_NT.to(model.device)
    return _rollouts(token_ids_NT, logp_NT, entropy_NT, length_N, settings.stop_ids, pad_id)
