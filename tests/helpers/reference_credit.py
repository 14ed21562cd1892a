"""Loops-only twins of the credit rules: Python lists in, Python lists out, written from the
equations.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction


class Rollouts:
    """A batch as ragged Python lists."""

    def __init__(self, batch):
        lengths = batch.mask_NT.sum(1).tolist()
        self.group, self.reward = batch.group_N.tolist(), batch.reward_N.tolist()
        self.has_teacher = None if batch.has_teacher_N is None else batch.has_teacher_N.tolist()
        logps = ("sampler_logp", "trainer_logp", "ref_logp", "teacher_logp")
        for name in ("token_ids", "entropy", "ref_kl", "importance", *logps):
            column = getattr(batch, f"{name}_NT")
            rows = None if column is None else [row[:n] for row, n in zip(column.tolist(), lengths)]
            setattr(self, name, rows)

    def siblings(self, i):
        return [j for j in range(len(self.group)) if self.group[j] == self.group[i]]

    def places(self):
        return [(i, t) for i, ids in enumerate(self.token_ids) for t in range(len(ids))]


def copy(credit):
    return [list(row) for row in credit]


def negative_token_filter(credit, r, fraction):
    out = copy(credit)
    for i, row in enumerate(credit):
        negative = [t for t, c in enumerate(row) if c < 0]
        keep = max(1, math.ceil(Fraction(str(fraction)) * len(negative)))
        for t in sorted(negative, key=lambda t: (r.sampler_logp[i][t], t))[keep:]:
            out[i][t] = 0.0
    return out


def quantile(values, level):
    values = sorted(values)
    if not values:
        return math.inf
    rank = Fraction(str(level)) * (len(values) - 1)
    low, high = math.floor(rank), math.ceil(rank)
    return values[low] + float(rank - low) * (values[high] - values[low])


def top_entropy(credit, r, fraction):
    threshold = quantile([r.entropy[i][t] for i, t in r.places()], 1 - Fraction(str(fraction)))
    return [
        [c if r.entropy[i][t] >= threshold else 0.0 for t, c in enumerate(row)]
        for i, row in enumerate(credit)
    ]


def spurious(credit, r, max_prob, entropy_quantile, quantile_over, renormalise):
    rare = [
        (i, t)
        for i, t in r.places()
        if credit[i][t] > 0 and math.exp(r.sampler_logp[i][t]) < max_prob
    ]
    pool = rare if quantile_over == "rare" else r.places()
    threshold = quantile([r.entropy[i][t] for i, t in pool], entropy_quantile)
    dropped = {(i, t) for i, t in rare if r.entropy[i][t] < threshold}
    out = [
        [0.0 if (i, t) in dropped else c for t, c in enumerate(row)] for i, row in enumerate(credit)
    ]
    if renormalise == "none":
        return out
    if renormalise == "tokens":
        whole, kept = len(r.places()), len(r.places()) - len(dropped)
    else:
        whole, kept = mass(credit), mass(out)
    return [[c * whole / kept for c in row] for row in out] if kept else out


def mass(credit):
    return math.fsum(abs(c) for row in credit for c in row)


def most(places, fraction, value):
    """The places whose value is among the max(1, ceil(fraction n)) largest, ties included."""
    if not places:
        return set()
    count = max(1, math.ceil(Fraction(str(fraction)) * len(places)))
    last = sorted((value(*place) for place in places), reverse=True)[count - 1]
    return {place for place in places if value(*place) >= last}


def surprisal_boost(credit, r, share, boost, damp):
    out = copy(credit)
    for side, factor in ((1, boost), (-1, damp)):
        places = [(i, t) for i, t in r.places() if credit[i][t] * side > 0]
        for i, t in most(places, share, lambda i, t: -r.sampler_logp[i][t]):
            out[i][t] *= factor
    return out


def rare_uncertain(credit, r, fraction):
    last = quantile([r.sampler_logp[i][t] for i, t in r.places()], fraction)
    rare = [(i, t) for i, t in r.places() if r.sampler_logp[i][t] <= last]
    entropies = [r.entropy[i][t] for i, t in rare]
    low, high = min(entropies), max(entropies)
    out = [[0.0] * len(row) for row in credit]
    for i, t in rare:
        place = 0.5 if low == high else (r.entropy[i][t] - low) / (high - low)
        out[i][t] = credit[i][t] * (0.5 + place / 2)
    return out


def prefix_value(r, segments, values):
    """``segments[i][t]`` and ``values[i][t]``; -1 is no segment."""
    out = []
    for i, row in enumerate(segments):
        starts = [t for t, s in enumerate(row) if s >= 0 and s not in row[:t]]
        ends = [values[i][t] for t in starts[1:]] + [r.reward[i]]
        gains = [end - values[i][t] for t, end in zip(starts, ends)]
        out.append([gains[s] if s >= 0 else 0.0 for s in row])
    return out


def tree_gain(credit, r, std, eps):
    def value(i, prefix):
        return [r.reward[j] for j in r.siblings(i) if r.token_ids[j][: len(prefix)] == prefix]

    def mean(numbers):
        return math.fsum(numbers) / len(numbers)

    out = copy(credit)
    for i, t in r.places():
        rewards = value(i, [])
        spread = 1.0
        if std and min(rewards) < max(rewards):
            squares = math.fsum((one - mean(rewards)) ** 2 for one in rewards)
            spread = math.sqrt(squares / (len(rewards) - 1)) + eps
        ids = r.token_ids[i]
        out[i][t] += (mean(value(i, ids[: t + 1])) - mean(value(i, ids[:t]))) / spread
    return out


def whiten(credit, r, eps, counts=None, size=1.0):
    """``counts[i][t]``: whether a token is counted; all by default."""
    places = [(i, t) for i, t in r.places() if counts is None or counts[i][t]]
    mean = math.fsum(credit[i][t] for i, t in places) / max(len(places), 1)
    squares = [(credit[i][t] - mean) ** 2 for i, t in places]
    std = math.sqrt(math.fsum(squares) / max(len(places), 1) + eps)
    out = [[0.0] * len(row) for row in credit]
    for i, t in places:
        out[i][t] = size * (credit[i][t] - mean) / std
    return out


def implied_advantage(credit, r, beta, decay):
    out = [[0.0] * len(row) for row in credit]
    for i, t in r.places():
        for s in range(t, len(credit[i])):
            term = beta * (r.trainer_logp[i][s] - r.ref_logp[i][s] - r.ref_kl[i][s])
            out[i][t] += decay ** (s - t) * term
    return out


def only_improbable(credit, r, max_prob, whiten_them=False, eps=1e-8):
    kept = [[math.exp(logp) < max_prob for logp in row] for row in r.sampler_logp]
    if whiten_them:
        return whiten(credit, r, eps, kept)
    return [[c if k else 0.0 for c, k in zip(*rows)] for rows in zip(credit, kept)]


def group_divergence(credit, r, candidates, fraction):
    """``candidates[i][t]`` is a dict of id -> probability."""
    out = [[0.0] * len(row) for row in credit]
    for i, row in enumerate(credit):
        sizes = [divergence_from_group(r, candidates, i, t) for t in range(len(row))]
        keep = max(1, math.ceil(Fraction(str(fraction)) * len(row)))
        for t in sorted(range(len(row)), key=lambda t: (-sizes[t], t))[:keep]:
            out[i][t] = row[t]
    return out


def divergence_from_group(r, candidates, i, t):
    own = candidates[i][t]
    there = [candidates[j][t] for j in r.siblings(i) if t < len(candidates[j])]
    mean = {token: math.fsum(p.get(token, 0.0) for p in there) / len(there) for token in own}
    pairs = [(own[token], mean[token]) for token in own]
    pairs.append((max(0.0, 1 - sum(own.values())), max(0.0, 1 - sum(mean.values()))))
    total = math.fsum(p * math.log(p / ((a + b) / 2)) for a, b in pairs for p in (a, b) if p > 0)
    return total / 2 if total / 2 >= 1e-12 else 0.0


def answer_influence(credit, r, quantile, beta, floor):
    out = copy(credit)
    for i, scores in enumerate(r.importance):
        at = [t for t, score in enumerate(scores) if score >= 0]
        logs = [math.log1p(scores[t]) for t in at]
        if not logs or max(logs) - min(logs) <= 1e-8:
            continue
        scaled = [(x - min(logs)) / (max(logs) - min(logs)) for x in logs]
        rank = quantile * (len(scaled) - 1)
        low, high = (sorted(scaled)[place(rank)] for place in (math.floor, math.ceil))
        tau = low + (rank - math.floor(rank)) * (high - low)
        raw = [
            max(x / tau, floor) if x < tau else 1 + beta * ((x - tau) / (1 - tau) if tau < 1 else 0)
            for x in scaled
        ]
        for t, weight in zip(at, raw):
            out[i][t] = credit[i][t] * weight * len(raw) / math.fsum(raw)
    return out


def teacher(credit, r, source):
    return [
        [r.teacher_logp[i][t] - r.trainer_logp[i][t] if r.has_teacher[i] else 0.0 for t in range(n)]
        for i, n in enumerate(map(len, credit))
    ]


def proximal_teacher(credit, r, alpha):
    returns = []
    for teacher_logp, sampler_logp in zip(r.teacher_logp, r.sampler_logp):
        reward = [
            math.log(alpha * math.exp(a - b) + 1 - alpha)
            for a, b in zip(teacher_logp, sampler_logp)
        ]
        later = [reward[t + 1 :] for t in range(len(reward))]
        returns.append([x + (sum(xs) / len(xs) if xs else 0) for x, xs in zip(reward, later)])
    out = [[0.0] * len(row) for row in credit]
    for i in range(len(credit)):
        if not r.has_teacher[i]:
            continue
        values = [x for j in r.siblings(i) if r.has_teacher[j] for x in returns[j]]
        mean = math.fsum(values) / len(values)
        variance = math.fsum((x - mean) ** 2 for x in values) / max(1, len(values) - 1)
        for t, x in enumerate(returns[i]):
            out[i][t] = (x - mean) / max(math.sqrt(variance), 1e-6)
    return out


def entropy_filter(credit, r, limit, coef):
    mean = [math.fsum(row) / len(row) if row else 0.0 for row in r.entropy]
    return [
        [c - coef * mean[i] if mean[i] <= limit else 0.0 for c in row]
        for i, row in enumerate(credit)
    ]


def conflict(credit, r, positive, negative, runs, multiply=False, divide=False, rule=None):
    """``rule`` is ``entropy_filter`` with its parameters, or none."""

    def contested(i, t, from_end):
        signs = set()
        for j in r.siblings(i):
            s = len(r.token_ids[j]) - (len(r.token_ids[i]) - t) if from_end else t
            if 0 <= s < len(r.token_ids[j]) and r.token_ids[j][s] == r.token_ids[i][t]:
                signs.add((credit[j][s] > 0) - (credit[j][s] < 0))
        return {-1, 1} <= signs

    out = copy(credit) if rule is None else entropy_filter(credit, r, **rule.params)
    conflicts = [0] * len(credit)
    for i, t in r.places():
        n = len(r.token_ids[i])
        start = runs != "end" and all(contested(i, s, False) for s in range(t + 1))
        end = runs != "start" and all(contested(i, s, True) for s in range(t, n))
        conflicts[i] += start or end
        for _ in range(start + end if multiply else start or end):
            out[i][t] *= positive if credit[i][t] > 0 else negative
    if divide:
        out = [[c / max(1, conflicts[i]) for c in row] for i, row in enumerate(out)]
    return out


def prefix_size(r, i, t):
    return sum(r.token_ids[j][: t + 1] == r.token_ids[i][: t + 1] for j in r.siblings(i))


def shared_prefix(credit, r):
    return [[c / prefix_size(r, i, t) for t, c in enumerate(row)] for i, row in enumerate(credit)]


def probability_scaled(credit, r, alpha):
    return [
        [c * (alpha * math.exp(r.sampler_logp[i][t]) + 1 - alpha) for t, c in enumerate(row)]
        for i, row in enumerate(credit)
    ]


def focal(credit, r, gamma, threshold=0.5):
    rate = [
        sum(r.reward[j] >= threshold for j in r.siblings(i)) / len(r.siblings(i))
        for i in range(len(credit))
    ]
    return [[c * (1 - rate[i]) ** gamma for c in row] for i, row in enumerate(credit)]


def kl_penalty(credit, r, estimator, coef):
    def kl(i, t):
        gap = r.ref_logp[i][t] - r.sampler_logp[i][t]
        return {"k1": -gap, "k2": gap * gap / 2, "k3": math.exp(gap) - 1 - gap}[estimator]

    return [[c - coef * kl(i, t) for t, c in enumerate(row)] for i, row in enumerate(credit)]


def token_covariance(credit, r):
    n = len(r.places())
    logp_mean = math.fsum(r.sampler_logp[i][t] for i, t in r.places()) / n
    credit_mean = math.fsum(c for row in credit for c in row) / n
    return [
        [(r.sampler_logp[i][t] - logp_mean) * (c - credit_mean) for t, c in enumerate(row)]
        for i, row in enumerate(credit)
    ]


def fisher_p(a, b, right, wrong):
    """Two-sided, by exact counting of tables."""
    hit, ways = a + b, math.comb(right + wrong, a + b)
    chance = {
        k: Fraction(math.comb(right, k) * math.comb(wrong, hit - k), ways)
        for k in range(hit + 1)
        if k <= right and hit - k <= wrong
    }
    return float(sum(p for p in chance.values() if p <= chance[a]))


def entropy_bits(*counts):
    total = sum(counts)
    return -sum(c / total * math.log2(c / total) for c in counts if c)


def ktae(credit, r, fisher_weight, gain_weight, frequency_weight, top, threshold=0.5):
    out = copy(credit)
    for i, t in r.places():
        token, family = r.token_ids[i][t], r.siblings(i)
        right = [j for j in family if r.reward[j] >= threshold]
        wrong = [j for j in family if r.reward[j] < threshold]
        if not right or not wrong:
            continue
        a, b = (
            sum(token in r.token_ids[j] for j in right),
            sum(token in r.token_ids[j] for j in wrong),
        )
        c, d, n = len(right) - a, len(wrong) - b, len(family)
        p = fisher_p(a, b, len(right), len(wrong))
        closeness = 0.0 if p == 1 else math.exp(-2 * p)
        gain = entropy_bits(a + c, b + d) - (a + b) / n * entropy_bits(a, b)
        if c + d:
            gain -= (c + d) / n * entropy_bits(c, d)
        direction = math.asin(math.sqrt(a / (a + c))) - math.asin(math.sqrt(b / (b + d)))
        if frequency_weight:
            tf_right, tf_wrong = (
                term_frequency(r, token, right, wrong),
                term_frequency(r, token, wrong, right),
            )
            direction += frequency_weight * (
                tf_right / (tf_wrong + 1e-5) - tf_wrong / (tf_right + 1e-5)
            )
        strength = (fisher_weight * closeness + gain_weight * gain) / (fisher_weight + gain_weight)
        out[i][t] += top * math.tanh(strength * direction / 2)  # = 2 top (sigmoid - 1/2)
    return out


def term_frequency(r, token, side, other):
    """BM25's term frequency with k1 = 2, b = 1/2 over the concatenated rollouts of a side."""
    length, other_length = (
        sum(len(r.token_ids[j]) for j in side),
        sum(len(r.token_ids[j]) for j in other),
    )
    share = sum(r.token_ids[j].count(token) for j in side) / length
    return share * 3 / (share + 2 * (0.5 + 0.5 * length / ((length + other_length) / 2)))


def edit_distance(one, other):
    table = {}
    for i, j in itertools.product(range(len(one) + 1), range(len(other) + 1)):
        if i == 0 or j == 0:
            table[i, j] = i + j
        else:
            table[i, j] = min(
                table[i - 1, j] + 1,
                table[i, j - 1] + 1,
                table[i - 1, j - 1] + (one[i - 1] != other[j - 1]),
            )
    return table[len(one), len(other)]
