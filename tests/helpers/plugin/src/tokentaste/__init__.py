"""Methods from outside, installed by tests/catalogue/test_plugins.py: ``taste`` doubles the credit
of a rollout's first tokens, ``retry`` samples failed prompts once more.
"""

import counterpoise as cp


def first_tokens(credit_NT, batch, *, count: int = 2):
    """credit' = 2 credit on the first ``count`` response tokens."""
    if count < 0:
        raise ValueError(f"first_tokens: count must be >= 0, got {count}.")
    is_first_NT = batch.mask_NT.cumsum(1) <= count
    return credit_NT * (1 + is_first_NT.to(credit_NT.dtype))


def asks_again(*, extra: int) -> bool:
    return extra > 0


def try_again(rollouts, sampler, *, extra: int, nudge: str):
    """``extra`` further answers to every prompt whose rollouts all failed, asked with a nudge."""
    batch = rollouts.batch
    first = {group: row for row, group in reversed(list(enumerate(batch.group_N.tolist())))}
    solved = set(batch.group_N[batch.is_success_N].tolist())
    rows = [row for group, row in first.items() if group not in solved]
    if not rows:
        return rollouts
    group = batch.group_N.tolist()
    prompts = [rollouts.prompts[group[row]].text + nudge for row in rows]
    more = sampler.answer(rollouts, rows, prompts, samples=extra, purpose="retry")
    return rollouts.extend(sampler.score(more))


@cp.declare(collect=try_again, samples_more=asks_again)
def retried(credit_NT, batch, *, extra: int = 2, nudge: str = ""):
    """credit' = credit; failed prompts were asked again before it was assigned."""
    return credit_NT


def register():
    cp.register_rule("retried", retried)
    cp.register_method("retry", cp.method("dapo", credit=["retried"]))
    cp.register_rule("first_tokens", first_tokens)
    cp.register_method("taste", cp.method("dapo", credit=[{"name": "first_tokens", "count": 1}]))
