"""The causal masking probe: what a token's change owes to three peers, by leaving their gradient
out of the update.

``tau = delta_full - delta_masked``. The gradient of an update is a sum over tokens, so the masked
one is the full one minus that of the peers: one small backward, one update, one row to score.
The clip factor is that of the full update, so that nothing but the peers' gradient is missing.

Axes: R rows of the update, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from counterpoise.ledger.calculus.decompose import class_gradients
from counterpoise.ledger.calculus.logprobs import LogProbs, Params, trainable
from counterpoise.ledger.calculus.snapshot import Snapshot, restore, snapshot
from counterpoise.types import Rows

HIGH_ENTROPY = 0.8  # the top fifth of the update's tokens
SET_SIZE = 3

Token = tuple[int, int]  # row of the update, position


class Bucket(NamedTuple):
    """What the peers are, seen from the target."""

    token: str
    entropy: str
    sign: str


BUCKETS = [
    Bucket(a, b, c)
    for a in ("same", "different")
    for b in ("high", "low")
    for c in ("positive", "negative")
]


class FullUpdate(NamedTuple):
    """An update ready to be taken again without some tokens.

    ``weight_RT`` = coef * scale * clip factor.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    saved: Snapshot
    logprobs: LogProbs
    scorer: LogProbs
    before: Params
    weight_RT: Tensor
    grads: Params

    def logp(self, target: Token) -> float:
        """The target's log-prob under the model as it is now."""
        row_R = torch.tensor([target[0]], device=self.weight_RT.device)
        with torch.no_grad():
            return float(self.scorer.reverse(trainable(self.model), row_R)[0, target[1]].double())

    def logp_after(self, target: Token, left_out: Sequence[Token] = ()) -> float:
        """The target's log-prob after the update in which the tokens in ``left_out`` bring no
        gradient; model and optimizer are put back.
        """
        grads = self.grads
        if left_out:
            peers = gradient(self.logprobs, self.before, only(self.weight_RT, left_out))
            grads = {name: value - peers[name] for name, value in grads.items()}
        try:
            for name, p in self.model.named_parameters():
                p.grad = -grads[name] if name in grads else None
            self.optimizer.step()
            return self.logp(target)
        finally:
            restore(self.saved, self.model, self.optimizer)


def full_update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    logprobs: LogProbs,
    weight_RT: Tensor,
    scorer: LogProbs | None = None,
) -> FullUpdate:
    """The update with gradient ``sum_k weight_k grad logp_k`` (an ascent direction).

    Args:
        logprobs: gives gradients, in the precision of training.
        scorer: gives log-probs, in the parameters' own precision; ``logprobs`` by default.
    """
    before = {name: value.clone() for name, value in trainable(model).items()}
    grads = gradient(logprobs, before, weight_RT)
    return FullUpdate(
        model,
        optimizer,
        snapshot(model, optimizer),
        logprobs,
        scorer or logprobs,
        before,
        weight_RT,
        grads,
    )


def gradient(logprobs: LogProbs, params: Params, weight_RT: Tensor) -> Params:
    return {
        name: value[0] for name, value in class_gradients(logprobs, params, weight_RT[None]).items()
    }


def only(weight_RT: Tensor, tokens: Sequence[Token]) -> Tensor:
    """The weights of some tokens, 0 elsewhere."""
    out_RT = torch.zeros_like(weight_RT)
    for r, t in tokens:
        out_RT[r, t] = weight_RT[r, t]
    return out_RT


def tau(update: FullUpdate, target: Token, peers: Sequence[Token]) -> float:
    """What the peers brought to the target: delta_full - delta_masked."""
    return update.logp_after(target) - update.logp_after(target, peers)


def causal_rows(
    update: FullUpdate,
    rows: Rows,
    token_ids_RT: Tensor,
    entropy_RT: Tensor,
    num_targets: int,
    seed: int,
) -> list[dict[str, Any]]:
    """tau of randomly chosen targets under one random set of peers a bucket, one row each.

    Targets are among the top fifth of entropy: a confident token hardly couples to anything. Peers
    answer the same prompt in other rollouts and have weight in the update. A bucket with fewer than
    three of them is left out."""
    out = []
    for target, is_high_RT in chosen_targets(rows, entropy_RT, num_targets, seed):
        start, after = update.logp(target), update.logp_after(target)
        for k, bucket in enumerate(BUCKETS):
            pool_RT = candidates(target, bucket, rows, token_ids_RT, is_high_RT, update.weight_RT)
            pool = [(int(r), int(t)) for r, t in pool_RT.nonzero().tolist()]
            if len(pool) < SET_SIZE:
                continue
            rng = np.random.default_rng([seed, *target, k])
            peers = [pool[i] for i in rng.choice(len(pool), SET_SIZE, replace=False)]
            effect = after - update.logp_after(target, peers)
            pull = float(sum(abs(update.weight_RT[peer]) for peer in peers))
            known = {
                "group": int(rows.group_N[target[0]]),
                "row": target[0],
                "position": target[1],
                **bucket._asdict(),
            }
            out.append({**known, "delta_full": after - start, "tau": effect, "pull": pull})
    return out


def chosen_targets(
    rows: Rows, entropy_RT: Tensor, num: int, seed: int
) -> Iterator[tuple[Token, Tensor]]:
    """Random tokens of the top fifth of entropy in rollouts with an advantage, spread over the
    update; with the mask of that fifth.
    """
    level = torch.quantile(entropy_RT[rows.mask_NT].double(), HIGH_ENTROPY)
    is_high_RT = (entropy_RT >= level) & rows.mask_NT
    pool = (is_high_RT & (rows.sign_NT != 0)).nonzero().tolist()
    if not pool:
        raise ValueError(
            "coupling: no rollout of this update has an advantage, so nothing is pushed. Choose"
            " another update."
        )
    for i in np.random.default_rng(seed).permutation(len(pool))[:num]:
        yield (pool[i][0], pool[i][1]), is_high_RT


def candidates(
    target: Token,
    bucket: Bucket,
    rows: Rows,
    token_ids_RT: Tensor,
    is_high_RT: Tensor,
    weight_RT: Tensor,
) -> Tensor:
    """Tokens of other rollouts of the target's prompt that are in the bucket and have weight in the
    update.
    """
    row, position = target
    is_peer_R = rows.group_N == rows.group_N[row]
    is_peer_R[row] = False
    is_side_RT = rows.sign_NT == (1 if bucket.sign == "positive" else -1)
    is_same_RT = token_ids_RT == token_ids_RT[row, position]
    in_RT = is_peer_R[:, None] & is_side_RT & rows.mask_NT & (weight_RT != 0)
    return (
        in_RT
        & (is_same_RT if bucket.token == "same" else ~is_same_RT)
        & (is_high_RT if bucket.entropy == "high" else ~is_high_RT)
    )
