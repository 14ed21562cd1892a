"""counterpoise inside TRL: ``from counterpoise.hosts.trl import CreditGRPOConfig,
CreditGRPOTrainer``.
"""

try:
    from trl.trainer import grpo_trainer  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"counterpoise.hosts.trl needs TRL: pip install 'counterpoise[trl]' ({error})"
    ) from error

from counterpoise.hosts.trl.conversations import as_rollout_func
from counterpoise.hosts.trl.environment import as_trl
from counterpoise.hosts.trl.told import turn_reward
from counterpoise.hosts.trl.trainer import CreditGRPOConfig, CreditGRPOTrainer, CreditMixin

__all__ = [
    "CreditGRPOConfig",
    "CreditGRPOTrainer",
    "CreditMixin",
    "as_rollout_func",
    "as_trl",
    "turn_reward",
]
