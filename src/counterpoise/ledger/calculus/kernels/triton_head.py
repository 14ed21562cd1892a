"""What an update did at the head, from the logits before and after it in one kernel: log-probs,
entropy, KL and the head's own part of each token.

Axes: M tokens, V vocabulary.
"""

# pyright: reportIndexIssue=false, reportMissingImports=false, reportArgumentType=false, reportUnusedExpression=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def compare_logits(
    before_MV: Tensor, after_MV: Tensor, target_M: Tensor, response_MV: Tensor | None
) -> Tensor:
    """[5, M]: log-prob before and after, entropy before, KL(after || before), and ``sum_v r_v
    u_v^2`` with ``u = e_a - pi``.

    Args:
        before_MV, after_MV: logits in float32.
        target_M: token ids.
        response_MV: r; None is 1 everywhere.
    """
    num_tokens, size = before_MV.shape
    out_5M = torch.empty(5, num_tokens, dtype=torch.float32, device=before_MV.device)
    if num_tokens:
        _compare[(num_tokens,)](
            *(before_MV.contiguous(), after_MV.contiguous(), target_M),
            *(before_MV if response_MV is None else response_MV.contiguous(), out_5M),
            *(num_tokens, size, response_MV is not None),
            min(BLOCK, triton.next_power_of_2(size)),
            num_warps=8,
        )
    return out_5M


@triton.jit(do_not_specialize=["num_tokens"])
def _compare(
    before_ptr,
    after_ptr,
    target_ptr,
    response_ptr,
    out_ptr,
    num_tokens,
    size,
    HAS_RESPONSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    before_ptr += row * size
    after_ptr += row * size
    response_ptr += row * size
    target = tl.load(target_ptr + row)
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    most_after = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        here = v < size
        most = tl.maximum(most, tl.load(before_ptr + v, mask=here, other=-float("inf")))
        most_after = tl.maximum(most_after, tl.load(after_ptr + v, mask=here, other=-float("inf")))
    top = tl.max(most, 0)
    top_after = tl.max(most_after, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    total_after = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        here = v < size
        total += tl.exp(tl.load(before_ptr + v, mask=here, other=-float("inf")) - top)
        total_after += tl.exp(tl.load(after_ptr + v, mask=here, other=-float("inf")) - top_after)
    norm = tl.log(tl.sum(total, 0))
    norm_after = tl.log(tl.sum(total_after, 0))
    entropy = tl.zeros((BLOCK,), tl.float32)
    kl = tl.zeros((BLOCK,), tl.float32)
    own = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        v = start + tl.arange(0, BLOCK)
        here = v < size
        logp = tl.load(before_ptr + v, mask=here, other=0.0) - top - norm
        after = tl.load(after_ptr + v, mask=here, other=0.0) - top_after - norm_after
        p = tl.exp(logp)
        p_after = tl.exp(after)
        entropy -= tl.where(here, p * logp, 0.0)
        kl += tl.where(here, _kl_term(after - logp, p, p_after), 0.0)
        u = tl.where(v == target, 1.0, 0.0) - p
        r = 1.0
        if HAS_RESPONSE:
            r = tl.load(response_ptr + v, mask=here, other=0.0)
        own += tl.where(here, u * u * r, 0.0)
    logp = tl.load(before_ptr + target) - top - norm
    after = tl.load(after_ptr + target) - top_after - norm_after
    tl.store(out_ptr + row, logp)
    tl.store(out_ptr + num_tokens + row, after)
    tl.store(out_ptr + 2 * num_tokens + row, tl.sum(entropy, 0))
    tl.store(out_ptr + 3 * num_tokens + row, tl.sum(kl, 0))
    tl.store(out_ptr + 4 * num_tokens + row, tl.sum(own, 0))


@triton.jit
def _kl_term(x, p, p_after):
    """``p' (exp(-x) - 1 + x)``, x = log p' - log p: a series where it would cancel, and in the form
    that does not overflow for tokens that all but vanished.
    """
    series = 1 / 720 - x / 5040
    series = 1 / 24 + x * (-1 / 120 + x * series)
    series = x * x * (0.5 + x * (-1 / 6 + x * series))
    is_near = tl.abs(x) < 0.4
    bounded = tl.where(x < -1.0, -1.0, x)
    plain = p_after * (tl.exp(-bounded) - 1 + bounded)
    far = p + p_after * (x - 1)
    return tl.where(is_near, p_after * series, tl.where(x < -1.0, far, plain))
