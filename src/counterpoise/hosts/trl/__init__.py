"""counterpoise inside TRL: ``from counterpoise.hosts.trl import CreditGRPOConfig,
CreditGRPOTrainer``.
"""

from counterpoise.hosts.trl.trainer import CreditGRPOConfig, CreditGRPOTrainer, CreditMixin
from counterpoise.hosts.trl.turns import turn_reward

__all__ = ["CreditGRPOConfig", "CreditGRPOTrainer", "CreditMixin", "turn_reward"]
