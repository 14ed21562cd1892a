"""Hypothesis strategies shared by the test modules."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from counterpoise.types import TokenBatch

# coarse grids: ties are common and comparisons do not hang on the last bit
LOGP = st.integers(0, 400).map(lambda k: -k / 50)
ENTROPY = st.integers(0, 100).map(lambda k: k / 25)


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
    """A batch of ragged rollouts in 1..max_groups groups of different sizes, rows of the groups interleaved.

    The small vocabulary makes shared prefixes, repeated tokens and identical rollouts common. Entropy, trainer and reference log-probs are
    there; ties of log-prob and entropy occur.
    """
    sizes = draw(st.lists(st.integers(min_group_size, max_group_size), min_size=1, max_size=max_groups))
    group = draw(st.permutations([3 * g + 1 for g, size in enumerate(sizes) for _ in range(size)]))
    lengths = [draw(st.integers(1, max_length)) for _ in group]

    def column(element: st.SearchStrategy) -> list[list]:
        return [draw(st.lists(element, min_size=n, max_size=n)) for n in lengths]

    return TokenBatch.from_lists(
        column(st.integers(0, vocab - 1)),
        group=group,
        reward=draw(st.lists(st.sampled_from(rewards), min_size=len(group), max_size=len(group))),
        sampler_logp=column(LOGP),
        trainer_logp=column(LOGP),
        ref_logp=column(LOGP),
        entropy=column(ENTROPY),
        dtype=dtype,
    )
