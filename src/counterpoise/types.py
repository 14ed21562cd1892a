"""The nouns, the axis legend and the glossary.

Axes (suffixes of names)
    N  rollouts            G  rollouts of one prompt (a group)     P  prompts
    T  response tokens     V  vocabulary                           D  hidden size
    U  turns               K  candidates kept of V

Words, never mixed
    reward     one number per rollout, from the grader
    advantage  one signed number per rollout
    weight     one number >= 0 a token: how a rollout's advantage is spread
    credit     one signed number per token: what the loss gets
    scale      one number per token: the reduction (1/denominator), known for the whole update
    coef       minus the derivative of a token's loss by its own log-prob
    plan       which rollouts share an update

Log-probs say whose they are: ``sampler`` (behaviour policy), ``trainer`` (being trained), ``ref``,
``teacher`` (who read more than the policy did).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from counterpoise.checks import (
    check_columns,
    check_float,
    check_kinds,
    check_shapes,
    check_values,
    number_column,
    pad_rows,
    row_lengths,
)
from counterpoise.stage import SUCCESS


class Prompt(NamedTuple):
    """One question of a task: what the model reads and what the grader needs."""

    id: str
    text: str
    answer: str = ""
    meta: Mapping[str, Any] = {}


# column of a TokenBatch -> how a caller measures it; the keys are the optional columns
COLUMNS = {
    "entropy_NT": "the entropy of the sampling distribution at each response token",
    "trainer_logp_NT": "score the rollouts with the model being trained, before the first update",
    "ref_logp_NT": "score the rollouts with the frozen reference model",
    "teacher_logp_NT": "score the rollouts with a teacher, after a prompt of its own",
    "has_teacher_N": "mark the rollouts that have a teacher",
    "ref_kl_NT": "KL(trainer || reference) over the vocabulary at each response token",
    "importance_NT": "the influence of each token on the answer (policy.measure_importance)",
    "hidden_NTD": "the final normed hidden state that feeds the LM head at each response token",
    "topk_ids_NTK": "the ids of the K largest logits at each response token",
    "topk_logp_NTK": "the log-probs of the K largest logits at each response token",
    "head_VD": "the weight of the LM head, model.get_output_embeddings().weight",
    "turn_score_NU": "the environment's score of the state after each turn (Reply.score)",
    "state_NU": "a key of the state in which each turn began (Reply.state)",
    "value_NT": "the mean reward of fresh completions of the text before a token's segment",
    "segment_NT": "the number of the segment that a token belongs to, -1 where it has none",
}

# optional columns that ``from_lists`` takes as ragged lists
RAGGED = ("entropy", "trainer_logp", "ref_logp", "ref_kl", "importance", "teacher_logp")
LISTED = ("token_ids_NT", "mask_NT", "group_N", "reward_N", "sampler_logp_NT")  # from its own lists
NUMBERED = ("turn_NT", "state_NU", "segment_NT")  # columns whose padding is -1


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBatch:
    """Finished rollouts as right-padded columns: the tokens after the prompt.

    Args:
        token_ids_NT: response token ids, right-padded.
        mask_NT: True on tokens that the model wrote, False on padding and on what an environment
            said: those tokens are context alone, without credit, weight or count.
        group_N: which prompt each rollout answers; rollouts of one prompt share a number.
        reward_N: the grader's number.
        sampler_logp_NT: log-prob of each token under the policy that sampled it.
        max_length: the generation limit, if there was one (``constant_length`` divides by it).
        success: a reward of at least this much is a success; None takes 0.5.
        success_N: True on successes, where something else than the sum of rewards decides it (one
            of several reward functions); then ``success`` is not read.
        turn_NT: the turn in which the model wrote a token, -1 elsewhere; without it every run of
            ``mask_NT`` is a turn.
        turn_reward_NU: the reward of each turn, which add up to ``reward_N``; without it all of the
            reward came in the last turn.
        turn_mask_NU: True on turns that were played; without it those that ``turn_NT`` has.
        turn_score_NU: a score of the state after each turn, no part of the reward; NaN is none.
        state_NU: a key of the state in which a turn began; equal keys in a group mean equal
            futures, -1 is unknown.
        segment_NT: the stretch of a response that a token belongs to, counted from 0; -1 where it
            has none.
        value_NT: the reward to expect where a token's segment begins, one number per segment.
        importance_NT: the influence of a token on the answer, below 0 where it has no score.
        extra: further columns for rules of your own, first axis N.

    The remaining columns are needed only by some rules; ``method.needs`` names them before any
    forward.

    >>> batch = TokenBatch.from_lists(
    ...     [[5, 6, 7], [5, 8]],
    ...     group=[0, 0],
    ...     reward=[1.0, 0.0],
    ...     sampler_logp=[[-0.1, -0.2, -0.3], [-0.1, -2.0]],
    ... )
    >>> batch.mask_NT.sum(1).tolist()
    [3, 2]
    """

    token_ids_NT: Tensor
    mask_NT: Tensor
    group_N: Tensor
    reward_N: Tensor
    sampler_logp_NT: Tensor
    entropy_NT: Tensor | None = None
    trainer_logp_NT: Tensor | None = None
    ref_logp_NT: Tensor | None = None
    teacher_logp_NT: Tensor | None = None
    has_teacher_N: Tensor | None = None
    ref_kl_NT: Tensor | None = None
    importance_NT: Tensor | None = None
    hidden_NTD: Tensor | None = None
    topk_ids_NTK: Tensor | None = None
    topk_logp_NTK: Tensor | None = None
    head_VD: Tensor | None = None
    max_length: int | None = None
    success: float | None = None
    success_N: Tensor | None = None
    turn_NT: Tensor | None = None
    turn_reward_NU: Tensor | None = None
    turn_mask_NU: Tensor | None = None
    turn_score_NU: Tensor | None = None
    state_NU: Tensor | None = None
    segment_NT: Tensor | None = None
    value_NT: Tensor | None = None
    extra: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check_kinds(self)
        for name in ("mask_NT", "success_N", "has_teacher_N", "turn_mask_NU"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, getattr(self, name).bool())
        _detach(self)
        check_shapes(self)
        check_values(self)

    @classmethod
    def from_lists(
        cls,
        token_ids: Sequence[Sequence[int]],
        *,
        group: Sequence[int],
        reward: Sequence[float],
        sampler_logp: Sequence[Sequence[float]],
        dtype: torch.dtype = torch.float32,
        **columns: Any,
    ) -> TokenBatch:
        """Pad ragged lists.

        Further columns are ragged lists too (``entropy=[[...], ...]``), or ready tensors.
        """
        check_float(dtype)
        check_columns(columns, RAGGED, {f.name for f in dataclasses.fields(cls)} - {*LISTED})
        lengths = row_lengths(token_ids, "token_ids")
        width = max(lengths, default=0)
        mask_NT = torch.arange(width) < torch.tensor(lengths).reshape(-1, 1)
        ragged = {"sampler_logp": sampler_logp}
        given = {name: columns.pop(name) for name in RAGGED if name in columns}
        ragged |= {name: rows for name, rows in given.items() if rows is not None}
        return cls(
            token_ids_NT=pad_rows(token_ids, lengths, width, torch.long, "token_ids"),
            mask_NT=mask_NT,
            group_N=number_column(group, len(lengths), torch.long, "group"),
            reward_N=number_column(reward, len(lengths), dtype, "reward"),
            **{
                f"{name}_NT": pad_rows(rows, lengths, width, dtype, name)
                for name, rows in ragged.items()
            },
            **columns,
        )

    @property
    def num_rollouts(self) -> int:
        return self.mask_NT.shape[0]

    @property
    def length_N(self) -> Tensor:
        """Tokens of each rollout that the model wrote."""
        return self.mask_NT.sum(1)

    @property
    def is_success_N(self) -> Tensor:
        """Which rollouts count as solved: ``success_N`` where it is given, else reward >= success.

        >>> one = TokenBatch.from_lists([[5]], group=[0], reward=[1.0], sampler_logp=[[-0.1]])
        >>> one.is_success_N.tolist(), one.replace(success=2.0).is_success_N.tolist()
        ([True], [False])
        """
        if self.success_N is not None:
            return self.success_N
        return self.reward_N >= (SUCCESS if self.success is None else self.success)

    def column(self, name: str) -> Tensor:
        """A column by name; a missing one is an error that says how to measure it."""
        column = self.extra.get(name) if name in self.extra else getattr(self, name, None)
        if column is None:
            how = COLUMNS.get(name, "pass it in TokenBatch(extra={...})")
            raise ValueError(
                f"TokenBatch has no column {name!r}. Measure it: {how}; then"
                f" batch.replace({name}=...)."
            )
        return column

    def replace(self, **columns: Any) -> TokenBatch:
        """A copy with other columns."""
        return dataclasses.replace(self, **columns)

    def select(self, row_R: Tensor) -> TokenBatch:
        """The chosen rollouts, in that order; columns without a rollout axis stay whole."""
        whole = {"head_VD", "max_length", "success"}
        columns: dict[str, Any] = {
            field.name: value if field.name in whole or value is None else value[row_R]
            for field in dataclasses.fields(self)
            if field.name != "extra"
            for value in [getattr(self, field.name)]
        }
        return TokenBatch(
            **columns, extra={name: value[row_R] for name, value in self.extra.items()}
        )


def _detach(batch: TokenBatch) -> None:
    """A batch is data: no gradient flows into what was sampled."""
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and value.requires_grad:
            object.__setattr__(batch, field.name, value.detach())
    extra = {name: value.detach() for name, value in batch.extra.items()}
    object.__setattr__(batch, "extra", extra)


def stack_batches(batches: Sequence[TokenBatch]) -> TokenBatch:
    """The rows of several batches, padded to the widest; of the optional columns those that all
    have, without ``extra``.
    """
    apart = {"head_VD", "max_length", "success", "extra"}
    columns: dict[str, Any] = {}
    for field in dataclasses.fields(TokenBatch):
        parts = [getattr(batch, field.name) for batch in batches]
        if field.name in apart or any(p is None for p in parts):
            continue
        if parts[0].dim() > 1:
            width, fill = max(p.shape[1] for p in parts), -1 if field.name in NUMBERED else 0
            room = [(*[0, 0] * (p.dim() - 2), 0, width - p.shape[1]) for p in parts]
            parts = [pad(p, one, value=fill) for p, one in zip(parts, room)]
        columns[field.name] = torch.cat(parts)
    return TokenBatch(**columns, max_length=batches[0].max_length, success=batches[0].success)


def cut_width(batch: TokenBatch, width: int) -> TokenBatch:
    """The first ``width`` columns of a batch whose rows are no longer than that."""
    names = [f.name for f in dataclasses.fields(batch) if f.name.partition("_N")[2].startswith("T")]
    columns = {name: getattr(batch, name) for name in names}
    return batch.replace(**{n: c[:, :width] for n, c in columns.items() if c is not None})


class Credit(NamedTuple):
    """What a method gives to a batch.

    ``weight_NT`` is credit / advantage (1 where the advantage is 0). ``warnings`` are new in this
    batch and were also given as a ``MethodWarning``. ``advantage_NU`` is one signed number per turn
    where a rule tells turns apart; ``weight_NT`` then goes by the turn's.
    """

    advantage_N: Tensor
    weight_NT: Tensor
    credit_NT: Tensor
    state: dict[str, Any] | None
    metrics: dict[str, float]
    warnings: tuple[str, ...] = ()
    advantage_NU: Tensor | None = None


class Plan(NamedTuple):
    """Rows of each update, in order, and how they came about.

    ``manifest`` is JSON: the plan's name and parameters, the seed, rows and groups of each update,
    rows left out."""

    updates: tuple[Tensor, ...]
    manifest: dict[str, Any]

    def __iter__(self) -> Iterator[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return iter(self.updates)

    def __len__(self) -> int:
        return len(self.updates)


class Rows(NamedTuple):
    """The columns a loss reads, for the rollouts of one update or of any cut of it.

    ``scale_NT`` and ``update_NT`` are computed for the whole update before it is cut, so that no
    cut changes a gradient. ``advantage_NT`` is that of a token's turn, where a rule has turns.
    ``rollout_scale_N`` is 1 / (rollouts of the update), where a loss is a mean over rollouts."""

    row_R: Tensor
    mask_NT: Tensor
    group_N: Tensor
    reward_N: Tensor
    advantage_N: Tensor
    credit_NT: Tensor
    sampler_logp_NT: Tensor
    scale_NT: Tensor
    ref_logp_NT: Tensor | None = None
    update_NT: Tensor | None = None
    advantage_NT: Tensor | None = None
    anchor_logp_NT: Tensor | None = None  # where ratios start, if not from the sampler's
    ref_kl_NT: Tensor | None = None
    rollout_scale_N: Tensor | None = None

    @property
    def sign_NT(self) -> Tensor:
        """The sign of the advantage of each token's turn, else of its rollout: [N, T] or [N, 1]."""
        advantage_NT = self.advantage_N[:, None] if self.advantage_NT is None else self.advantage_NT
        return advantage_NT.sign()

    def select(self, pick_R: Tensor) -> Rows:
        """A cut of these rows; ``pick_R`` indexes into them."""
        columns: list[Any] = [None if column is None else column[pick_R] for column in self]
        return Rows(*columns)


class TokenLoss(NamedTuple):
    """One value a token, never reduced: ``total = (loss_NT * rows.scale_NT).sum()``.

    ``coef_NT`` is minus the derivative of a token's loss by its own log-prob: times ``scale_NT`` it
    is the coefficient with which the token's gradient enters the update. Padding has loss 0, coef
    0, ratio 1 and is never clipped."""

    loss_NT: Tensor
    ratio_NT: Tensor
    clipped_NT: Tensor
    coef_NT: Tensor
