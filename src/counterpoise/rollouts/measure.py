"""Scoring finished rollouts: the columns that rules need (no gradient), and the differentiable log-probs of training.

Rows are prompt + response, right-padded: with causal attention nothing after a token reaches it, so no attention mask is needed and the
fastest kernels apply. Only response positions go through the head, a chunk of tokens at a time.

Log-probs here are of ``softmax(z / temperature)``: the sampling distribution before truncation. A sampler that also truncated
(top-k, top-p) renormalised over the tokens it kept, so its ``sampler_logp_NT`` is higher than ``trainer_logp_NT`` of the same weights.

Axes: N rollouts, T response tokens, B rows of one forward, L tokens of prompt + response, M response tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from counterpoise.numerics_head import head_logp, head_scores
from counterpoise.rollouts.backbone import backbone, evaluating

MEASURED = frozenset({"trainer_logp_NT", "entropy_NT", "hidden_NTD", "topk_ids_NTK", "topk_logp_NTK", "ref_logp_NT", "head_VD"})
