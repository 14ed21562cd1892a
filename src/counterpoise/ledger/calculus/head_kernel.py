"""The head's kernel between tokens: ``<g_j, g_k>_W = phi_jk <h_j, h_k>``, exact, without a tensor
[n, n, V].

g_j = (e_a - pi_j) (x) h_j is the gradient of token j's log-prob by the head's weight, so

    phi_jk = 1[a_j = a_k] - pi_j(a_k) - pi_k(a_j) + <pi_j, pi_k>.

For identical tokens phi >= (1 - p_j)(1 - p_k) >= 0, and always |phi| <= 2 (1 - p_j)(1 - p_k): one
confident token removes the coupling. At temperature 1 and for a head without scale and cap.

Axes: M (and K) tokens, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CONFIDENT = 0.9  # probability from which a token counts as confident


class HeadKernel(NamedTuple):
    """``phi_MM`` and the Gram matrix of hidden states; ``confidence_M`` is p of each token."""

    phi_MM: Tensor
    gram_MM: Tensor
    confidence_M: Tensor

    @property
    def kernel_MM(self) -> Tensor:
        """<g_j, g_k> over the head's weight."""
        return self.phi_MM * self.gram_MM


@torch.no_grad()
def head_kernel(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    target_M: Tensor,
    bias_V: Tensor | None = None,
    *,
    chunk: int = 4096,
) -> HeadKernel:
    """phi and the hidden Gram matrix of all pairs of tokens, a slice of the vocabulary at a time:
    memory M x (M + chunk).

    Args:
        hidden_MD: what feeds the head at each token.
        weight_VD, bias_V: the head.
        target_M: token ids.
        chunk: vocabulary entries whose probabilities are alive at once.

    >>> out = head_kernel(
    ...     torch.zeros(2, 1), torch.zeros(4, 1), torch.tensor([0, 0])
    ... )  # pi = 1/4: 1 - 1/4 - 1/4 + 4/16
    >>> out.phi_MM[0, 1].item(), out.gram_MM[0, 1].item()
    (0.75, 0.0)
    """
    hidden_MD = hidden_MD.to(torch.promote_types(hidden_MD.dtype, torch.float32))
    slices = [slice(start, start + chunk) for start in range(0, len(weight_VD), chunk)]
    norm_M = torch.stack(
        [_logits(hidden_MD, weight_VD, bias_V, part).logsumexp(-1) for part in slices]
    ).logsumexp(0)
    overlap_MM = hidden_MD.new_zeros(len(target_M), len(target_M))
    at_token_MM = torch.zeros_like(overlap_MM)  # [j, k] = pi_j(a_k)
    for part in slices:
        pi_MV = (_logits(hidden_MD, weight_VD, bias_V, part) - norm_M[:, None]).exp()
        overlap_MM += pi_MV @ pi_MV.T
        is_here_M = (target_M >= part.start) & (target_M < part.stop)
        at_token_MM[:, is_here_M] = pi_MV[:, target_M[is_here_M] - part.start]
    is_same_MM = target_M[:, None] == target_M
    phi_MM = is_same_MM.to(overlap_MM.dtype) - at_token_MM - at_token_MM.T + overlap_MM
    return HeadKernel(phi_MM, hidden_MD @ hidden_MD.T, at_token_MM.diagonal().clone())


def coupling_table(
    kernel: HeadKernel, target_M: Tensor, prompt_M: Tensor, sign_M: Tensor
) -> list[dict[str, Any]]:
    """Pairs of different tokens by identical/different id x confidence x prompt x sign: how many,
    and how strongly they couple.

    ``confidence`` counts the confident tokens of a pair (p >= 0.9): none, one, both. ``prompt`` and
    ``sign`` say same or different. Each row has ``pairs``, ``mean_phi``, ``mean_abs_phi``,
    ``mean_kernel``, ``mean_abs_kernel`` and ``abs_frac``, its share of sum |kernel| over all pairs.
    Rows without pairs are left out."""
    upper_MM = torch.ones_like(kernel.phi_MM, dtype=torch.bool).triu(1)
    is_confident_M = (kernel.confidence_M >= CONFIDENT).long()
    code_MM = (is_confident_M[:, None] + is_confident_M) * 8
    for weight, value_M in ((4, target_M), (2, prompt_M), (1, sign_M)):
        code_MM = code_MM + weight * (value_M[:, None] == value_M).long()
    code, kernel_MM = code_MM[upper_MM], kernel.kernel_MM
    columns = {"phi": kernel.phi_MM[upper_MM], "abs_phi": kernel.phi_MM[upper_MM].abs()}
    columns |= {"kernel": kernel_MM[upper_MM], "abs_kernel": kernel_MM[upper_MM].abs()}
    count = torch.bincount(code, minlength=24)
    sums = {
        name: torch.bincount(code, value.double(), minlength=24) for name, value in columns.items()
    }
    total = float(sums["abs_kernel"].sum())
    rows = []
    for c in count.nonzero().flatten().tolist():
        means = {f"mean_{name}": float(value[c] / count[c]) for name, value in sums.items()}
        frac = float(sums["abs_kernel"][c]) / total if total else 0.0
        rows.append({**_bucket(c), "pairs": int(count[c]), **means, "abs_frac": frac})
    return rows


def _bucket(code: int) -> dict[str, str]:
    return {
        "token": "identical" if code & 4 else "different",
        "confidence": ("none", "one", "both")[code // 8],
        "prompt": "same" if code & 2 else "different",
        "sign": "same" if code & 1 else "different",
    }


def _logits(hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, part: slice) -> Tensor:
    logits_MV = hidden_MD @ weight_VD[part].to(hidden_MD.dtype).T
    return logits_MV if bias_V is None else logits_MV + bias_V[part]
