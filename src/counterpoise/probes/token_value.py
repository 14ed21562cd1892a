"""Is the credit of a token its true advantage, V(prefix + token) - V(prefix)?

V is the mean reward of fresh completions by the policy that sampled. A value before a token is a
mean over what may follow, so the advantage is (1 - p) (V(prefix + token) - V(prefix + another)),
with p the token's probability and another token drawn from the rest. Sampling that has (1 - p) of
the noise of a plain difference. Two halves of the completions, independent of each other, give two
estimates of each advantage and so the noise. Axes: M tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from counterpoise.errors import check_number
from counterpoise.maths.reduce import derived_seed, groups, seeded_generator
from counterpoise.policy import measure
from counterpoise.policy.precision import autocast
from counterpoise.probes.fresh import scene_credits
from counterpoise.probes.localisation import first_error_tokens
from counterpoise.probes.output import Columns, Drawing, Frame, Output, join_frames, read
from counterpoise.probes.references import UNIFORM, reference_weights
from counterpoise.probes.scene import Scene
from counterpoise.probes.sheet import Sheet, merged, number_text, ordered, rule_figure
from counterpoise.probes.token_draw import SURE, draw_tokens, strata
from counterpoise.probes.token_numbers import MEASURES, token_numbers
from counterpoise.probes.value import completion_rewards, response_rewards
from counterpoise.sampling.draw import draw, truncate
from counterpoise.types import TokenBatch

PARTS = 12  # tables of values: what an interrupted probe loses is at most one of them
KEYS = ["group", "row", "position"]


def probe(
    scene: Scene,
    output: Output,
    *,
    tokens: int = 240,
    samples: int = 32,
    band: float = 0.05,
    seed: int = 0,
    methods: str = "all",
) -> None:
    """``tokens`` drawn tokens that need completions, ``samples`` completions with each token and as
    many with another one; a token that changes the value by less than ``band`` changes nothing.
    """
    check_number("probe token_value", above=0, band=band)
    if samples < 4 or samples % 2:
        raise ValueError(f"probe token_value: samples must be even and from 4 on, got {samples}.")
    drawn = read(output.table("tokens", lambda: scene_tokens(scene, tokens, seed, band)))
    output.table("credits", lambda: credit_columns(scene, drawn, methods))
    for part in output.track(range(PARTS), "parts of the completions"):
        chosen = drawn.iloc[part::PARTS]
        output.table(
            f"values_{part:02d}", lambda c=chosen, k=part: value_columns(scene, c, samples, seed, k)
        )


def scene_tokens(scene: Scene, num: int, seed: int, band: float) -> Columns:
    """The tokens to value."""
    batch = scene.collected.batch
    first_error_N = first_error_tokens(scene.policy, scene.task, scene.collected)
    generator = seeded_generator(seed, scene.batch_number, "token_value")
    drawn = draw_tokens(batch, strata(batch, first_error_N), num, generator)
    return drawn | {"band": [band] * len(drawn["row"])}


def credit_columns(scene: Scene, drawn: Frame, methods: str) -> Columns:
    """Credit of the drawn tokens under each method and reference."""
    return credits_at(scene.collected.batch, scene_credits(scene, methods), drawn)


def credits_at(batch: TokenBatch, credits: Mapping[str, Tensor], drawn: Frame) -> Columns:
    """Credit at the tokens (row, position), and its mean over their rollouts; the references too,
    as weights of reward - group mean.
    """
    by_prompt = groups(batch.group_N)
    gain_N1 = (batch.reward_N - by_prompt.mean(batch.reward_N)[by_prompt.index_N])[:, None]
    columns = {f"rule/{label}": credit_NT for label, credit_NT in credits.items()}
    columns |= {
        f"reference/{name}": gain_N1 * weight_NT
        for name, weight_NT in reference_weights(batch).items()
    }
    row, position = (torch.tensor(drawn[name].to_numpy()) for name in ("row", "position"))
    out: Columns = {name: drawn[name].to_numpy() for name in KEYS}
    for name, credit_NT in columns.items():
        mean_N = (credit_NT * batch.mask_NT).double().sum(1) / batch.length_N
        out[name] = credit_NT.cpu()[row, position].double().numpy()
        out[f"mean/{name}"] = mean_N.cpu()[row].numpy()
    return out


def compare_values(
    batch: TokenBatch,
    credits: Mapping[str, Tensor],
    values: Mapping[str, ArrayLike],
    *,
    band: float = 0.05,
) -> dict[str, Any]:
    """Per rule: does the credit of tokens agree with their advantage? The numbers of the probe.

    Args:
        batch: rollouts.
        credits: label -> credit_NT.
        values: columns with one entry per valued token: ``row`` and ``position`` of the token, two
            independent estimates ``half_1`` and ``half_2`` of its advantage, the standard error
            ``se`` of their mean, and ``weight``, one over the chance of being drawn (1 if absent).
        band: a token that changes the value by less changes nothing.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6], [5, 7]], group=[0, 0], reward=[1.0, 0.0], sampler_logp=[[-0.1, -0.7]] * 2
    ... )
    >>> half = [0.0, 0.5, 0.0, -0.5]  # the second token decides
    >>> values = {"row": [0, 0, 1, 1], "position": [0, 1, 0, 1], "se": [0.01] * 4}
    >>> credit_NT = torch.tensor([[0.0, 1.0], [0.0, -1.0]])
    >>> numbers = compare_values(
    ...     batch, {"mine": credit_NT}, values | {"half_1": half, "half_2": half}
    ... )
    >>> numbers["rules"]["mine"]["cosine"]["mean"]
    1.0
    >>> numbers["references"]["uniform"]["cosine"]["mean"]
    0.707107
    """
    import pandas as pd

    drawn = pd.DataFrame({"weight": 1.0, "band": band} | dict(values))
    drawn["group"] = batch.group_N.cpu().numpy()[drawn["row"].to_numpy()]
    drawn["value"] = (drawn["half_1"] + drawn["half_2"]) / 2
    credit = pd.DataFrame(credits_at(batch, credits, drawn)).drop(columns=KEYS)
    return rule_numbers(drawn.join(credit))


def value_columns(scene: Scene, drawn: Frame, samples: int, seed: int, part: int) -> Columns:
    """Advantage of each token: both halves, their mean and its standard error; 0 for sure tokens.

    Tokens at one node of the prefix trie are one token: they are valued once.
    """
    ids_NT = scene.collected.batch.token_ids_NT.tolist()
    is_sure = (1 - drawn["probability"] <= SURE).to_numpy()
    places = list(zip(drawn["row"].tolist(), drawn["position"].tolist()))
    nodes = [(group, *ids_NT[r][: t + 1]) for group, (r, t) in zip(drawn["group"], places)]
    first = {node: k for k, node in reversed(list(enumerate(nodes))) if not is_sure[k]}
    chosen = sorted(first.values())
    known = dict(zip(chosen, node_values(scene, [places[k] for k in chosen], samples, seed, part)))
    rows = [(0.0,) * 5 if is_sure[k] else known[first[node]] for k, node in enumerate(nodes)]
    names = ("half_1", "half_2", "value", "se", "with_token")
    columns = np.array(rows, float).reshape(-1, len(names)).T
    return {name: drawn[name].to_numpy() for name in KEYS} | dict(zip(names, columns))


def node_values(
    scene: Scene, places: list[tuple[int, int]], samples: int, seed: int, part: int
) -> list[tuple[float, ...]]:
    """(half, half, advantage, standard error, value with the token) of tokens (row, position)."""
    if not places:
        return []
    ids_NT = scene.collected.batch.token_ids_NT.tolist()
    row = [r for r, _ in places]
    others, rest_M = other_tokens(scene, places, samples, derived_seed(seed, part, "others"))
    prefixes = [ids_NT[r][:t] for r, t in places]
    taken = [[*prefix, ids_NT[r][t]] for prefix, (r, t) in zip(prefixes, places)]
    away = [[*prefix, token] for prefix, tokens in zip(prefixes, others) for token in tokens]
    seeds = [derived_seed(seed, part, name) for name in ("with", "without")]
    with_MS = rewards(scene, row, taken, samples, seeds[0])
    without_MS = rewards(scene, [r for r in row for _ in range(samples)], away, 1, seeds[1])
    return advantages(
        with_MS, without_MS.reshape(-1, samples), rest_M, scene.collected.batch.reward_N
    )


def advantages(
    with_MS: np.ndarray, without_MS: np.ndarray, rest_M: np.ndarray, reward_N: Tensor
) -> list[tuple[float, ...]]:
    """Halves, mean and standard error of (1 - p) (with - without).

    The variance of each side is taken with the batch's lowest and highest reward added to its
    completions, so that completions that all earn the same are not without noise.
    """
    half = with_MS.shape[1] // 2
    halves = [
        rest_M * (with_MS[:, s].mean(1) - without_MS[:, s].mean(1))
        for s in (slice(None, half), slice(half, None))
    ]
    ends = np.tile([float(reward_N.min()), float(reward_N.max())], (len(with_MS), 1))
    variance = sum(np.hstack([side, ends]).var(1, ddof=1) for side in (with_MS, without_MS))
    se_M = rest_M * np.sqrt(variance / with_MS.shape[1])
    return list(zip(*halves, (halves[0] + halves[1]) / 2, se_M, with_MS.mean(1)))


def other_tokens(
    scene: Scene, places: list[tuple[int, int]], num: int, seed: int
) -> tuple[list[list[int]], np.ndarray]:
    """``num`` other tokens for each place, drawn from the sampling distribution without the token
    that is there, and that distribution's probability of all others, 1 - p.

    Each half of the draws is systematic: equally spaced quantiles from a random start.
    """
    batch, settings, policy = scene.collected.batch, scene.config.rollouts, scene.policy
    ids_NT, rng = batch.token_ids_NT.tolist(), np.random.default_rng(seed)
    others, rest = [], []
    for r, t in places:
        token = torch.tensor([[ids_NT[r][t]]], device=batch.mask_NT.device)
        with autocast(policy.model):
            columns = measure(
                policy.model,
                [scene.collected.prompt_ids[r] + ids_NT[r][:t]],
                token,
                torch.ones_like(token).bool(),
                {"topk_ids_NTK", "topk_logp_NTK"},
                temperature=settings.temperature,
                topk=policy.model.config.vocab_size,
            )
        ids_V, logp_V = columns["topk_ids_NTK"][0, 0].cpu(), columns["topk_logp_NTK"][0, 0].cpu()
        logits_1V = truncate(logp_V.double()[None], top_k=settings.top_k, top_p=settings.top_p)
        is_token_V = ids_V == ids_NT[r][t]
        rest.append(1 - float(logits_1V.softmax(-1)[0, is_token_V].sum()))
        start = rng.random((2, 1))
        uniform = torch.from_numpy(((np.arange(num // 2) + start) / (num // 2)).ravel())
        left_SV = logits_1V.masked_fill(is_token_V, -torch.inf).expand(num, -1)
        others.append(ids_V[draw(left_SV, uniform).token_N].tolist())
    return others, np.array(rest)


def rewards(
    scene: Scene, row: list[int], prefixes: list[list[int]], samples: int, seed: int
) -> np.ndarray:
    """Rewards of completions, [prefixes, samples]; a prefix that is a whole answer (a stop token,
    the length limit) is graded as it is.
    """
    limit, stops = scene.config.rollouts.max_new_tokens, scene.policy.stop_ids
    is_whole = np.array([len(p) >= limit or p[-1] in stops for p in prefixes])
    out = np.zeros((len(prefixes), samples))
    for chosen, fill in ((is_whole, True), (~is_whole, False)):
        at = chosen.nonzero()[0].tolist()
        if at:
            rows, texts = [row[k] for k in at], [prefixes[k] for k in at]
            out[at] = (
                response_rewards(scene, rows, texts)[:, None]
                if fill
                else completion_rewards(scene, rows, texts, samples, seed)
            )
    return out


def summarise(tables: dict[str, Frame]) -> dict[str, Any]:
    """Numbers of every rule, of one batch or of several."""
    values = join_frames([tables[name] for name in sorted(tables) if name.startswith("values_")])
    return rule_numbers(tables["tokens"].merge(values, on=KEYS).merge(tables["credits"], on=KEYS))


def rule_numbers(table: Frame) -> dict[str, Any]:
    """Numbers from a table of tokens with their values and credits."""
    sides = {
        side: {
            name.removeprefix(f"{side}/"): (table[name], table[f"mean/{name}"])
            for name in table
            if name.startswith(f"{side}/")
        }
        for side in ("rule", "reference")
    }
    return token_numbers(table, sides["rule"], sides["reference"])


def sheet(numbers: dict[str, Any]) -> Sheet:
    """What the terminal shows: rules by their cosine, references behind them."""
    truth = numbers["truth"]
    rows = ordered(numbers["rules"], numbers["references"], "cosine")
    notes = [
        f"{truth['num_tokens']} tokens drawn, worth {truth['effective_tokens']:.0f} of equal"
        f" weight; {truth['num_decisive']} are decisive; reliability of the ranks"
        f" {number_text(truth['reliability'])}",
        f"{number_text(truth['null_tokens'])} of all tokens change the value by less than"
        f" {truth['band']:g}; (references): (reward - group mean) x the signal",
        *truth["notes"],
    ]
    lines = [
        [label, *(number_text(one.get(name)) for name in MEASURES)] for label, one in rows.items()
    ]
    return Sheet(notes, ["rule", *MEASURES.values()], merged(lines))


def figure(numbers: dict[str, Any]) -> Drawing:
    """Three measures of every rule; dashed: the control."""
    names = ("cosine", "rank_correlation", "auroc")
    return rule_figure(
        "Credit against the true advantage of tokens",
        ordered(numbers["rules"], numbers["references"], "cosine"),
        {name: MEASURES[name] for name in names},
        numbers["references"].get(UNIFORM, {}),
    )
