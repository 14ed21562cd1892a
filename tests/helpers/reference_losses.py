"""Losses as plain loops over rollouts and tokens, with hand-made derivatives: twins of
counterpoise.losses.

A twin takes a Case (ragged lists) and parameters and returns for every token (value, coef, ratio,
is_clipped), coef being minus the derivative of the value by the token's own log-prob.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch


class Case(NamedTuple):
    trainer: list[list[float]]
    sampler: list[list[float]]
    ref: list[list[float]]
    credit: list[list[float]]
    advantage: list[float]
    reward: list[float]
    group: list[int]
    ref_kl: list[list[float]]
    scale: list[list[float]]
    rollout_scale: list[float]


def case_of(trainer_logp_NT, rows) -> Case:
    """Cut the padding off."""
    lengths = [sum(row) for row in rows.mask_NT.tolist()]

    def ragged(value_NT):
        return [row[:n] for row, n in zip(value_NT.tolist(), lengths)]

    ref_NT = rows.sampler_logp_NT if rows.ref_logp_NT is None else rows.ref_logp_NT
    return Case(
        ragged(trainer_logp_NT),
        ragged(rows.sampler_logp_NT),
        ragged(ref_NT),
        ragged(rows.credit_NT),
        rows.advantage_N.tolist(),
        rows.reward_N.tolist(),
        rows.group_N.tolist(),
        ragged(torch.zeros_like(ref_NT) if rows.ref_kl_NT is None else rows.ref_kl_NT),
        ragged(rows.scale_NT),
        [1.0] * len(lengths) if rows.rollout_scale_N is None else rows.rollout_scale_N.tolist(),
    )


def log_ratios(case: Case) -> list[list[float]]:
    return [[a - b for a, b in zip(p, q)] for p, q in zip(case.trainer, case.sampler)]


def bounded(log_ratio: float) -> float:
    """exp, at most e^20: products of ratios over a rollout end there, as in the losses."""
    return math.exp(min(log_ratio, 20.0))


def per_token(case: Case, one) -> list[list[tuple]]:
    """``one(credit, log ratio, logp, ref)`` on each token."""
    out = []
    for i, row in enumerate(log_ratios(case)):
        out.append(
            [
                one(case.credit[i][t], x, case.trainer[i][t], case.ref[i][t])
                for t, x in enumerate(row)
            ]
        )
    return out


def ppo(credit: float, ratio: float, low: float, high: float, ceiling: float) -> tuple:
    """-min(r c, clip(r) c), for c < 0 at most -ceiling c, written as PPO writes it."""
    cut = min(max(ratio, low), high)
    value = -min(ratio * credit, cut * credit)
    is_cut = cut * credit < ratio * credit
    if credit < 0 and value > -ceiling * credit:
        value, is_cut = -ceiling * credit, True
    return value, 0.0 if is_cut else credit * ratio, ratio, is_cut


def reinforce(case):
    return per_token(case, lambda c, x, logp, ref: (-c * logp, c, math.exp(x), False))


def clipped(case, clip_low=0.2, clip_high=0.2, dual_clip=math.inf):
    return per_token(
        case, lambda c, x, logp, ref: ppo(c, math.exp(x), 1 - clip_low, 1 + clip_high, dual_clip)
    )


def dual_clip(case, clip_low=0.2, clip_high=0.28, dual_clip=10.0):
    return clipped(case, clip_low, clip_high, dual_clip)


def contrastive(case, clip_low=0.2, clip_high=10.0):
    def one(c, x, logp, ref):
        r = math.exp(x)
        if c > 0:
            return (
                -c * min(r, 1 + clip_high),
                c * r if r <= 1 + clip_high else 0.0,
                r,
                r > 1 + clip_high,
            )
        return (
            -c * max(r, 1 - clip_low),
            c * r if r >= 1 - clip_low else 0.0,
            r,
            c < 0 and r < 1 - clip_low,
        )

    return per_token(case, one)


def symmetric_clip(case, clip=0.2):
    def one(c, x, logp, ref):
        r = math.exp(x)
        inside = 1 - clip <= r <= 1 + clip
        return -c * min(max(r, 1 - clip), 1 + clip), c * r if inside else 0.0, r, not inside

    return per_token(case, one)


def detached_ratio(case, clip_low=math.inf, clip_high=4.0):
    def one(c, x, logp, ref):
        r = math.exp(x)
        weight = min(max(r, 1 - clip_low), 1 + clip_high)
        return -weight * c * logp, weight * c, r, weight != r

    return per_token(case, one)


def soft_gate(case, tau_pos=1.0, tau_neg=1.05):
    def one(c, x, logp, ref):
        r, tau = math.exp(x), tau_pos if c > 0 else tau_neg
        s = 1 / (1 + math.exp(-tau * (r - 1)))
        return -c * 4 * s / tau, c * 4 * s * (1 - s) * r, r, False

    return per_token(case, one)


def sequence_ratio(case, clip_low=3e-4, clip_high=4e-4, mean=True):
    out = []
    for i, row in enumerate(log_ratios(case)):
        s = bounded(sum(row) / (len(row) if mean else 1))
        out.append([ppo(c, s, 1 - clip_low, 1 + clip_high, math.inf) for c in case.credit[i]])
    return out


def geometric(case, clip_low=0.4, clip_high=0.4):
    out = []
    for i, row in enumerate(log_ratios(case)):
        kept = []
        for c, x in zip(case.credit[i], row):
            upper, lower = (math.inf if c < 0 else clip_high), (-math.inf if c > 0 else -clip_low)
            kept.append(min(max(x, lower), upper))
        s = math.exp(sum(kept) / len(kept))
        cut = [c != 0 and x != k for c, x, k in zip(case.credit[i], row, kept)]
        out.append(
            [
                (-c * s, 0.0 if is_cut else c * s, s, is_cut)
                for c, is_cut in zip(case.credit[i], cut)
            ]
        )
    return out


def cumulative(case, clip_low=0.025, clip_high=0.05, dual_clip=0.05, power=0.5):
    out = []
    for i, row in enumerate(log_ratios(case)):
        tokens = []
        for t in range(1, len(row) + 1):
            total, grown = sum(row[:t]), t**power
            bounds = (math.exp(bound * grown) for bound in (-clip_low, clip_high, dual_clip))
            value, coef, ratio, is_cut = ppo(case.credit[i][t - 1], bounded(total), *bounds)
            tokens.append((value, 0.0 if total > 20 else coef, ratio, is_cut))
        out.append(tokens)
    return out


def softmax(values: list[float]) -> list[float]:
    largest = max(values)
    parts = [math.exp(v - largest) for v in values]
    return [part / sum(parts) for part in parts]


def target(case, temperature=1.0):
    pull = [0.0] * len(case.group)
    for g in set(case.group):
        members = [i for i, other in enumerate(case.group) if other == g]
        rewards = [case.reward[i] for i in members]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
        u = [0.0 if max(rewards) == min(rewards) else (r - mean) / std for r in rewards]
        q = softmax([sum(case.sampler[i]) + tilt / temperature for i, tilt in zip(members, u)])
        p = softmax([sum(case.trainer[i]) for i in members])
        for i, to, at in zip(members, q, p):
            pull[i] = to - at
    return [
        [(-pull[i] * logp, pull[i], math.exp(x), False) for logp, x in zip(case.trainer[i], row)]
        for i, row in enumerate(log_ratios(case))
    ]


def dfpo_weights(case, transform="min", weight="geometric_mean", length="outside") -> list[float]:
    w = []
    for row in log_ratios(case):
        value = bounded(sum(row) if weight == "product" else sum(row) / len(row))
        w.append(value / len(row) if length == "inside" else value)
    out = list(w)
    for g in set(case.group):
        members = [i for i, other in enumerate(case.group) if other == g]
        a = case.advantage
        squared = sum(a[i] ** 2 for i in members)
        for i in members:
            if transform == "min":
                out[i] = min(w[j] for j in members)
            elif transform == "orth" and squared > 0:
                out[i] = w[i] - sum(a[j] * w[j] for j in members) / squared * a[i]
    return out


def dfpo(case, **params):
    w = dfpo_weights(case, **params)
    out = []
    for i, row in enumerate(log_ratios(case)):
        out.append(
            [
                (-c * w[i] * logp, c * w[i], math.exp(x), False)
                for c, logp, x in zip(case.credit[i], case.trainer[i], row)
            ]
        )
    return out


def covariances(case) -> list[list[float]]:
    logps, credits = (
        [v for row in case.trainer for v in row],
        [v for row in case.credit for v in row],
    )
    logp_mean, credit_mean = sum(logps) / len(logps), sum(credits) / len(credits)
    return [
        [(p - logp_mean) * (c - credit_mean) for p, c in zip(ps, cs)]
        for ps, cs in zip(case.trainer, case.credit)
    ]


def clip_cov_band(case, clip_low=0.2, clip_high=0.2, low=1.0, high=5.0) -> set[tuple[int, int]]:
    """The tokens among which Clip-Cov draws."""
    plain, band = clipped(case, clip_low, clip_high), set()
    for i, row in enumerate(covariances(case)):
        band |= {(i, t) for t, cov in enumerate(row) if low < cov < high and not plain[i][t][3]}
    return band


def clip_cov(case, clip_low=0.2, clip_high=0.2, fraction=2e-4, low=1.0, high=5.0):
    """With a fraction of 1 the whole band is dropped and nothing is left to chance."""
    assert fraction == 1
    out, band = (
        clipped(case, clip_low, clip_high),
        clip_cov_band(case, clip_low, clip_high, low, high),
    )
    return [
        [(0.0, 0.0, one[2], True) if (i, t) in band else one for t, one in enumerate(row)]
        for i, row in enumerate(out)
    ]


def kl_cov(case, fraction=2e-4, coef=1.0):
    places = [(cov, i, t) for i, row in enumerate(covariances(case)) for t, cov in enumerate(row)]
    places.sort(key=lambda place: -place[0])
    top = {(i, t) for _, i, t in places[: max(int(fraction * len(places)), 1)]}
    out = []
    for i, row in enumerate(log_ratios(case)):
        tokens = []
        for t, (c, x) in enumerate(zip(case.credit[i], row)):
            penalty = coef if (i, t) in top else 0.0
            slope = 0.0 if x == 0 else math.copysign(1, x)
            tokens.append(
                (
                    -c * math.exp(x) + penalty * abs(x),
                    c * math.exp(x) - penalty * slope,
                    math.exp(x),
                    False,
                )
            )
        out.append(tokens)
    return out


def kl(case, estimator="k3", coef=0.04):
    def one(c, x, logp, ref):
        gap = ref - logp
        value, slope = {
            "k1": (-gap, 1),
            "k2": (gap**2 / 2, -gap),
            "k3": (math.exp(gap) - 1 - gap, 1 - math.exp(gap)),
        }[estimator]
        return coef * value, -coef * slope, math.exp(x), False

    return per_token(case, one)


def implied_value(case, beta=5e-4):
    out = []
    for i, row in enumerate(case.trainer):
        value = 0.0
        for logp, ref, exact in zip(row, case.ref[i], case.ref_kl[i]):
            value += beta * (logp - ref - exact)
        error, tokens = value - case.advantage[i], []
        for t, logp in enumerate(row):
            undo = case.rollout_scale[i] / case.scale[i][t] if case.scale[i][t] else 0.0
            loss, coef = undo * error**2 / 2 / len(row), -undo * beta * error
            tokens.append((loss, coef, math.exp(logp - case.sampler[i][t]), False))
        out.append(tokens)
    return out
