"""counterpoise inside TRL: ``from counterpoise.hosts.trl import CreditGRPOConfig,
CreditGRPOTrainer``.
"""

from counterpoise.hosts.trl.trainer import CreditGRPOConfig, CreditGRPOTrainer, CreditMixin

__all__ = ["CreditGRPOConfig", "CreditGRPOTrainer", "CreditMixin"]
