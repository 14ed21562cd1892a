"""What the tests of credit rules share: batches with a credit, short makers, comparisons that name
the rule.
"""

from __future__ import annotations

import threading

import torch
from hypothesis import settings
from hypothesis import strategies as st

from counterpoise.maths.reduce import LOCAL, Reduce, seeded_generator
from counterpoise.stage import call
from counterpoise.types import TokenBatch
from helpers.strategies import ragged_batches

ADVANTAGES = st.sampled_from([-1.5, -0.5, 0.0, 0.25, 2.0])
laws = settings(max_examples=30)


@st.composite
def credited_batches(draw, **options):
    """A batch and a credit: one number per rollout (the first rule of a chain), or any number per
    token (a later rule).
    """
    batch = draw(ragged_batches(**options))
    per_rollout = draw(
        st.lists(ADVANTAGES, min_size=batch.num_rollouts, max_size=batch.num_rollouts)
    )
    credit_NT = torch.tensor(per_rollout, dtype=torch.float64)[:, None] * batch.mask_NT
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
        credit_NT = (
            credit_NT
            * torch.tensor([-1.0, 0.0, 0.5, 1.0]).double()[
                torch.randint(4, credit_NT.shape, generator=generator)
            ]
        )
    return batch, credit_NT + 0.0


def as_lists(value_NT, batch):
    return [row[:n] for row, n in zip(value_NT.tolist(), batch.length_N.tolist())]


def pad_prompts(rows, width):
    return torch.tensor([row + [0.0] * (width - len(row)) for row in rows], dtype=torch.float64)


def assert_equal(actual, expected, name="", tolerance=1e-12):
    torch.testing.assert_close(
        actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}"
    )


def assert_rows(actual_NT, rows, name=""):
    assert_equal(actual_NT, pad_prompts(rows, actual_NT.shape[1]), name)


def name_of(rule):
    return f"{rule.__name__}({rule.params})"


def batch_of(ids, *, group=None, reward=None, **columns):
    """A float64 batch; log-probs of -1 unless given."""
    columns = {"sampler_logp": [[-1.0] * len(row) for row in ids], **columns}
    return TokenBatch.from_lists(
        ids,
        group=group or [0] * len(ids),
        reward=reward or [0.0] * len(ids),
        dtype=torch.float64,
        **columns,
    )


def spread(advantages, batch):
    return torch.tensor(advantages, dtype=torch.float64)[:, None] * batch.mask_NT


def run(rule, credit_NT, batch, reduce=LOCAL):
    return call(rule, credit_NT, batch, reduce=reduce, generator=seeded_generator(0, 0, "test"))


def on_two_ranks(rule, credit_NT, batch, cut):
    """The rule on two halves of the batch, in two threads that exchange through the hook as ranks
    do.
    """
    barrier, box, out = threading.Barrier(2, timeout=600), [None, None], [None, None]

    def exchange(rank, value):
        box[rank] = value
        barrier.wait()
        parts = list(box)
        barrier.wait()
        return parts

    def work(rank):
        row_R = (cut if rank else ~cut).nonzero().flatten()
        hook = Reduce(
            sum=lambda v: sum(exchange(rank, v)), cat=lambda v: torch.cat(exchange(rank, v))
        )
        out[rank] = run(rule, credit_NT[row_R], batch.select(row_R), hook)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out
