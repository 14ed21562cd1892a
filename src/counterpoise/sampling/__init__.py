"""Sample rollouts from a policy: whole batches, or fresh completions from a prefix."""

from counterpoise.sampling.branch import branch
from counterpoise.sampling.policy import sample_from
from counterpoise.sampling.sample import Rollouts, sample
from counterpoise.sampling.slots import SAMPLED
from counterpoise.sampling.which import sampler_of

__all__ = ["SAMPLED", "Rollouts", "branch", "sample", "sample_from", "sampler_of"]
