"""Counterfactual updates: from one bit-exact snapshot, the same update with some of its
tokens or parts left out.

A token is left out by setting its ``scale`` to 0: its gradient does not enter, whatever the loss
is, and nobody else's coefficient changes.

Axes: R rows of the update, T response tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.ledger.account import Scores, head_state, place_tokens, score_update
from counterpoise.ledger.calculus.head_change import head_change
from counterpoise.ledger.calculus.logprobs import Params, Texts, copy_params, trainable
from counterpoise.ledger.calculus.snapshot import restore, snapshot
from counterpoise.ledger.measures.changes import change_sign
from counterpoise.maths.head import Head
from counterpoise.maths.transfer import send
from counterpoise.policy.backbone import backbone
from counterpoise.probes.scene import Scene
from counterpoise.trainer.loop import set_rate
from counterpoise.trainer.update import Update, apply_update, chosen_kernels
from counterpoise.types import Rows


@contextmanager
def before_last_update(scene: Scene) -> Iterator[Rows]:
    """Model and optimizer after all but the last of the batch's own updates, for the block; gives
    the rows of the last.

    With one update per batch that is the first.
    """
    model, optimizer = scene.policy.model, scene.optimizer
    saved = snapshot(model, optimizer)
    *first, last = [
        scene.method.rows(scene.collected.batch, scene.credit, row_R) for row_R in scene.updates
    ]
    try:
        for k, rows in enumerate(first):
            set_rate(optimizer, scene.config, scene.state.num_updates + k)
            apply_update(model, optimizer, scene.method, rows, scene.collected, scene.config)
        set_rate(optimizer, scene.config, scene.state.num_updates + len(first))
        yield last
    finally:
        restore(saved, model, optimizer)


class Change(NamedTuple):
    """What an update did to the tokens of its rows, [R, T].

    ``head_delta_RT``: with hidden states held and the head's new weight alone.
    """

    update: Update
    scores: Scores
    head_delta_RT: Tensor | None

    @property
    def delta_RT(self) -> Tensor:
        return self.scores.logp_after_NT - self.scores.logp_before_NT

    @property
    def sign_RT(self) -> Tensor:
        """+1 boosted, -1 suppressed, 0 within the noise floor."""
        return change_sign(self.delta_RT, self.scores.noise_floor)


@contextmanager
def updated(
    scene: Scene,
    rows: Rows,
    enters_RT: Tensor | None = None,
    *,
    memory: bool = True,
    method: Any = None,
) -> Iterator[Update]:
    """Model and optimizer after one update on the rows, for the block; then everything is put back
    bit for bit.

    Args:
        enters_RT: tokens whose gradient enters; None for all.
        memory: False sets the optimizer's first moments to 0 beforehand, so that the update holds
            this batch's gradient alone.
        method: whose loss to use; the run's by default.
    """
    model, optimizer = scene.policy.model, scene.optimizer
    if enters_RT is not None:
        if not bool((enters_RT & rows.mask_NT).any()):
            raise ValueError(
                f"probe: no token of batch {scene.batch_number} has the advantage that this update"
                " is made of (all rollouts of its prompts earned the same?). Choose another batch."
            )
        rows = rows._replace(scale_NT=rows.scale_NT * enters_RT)
    saved = snapshot(model, optimizer)
    try:
        if not memory:
            forget(optimizer)
        yield apply_update(
            model, optimizer, method or scene.method, rows, scene.collected, scene.config
        )
    finally:
        restore(saved, model, optimizer)


def scores_since(
    scene: Scene, before: Params, row_R: Tensor, noise_floor: float | None = None
) -> Scores:
    """Rollouts of the scene's batch under the weights ``before`` and the present ones."""
    model = scene.policy.model
    layers = partial(chosen_kernels, model, scene.config.optimizer)
    texts = scene.texts(row_R)
    return score_update(model, before, texts, None, noise_floor=noise_floor, kernels=layers)


def try_update(
    scene: Scene,
    rows: Rows,
    enters_RT: Tensor | None = None,
    *,
    memory: bool = True,
    method: Any = None,
) -> Change:
    """Take one update on the rows (arguments of ``updated``), score them, and put everything back
    bit for bit.
    """
    model, before = scene.policy.model, copy_params(trainable(scene.policy.model))
    with updated(scene, rows, enters_RT, memory=memory, method=method) as update:
        scores = scores_since(scene, before, rows.row_R)
        head = backbone(model).head
        new_head = (
            None if head is None else head._replace(weight_VD=head.weight_VD.detach().clone())
        )
    texts = scene.texts(rows.row_R)
    return Change(update, scores, None if new_head is None else head_delta(model, texts, new_head))


def head_delta(model: PreTrainedModel, texts: Texts, new_head: Head) -> Tensor:
    """Change of the log-probs if the head alone took its new weight."""
    state = head_state(model, texts)
    change = head_change(
        state,
        state._replace(head=new_head),
        send(texts.token_ids_NT[texts.mask_NT], model.device),
        temperature=texts.temperature,
    )
    return place_tokens(change.logp_after_M - change.logp_before_M, texts.mask_NT)


def forget(optimizer: torch.optim.Optimizer) -> None:
    """Set first moments (momentum) to 0; second moments and update counts stay."""
    for slot in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_scales", "momentum_buffer"):
            if isinstance(slot.get(name), Tensor):
                slot[name].zero_()
