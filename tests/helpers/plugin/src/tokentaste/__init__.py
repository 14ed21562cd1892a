"""A method from outside: doubles the credit of a rollout's first tokens.

Installed by tests/test_plugins.py.
"""

import counterpoise as cp


def first_tokens(credit_NT, batch, *, count: int = 2):
    """credit' = 2 credit on the first ``count`` response tokens."""
    if count < 0:
        raise ValueError(f"first_tokens: count must be >= 0, got {count}.")
    is_first_NT = batch.mask_NT.cumsum(1) <= count
    return credit_NT * (1 + is_first_NT.to(credit_NT.dtype))


def register():
    cp.register_rule("first_tokens", first_tokens)
    cp.register_method("taste", cp.method("dapo", credit=[{"name": "first_tokens", "count": 1}]))
