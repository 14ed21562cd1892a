"""Loops-only twin of DelTA: dense vectors v as Python lists, distances written out, no tensors.

Axes as in the package: rollouts i, tokens t; a vector is a flat list, for the head proxy of length
V * D."""

from __future__ import annotations

import math


def softmax(values):
    top = max(values)
    parts = [math.exp(value - top) for value in values]
    return [part / sum(parts) for part in parts]


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b))


def distance(a, b):
    return math.fsum((x - y) ** 2 for x, y in zip(a, b))


def row_vector(logp, hidden):
    return [(1 - math.exp(logp)) * h for h in hidden]


def topk_vector(target, ids, logps, head):
    total = math.fsum(math.exp(logp) for logp in logps)
    out = list(head[target])
    for j, logp in zip(ids, logps):
        out = [o - math.exp(logp) / total * w for o, w in zip(out, head[j])]
    return out


def head_vector(target, hidden, head, temperature):
    prob = softmax([dot(row, hidden) / temperature for row in head])
    return [((1.0 if k == target else 0.0) - prob[k]) * h for k in range(len(head)) for h in hidden]


def vectors(batch, proxy, topk=None, temperature=1.0):
    """v[i][t] for every response token."""
    out = []
    for i, length in enumerate(batch.mask_NT.sum(1).tolist()):
        row = []
        for t in range(length):
            target, logp = int(batch.token_ids_NT[i, t]), float(batch.sampler_logp_NT[i, t])
            if proxy == "row":
                row.append(row_vector(logp, batch.hidden_NTD[i, t].tolist()))
            elif proxy == "topk":
                ids, logps = (
                    batch.topk_ids_NTK[i, t].tolist()[:topk],
                    batch.topk_logp_NTK[i, t].tolist()[:topk],
                )
                row.append(topk_vector(target, ids, logps, batch.head_VD.tolist()))
            else:
                row.append(
                    head_vector(
                        target, batch.hidden_NTD[i, t].tolist(), batch.head_VD.tolist(), temperature
                    )
                )
        out.append(row)
    return out


def mean_vector(weights, vecs):
    total = math.fsum(weights)
    return [math.fsum(w * v[k] for w, v in zip(weights, vecs)) / total for k in range(len(vecs[0]))]


def deviation(values):
    mean = math.fsum(values) / len(values)
    return math.sqrt(max(math.fsum((x - mean) ** 2 for x in values) / len(values), 1e-8))


def squash(x):
    return 1 / (1 + math.exp(-x)) if x > 0 else math.exp(x) / (1 + math.exp(x))


def margins(credit, v, refinements=1, score="contrast", hard=False, gamma=None):
    """(Delta / gamma by place, list of the gamma used in each round, centroids)."""
    sides = {
        s: [(i, t) for i, row in enumerate(credit) for t, c in enumerate(row) if c * s > 0]
        for s in (1, -1)
    }
    if not sides[1] or not sides[-1]:
        return None, [], None
    alpha = {place: 1.0 for side in sides.values() for place in side}
    mu, delta, scale, scales = {}, {}, {}, []
    for k in range(refinements + 1):
        for s, places in sides.items():
            weights = [abs(credit[i][t]) * alpha[i, t] for i, t in places]
            if math.fsum(weights) > 0:
                mu[s] = mean_vector(weights, [v[i][t] for i, t in places])
        before = dict(delta)
        for s, places in sides.items():
            for i, t in places:
                other = distance(v[i][t], mu[-s]) if score == "contrast" else 0.0
                delta[i, t] = other - distance(v[i][t], mu[s])
        for s, places in sides.items():
            # the temperature of the Delta before; in the first round there is none before
            scale[s] = (
                gamma
                if gamma is not None
                else deviation([(before if k else delta)[place] for place in places])
            )
            for place in places:
                x = delta[place] / scale[s]
                alpha[place] = (1.0 if x > 0 else 0.0) if hard else squash(x)
        scales.append(dict(scale))
    return (
        {place: delta[place] / scale[s] for s, places in sides.items() for place in places},
        scales,
        mu,
    )


def weights(
    credit,
    v,
    *,
    low=0.8,
    high=1.2,
    refinements=1,
    count_zero=True,
    score="contrast",
    hard=False,
    gamma=None,
    normalise=True,
    select=None,
    select_frac=0.5,
):
    """weight[i][t] of every response token."""
    margin, _, _ = margins(credit, v, refinements, score, hard, gamma)
    if margin is None:
        return [[1.0 for _ in row] for row in credit]
    if select is None:
        alpha = {
            place: (1.0 if x > 0 else 0.0) if hard else squash(x) for place, x in margin.items()
        }
        out = [
            [low + (high - low) * alpha.get((i, t), 0.0) for t in range(len(row))]
            for i, row in enumerate(credit)
        ]
    else:
        order = sorted(margin.values(), reverse=select == "top")
        last = order[math.ceil(select_frac * len(order)) - 1]
        chosen = {
            place for place, x in margin.items() if (x >= last if select == "top" else x <= last)
        }
        share = len(chosen) / len(margin)
        out = [
            [
                (1.0 if (i, t) in chosen else 0.0) if (i, t) in margin else share
                for t in range(len(row))
            ]
            for i, row in enumerate(credit)
        ]
    if not normalise:
        return out
    counted = [
        (i, t)
        for i, row in enumerate(credit)
        for t in range(len(row))
        if count_zero or (i, t) in margin
    ]
    total = math.fsum(out[i][t] for i, t in counted)
    if total == 0:
        return [[1.0 for _ in row] for row in out]
    return [[w * len(counted) / total for w in row] for row in out]
