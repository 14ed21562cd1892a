"""Sample from a policy: its precision, its stop and padding tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from counterpoise.policy import Policy
from counterpoise.policy.precision import autocast
from counterpoise.sampling.sample import Rollouts, sample


def sample_from(
    policy: Policy, *prompts: Any, by: Callable[..., Rollouts] = sample, **settings: Any
) -> Rollouts:
    """``by`` (``sample`` or ``branch``) on the policy's model, as it is trained."""
    with autocast(policy.model):
        return by(
            policy.model,
            *prompts,
            stop_ids=policy.stop_ids,
            pad_id=policy.tokenizer.pad_token_id,
            **settings,
        )
