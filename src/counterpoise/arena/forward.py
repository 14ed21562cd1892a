"""The decoder of all members at once: one batched matmul where a model has a matmul.

Rows stand at the left: prompt, response, padding. A causal mask is then all that attention needs.

Axes: S members, R rows of a member, L tokens of a row, T response tokens, D hidden size,
    V vocabulary, C head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from counterpoise.sampling.decoder import Shape, Weights, embed, heads, norm, rest


def embed_rows(weights: Weights, ids_SRL: Tensor) -> Tensor:
    """Each member's own embedding of its rows, [S, R, L, D]."""
    return embed(weights.embed_VD, ids_SRL.flatten(1)).unflatten(1, ids_SRL.shape[1:])


def hidden_states(
    weights: Weights,
    shape: Shape,
    ids_SRL: Tensor,
    cos_LC: Tensor,
    sin_LC: Tensor,
    cache: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """The final normed hidden states, [S, R, L, D]; keys and values of every layer, [S * R, K, L,
    C], are added to ``cache``.
    """
    x_SRLD = embed_rows(weights, ids_SRL)
    return hidden_of_embeddings(weights, shape, x_SRLD, cos_LC, sin_LC, cache)


def hidden_of_embeddings(
    weights: Weights,
    shape: Shape,
    x_SRLD: Tensor,
    cos_LC: Tensor,
    sin_LC: Tensor,
    cache: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """``hidden_states`` of tokens that are embedded already; on CUDA by fused layers."""
    if x_SRLD.is_cuda:
        from counterpoise.arena.kernels.triton_layers import hidden_of_embeddings as fused

        return fused(weights, shape, x_SRLD, cos_LC, sin_LC, cache)
    num_rows, length = x_SRLD.shape[1:3]
    cos, sin = (turn[:length].repeat(num_rows, 1)[:, None] for turn in (cos_LC, sin_LC))
    x_SMD = x_SRLD.flatten(1, 2)
    for layer in weights.layers:
        q, k, v = (
            part.unflatten(1, (num_rows, length)).flatten(0, 1).transpose(1, 2)
            for part in heads(layer, shape, x_SMD, cos, sin)
        )
        mixed = attend_causal(shape, q, k, v, cache)
        x_SMD = rest(layer, shape, x_SMD, mixed.reshape(*x_SMD.shape[:2], -1))
    return norm(x_SMD, weights.norm_D, shape.eps).unflatten(1, (num_rows, length))


def attend_causal(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, cache: list[tuple[Tensor, Tensor]] | None
) -> Tensor:
    """Each token's mix of what its row has before it: of queries, keys and values [S * R, heads, L,
    C] the values' [S * R, L, H, C]; keys and values are added to ``cache``.
    """
    if cache is not None:
        cache.append((k, v))
    mixed = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=shape.scaling, enable_gqa=q.shape[1] != k.shape[1]
    )
    return mixed.transpose(1, 2)


def response_states(hidden_SRLD: Tensor, start_SR: Tensor, num_tokens: int) -> Tensor:
    """Hidden states that predict response tokens, [S, R, T, D].

    Args:
        start_SR: length of each row's prompt; its last token predicts the first of the response.
    """
    column_T = torch.arange(num_tokens, device=start_SR.device)
    at_SRT = (start_SR[..., None] - 1 + column_T).clamp_max(hidden_SRLD.shape[2] - 1)
    return hidden_SRLD.gather(2, at_SRT[..., None].expand(*at_SRT.shape, hidden_SRLD.shape[-1]))


def response_logits(weights: Weights, state_SRTD: Tensor, temperature: float) -> Tensor:
    """Their logits over the temperature, [S, R, T, V], float32."""
    logits_SMV = state_SRTD.flatten(1, 2) @ weights.head_DV
    logits_SRTV = logits_SMV.float().unflatten(1, state_SRTD.shape[1:3])
    return logits_SRTV if temperature == 1 else logits_SRTV / temperature


def token_logp(logits_SRTV: Tensor, token_ids_SRT: Tensor, mask_SRT: Tensor) -> Tensor:
    """Log-probs of the tokens, 0 where the mask is False."""
    picked_SRT = logits_SRTV.gather(-1, token_ids_SRT[..., None])[..., 0]
    return torch.where(mask_SRT, picked_SRT - logits_SRTV.logsumexp(-1), 0)


def decode(
    weights: Weights,
    shape: Shape,
    token_B: Tensor,
    position_B: Tensor,
    keys: Tensor,
    values: Tensor,
    cos_LC: Tensor,
    sin_LC: Tensor,
) -> Tensor:
    """One more token for all rows of all members; the final normed hidden states, [S, B / S, D].

    Args:
        token_B: B = S x rows, members one after the other.
        keys, values: [layers, B, K, L, C], written in place at ``position_B``.
    """
    num_members = len(weights.embed_VD)
    if token_B.is_cuda:
        from counterpoise.sampling.kernels import triton_decoder

        columns = (token_B, position_B, keys, values, cos_LC, sin_LC)
        return triton_decoder.decode(weights, shape, *columns).unflatten(0, (num_members, -1))
    x_SBD = embed(weights.embed_VD, token_B.view(num_members, -1))
    cos, sin = (turn[position_B].view(*x_SBD.shape[:2], 1, -1) for turn in (cos_LC, sin_LC))
    row_B = torch.arange(len(token_B), device=token_B.device)
    for number, layer in enumerate(weights.layers):
        q, k, v = (part.flatten(0, 1) for part in heads(layer, shape, x_SBD, cos, sin))
        keys[number][row_B, :, position_B] = k
        values[number][row_B, :, position_B] = v
        mixed_BF = attend(q, position_B, keys[number], values[number], shape.scaling)
        x_SBD = rest(layer, shape, x_SBD, mixed_BF.view(*x_SBD.shape[:2], -1))
    return norm(x_SBD, weights.norm_D, shape.eps).to(weights.head_DV.dtype)


def attend(
    query_BHC: Tensor, position_B: Tensor, key_BKLC: Tensor, value_BKLC: Tensor, scaling: float
) -> Tensor:
    """Attention of one query token per row over its cache up to its own position, [B, H C]."""
    is_seen_BL = torch.arange(key_BKLC.shape[2], device=position_B.device) <= position_B[:, None]
    grouped = query_BHC.unflatten(1, (key_BKLC.shape[1], -1))
    mixed = F.scaled_dot_product_attention(
        grouped, key_BKLC, value_BKLC, attn_mask=is_seen_BL[:, None, None], scale=scaling
    )
    return mixed.flatten(1)
