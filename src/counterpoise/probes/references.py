"""What credit rules are held against: the control and plain signals, which are no methods.

``uniform`` is the control. The others weigh a token by what the sampler knew of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from counterpoise.types import TokenBatch

UNIFORM = "uniform"


def reference_weights(batch: TokenBatch) -> dict[str, Tensor]:
    """A weight >= 0 per token by name, 0 on padding; those that need the entropy where it is there.

    >>> batch = TokenBatch.from_lists([[5]], group=[0], reward=[1.0], sampler_logp=[[-1.0]])
    >>> (
    ...     list(reference_weights(batch)),
    ...     list(reference_weights(batch.replace(entropy_NT=torch.ones(1, 1))))[3:],
    ... )
    (['uniform', '-logp', '1 - p'], ['entropy', 'max(0, -logp - entropy)'])
    """
    logp_NT, entropy_NT = batch.sampler_logp_NT, batch.entropy_NT
    out = {UNIFORM: torch.ones_like(logp_NT), "-logp": -logp_NT, "1 - p": -logp_NT.expm1()}
    if entropy_NT is not None:
        out["entropy"] = entropy_NT
        out["max(0, -logp - entropy)"] = -logp_NT - entropy_NT
    return {name: weight_NT.clamp(min=0) * batch.mask_NT for name, weight_NT in out.items()}
