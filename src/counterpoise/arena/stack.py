"""A stack: the weights of many members of one architecture, one row of a buffer each.

Every tensor of a decoder is a view [S, ...] of the buffer, so that a matmul of all members is one
batched matmul, and the optimizer is a few operations on the buffer.

Axes: S members, P parameters of a member, V vocabulary, D hidden size, L positions, C head size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from counterpoise.policy.architecture import why_not_llama_like
from counterpoise.sampling.decoder import Layer, Shape, Weights, fuse_weights, rotary, shape_of


class Stack(NamedTuple):
    """Members side by side.

    Args:
        theta_SP: all weights; ``leaves`` are views of it.
        grad_SP: all gradients; the leaves accumulate into views of it.
        leaves: what autograd sees, a tensor [S, ...] per piece.
        pieces: shape of every piece of a row of ``theta_SP``, in order.
        like: weights of one model, for which tensors a layer has.
        is_tied: whether the head is the embedding.
    """

    theta_SP: Tensor
    grad_SP: Tensor
    leaves: tuple[Tensor, ...]
    shape: Shape
    pieces: tuple[torch.Size, ...]
    like: Weights
    is_tied: bool
    cos_LC: Tensor
    sin_LC: Tensor

    @property
    def num_members(self) -> int:
        return len(self.theta_SP)

    @property
    def weights(self) -> Weights:
        """The leaves by their meaning, with a first axis S; norms and biases have axes of one for
        the tokens.

        Made anew for every forward: autograd rebuilds the history of an older view from memory
        addresses once the weights have changed, and gets it wrong.
        """
        return assemble(self.leaves, self.like, self.is_tied)

    def head_VD(self, member: int) -> Tensor:
        """The head's weight of one member, as ``model.get_output_embeddings().weight``."""
        return self.weights.head_DV[member].detach().T


def why_not_stackable(model: PreTrainedModel) -> str | None:
    """Why members of this model cannot train side by side; None if they can."""
    reason = why_not_llama_like(model)
    if reason:
        return reason
    if any(isinstance(module, nn.Dropout) and module.p for module in model.modules()):
        return "dropout"
    if any(not parameter.requires_grad for parameter in model.parameters()):
        return "frozen weights"
    return None


def stack_of(model: PreTrainedModel, num_members: int) -> Stack:
    """``num_members`` copies of a model, in float32."""
    reason = why_not_stackable(model)
    if reason:
        raise ValueError(f"arena: this model cannot be stacked ({reason}).")
    one = fuse_weights(model, torch.float32)
    is_tied = model.lm_head.weight is model.model.embed_tokens.weight
    pieces = list(_pieces(one, is_tied))
    row_P = torch.cat([piece.detach().float().reshape(-1) for piece in pieces])
    theta_SP = row_P.repeat(num_members, 1)
    limit = model.config.max_position_embeddings
    return build(
        theta_SP, one, shape_of(model), [p.shape for p in pieces], is_tied, rotary(model, limit)
    )


def build(
    theta_SP: Tensor,
    like: Weights,
    shape: Shape,
    pieces: Sequence[torch.Size],
    is_tied: bool,
    turns: tuple[Tensor, Tensor],
) -> Stack:
    """A stack over a buffer; ``like`` says which tensors a layer has."""
    # gradients are views of a buffer on purpose
    warnings.filterwarnings("ignore", message="grad and param do not obey the gradient layout")
    grad_SP = torch.zeros_like(theta_SP)
    leaves = tuple(split(theta_SP, pieces))
    for leaf, grad in zip(leaves, split(grad_SP, pieces)):
        leaf.requires_grad_(True)
        leaf.grad = grad
    return Stack(theta_SP, grad_SP, tuple(leaves), shape, tuple(pieces), like, is_tied, *turns)


def split(buffer_SP: Tensor, pieces: Sequence[torch.Size]) -> Iterator[Tensor]:
    """The pieces of a buffer, [S, ...] views; vectors get an axis for the tokens."""
    start = 0
    for size in pieces:
        end = start + math.prod(size)
        shape = size if len(size) > 1 else (1, *size)
        yield buffer_SP[:, start:end].detach().unflatten(1, shape)
        start = end


def assemble(parts: Sequence[Tensor], like: Weights, is_tied: bool) -> Weights:
    """``Weights`` from pieces in the order of ``_pieces``."""
    taken = iter(parts)
    embed = next(taken)
    layers = []
    for layer in like.layers:
        fields = [None if old is None else next(taken) for old in layer]
        # query and key norm have an axis for the heads too
        fields[-2:] = [None if part is None else part.unsqueeze(1) for part in fields[-2:]]
        layers.append(Layer(*fields))  # pyright: ignore[reportArgumentType]
    norm = next(taken)
    head = embed.transpose(1, 2) if is_tied else next(taken)
    return Weights(embed, tuple(layers), norm, head)


def restructure(stack: Stack, buffer_SP: Tensor) -> Weights:
    """Another buffer of the same layout (other precision, some members) as ``Weights``."""
    return assemble(list(split(buffer_SP, stack.pieces)), stack.like, stack.is_tied)


def _pieces(weights: Weights, is_tied: bool) -> Iterator[Tensor]:
    yield weights.embed_VD
    for layer in weights.layers:
        yield from (part for part in layer if part is not None)
    yield weights.norm_D
    if not is_tied:
        yield weights.head_DV
