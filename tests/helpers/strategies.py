"""Hypothesis strategies shared by the test modules."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from counterpoise.types import TokenBatch


@st.composite
def ragged_batches(
    draw: st.DrawFn,
    *,
    max_groups: int = 3,
    min_group_size: int = 1,
    max_group_size: int = 4,
    max_length: int = 6,
    vocab: int = 4,
    rewards: tuple[float, ...] = (0.0, 1.0),
    dtype: torch.dtype = torch.float64,
) -> TokenBatch:
    """A batch of ragged rollouts in 1..max_groups groups of different sizes, rows of the groups
    interleaved.

    The small vocabulary makes shared prefixes, repeated tokens and identical rollouts common.
    Entropy, trainer, reference and teacher log-probs (some rollouts lack a teacher) and importance
    (some tokens lack a score) are there, on coarse grids: ties are common and comparisons do not
    hang on the last bit. Structure, ids and rewards shrink; the floating columns come from one
    drawn seed, which keeps the generation cheap."""
    sizes = draw(
        st.lists(st.integers(min_group_size, max_group_size), min_size=1, max_size=max_groups)
    )
    group = draw(st.permutations([3 * g + 1 for g, size in enumerate(sizes) for _ in range(size)]))
    lengths = draw(st.lists(st.integers(1, max_length), min_size=len(group), max_size=len(group)))
    reward = draw(st.lists(st.sampled_from(rewards), min_size=len(group), max_size=len(group)))
    flat = draw(st.lists(st.integers(0, vocab - 1), min_size=sum(lengths), max_size=sum(lengths)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def grid(updates: int, scale: float) -> list[list[float]]:
        rows = (
            torch.randint(updates, (len(group), max_length), generator=generator).double() * scale
        )
        return [row[:n] for row, n in zip(rows.tolist(), lengths)]

    ends = torch.tensor(lengths).cumsum(0).tolist()
    return TokenBatch.from_lists(
        [flat[end - n : end] for end, n in zip(ends, lengths)],
        group=group,
        reward=reward,
        sampler_logp=grid(400, -1 / 50),
        trainer_logp=grid(400, -1 / 50),
        ref_logp=grid(400, -1 / 50),
        entropy=grid(100, 1 / 25),
        importance=[[x - 0.2 for x in row] for row in grid(30, 1 / 25)],
        teacher_logp=grid(400, -1 / 50),
        has_teacher_N=torch.randint(3, (len(group),), generator=generator) > 0,
        dtype=dtype,
    )
