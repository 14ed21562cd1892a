"""Rollouts of all members at once: one decode step serves every row of every member.

On an accelerator the step is captured in a CUDA graph. A row draws from the random stream of its
own member and number, as in ``counterpoise.sampling``.

Axes: S members, N rows of a member, T response tokens, P prompts of a member, W prompt width,
    B = S x N slots, L cache slots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.arena.forward import decode, hidden_states
from counterpoise.arena.stack import Stack, restructure
from counterpoise.arena.texts import Asked
from counterpoise.sampling.decoder import Weights
from counterpoise.sampling.draw import Draw, argmax, candidates, draw, truncate
from counterpoise.sampling.slots import Columns, Settings, Slots, empty_columns, record

STEPS = 8  # decode steps on an accelerator between two looks at whether anyone still runs
GRAIN = 64  # cache slots are a multiple of this


class Lane(NamedTuple):
    """The fixed tensors of one kind of call (so many rows, so long, with these settings), and the
    graph of its step.
    """

    slots: Slots
    columns: Columns
    keys: Tensor
    values: Tensor
    graph: list[Any]


class StackSampler:
    """Weights as decoding reads them, and a lane per kind of call."""

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        self.stack, self.dtype = stack, dtype
        self.buffer_SP = stack.theta_SP if dtype == torch.float32 else stack.theta_SP.to(dtype)
        self.lanes: dict[tuple[Any, ...], Lane] = {}

    @property
    def weights(self) -> Weights:
        """Matrices in the matmuls' precision; norms and the embedding in that of the stack."""
        low, full = restructure(self.stack, self.buffer_SP), self.stack.weights
        layers = tuple(
            one._replace(
                input_norm=own.input_norm.detach(),
                middle_norm=own.middle_norm.detach(),
                query_norm=None if own.query_norm is None else own.query_norm.detach(),
                key_norm=None if own.key_norm is None else own.key_norm.detach(),
            )
            for one, own in zip(low.layers, full.layers)
        )
        return Weights(full.embed_VD.detach(), layers, full.norm_D.detach(), low.head_DV)

    @torch.no_grad()
    def fill(
        self, asked: Asked, group_size: int, uniform_BT: Tensor, settings: Settings
    ) -> Columns:
        """Sample ``group_size`` answers to every prompt of every member.

        Every member has the same number of prompts. Row ``s * N + p * group_size + g`` is the g-th
        answer of member s to its prompt p. The columns are the lane's own: copy what you keep.
        """
        if self.buffer_SP is not self.stack.theta_SP:
            self.buffer_SP.copy_(self.stack.theta_SP)
        num_rows = asked.length_SP.numel() * group_size
        length = -(-(asked.ids_SPW.shape[2] + settings.max_new_tokens) // GRAIN) * GRAIN
        lane = self._lane(num_rows, length, settings)
        self._admit(lane, asked, group_size, uniform_BT)
        for step in range(settings.max_new_tokens):
            self._step(lane, settings)
            if (lane.keys.device.type == "cpu" or step % STEPS == STEPS - 1) and not bool(
                lane.slots.alive_B.any()
            ):
                break
        return lane.columns

    def _lane(self, num_rows: int, length: int, settings: Settings) -> Lane:
        key = num_rows, settings
        lane = self.lanes.get(key)
        if lane is None or lane.keys.shape[3] < length:
            self.lanes.pop(key, None)
            del lane
            self.lanes[key] = self._new_lane(num_rows, length, settings)
        return self.lanes[key]

    def _new_lane(self, num_rows: int, length: int, settings: Settings) -> Lane:
        shape, device = self.stack.shape, self.stack.theta_SP.device
        size = (shape.num_layers, num_rows, shape.num_kv_heads, length, shape.head_size)
        keys, values = (torch.zeros(size, dtype=self.dtype, device=device) for _ in range(2))
        whole = torch.zeros(num_rows, dtype=torch.long, device=device)
        slots = Slots(whole, whole.clone(), whole.clone(), whole.clone(), whole.bool())
        columns = empty_columns(num_rows, settings, self.weights.head_DV, device)
        return Lane(slots, columns, keys, values, [])

    def _admit(self, lane: Lane, asked: Asked, group_size: int, uniform_BT: Tensor) -> None:
        """Read every prompt once and give each of its rows a copy of its cache."""
        device, ids_SPW, length_Q = lane.keys.device, asked.ids_SPW, asked.length_SP.flatten()
        width = ids_SPW.shape[2]
        cache: list[tuple[Tensor, Tensor]] = []
        stack = self.stack
        hidden_states(self.weights, stack.shape, ids_SPW, stack.cos_LC, stack.sin_LC, cache)
        for number, (keys, values) in enumerate(cache):
            for buffer, part in ((lane.keys, keys), (lane.values, values)):
                rows = buffer[number, :, :, :width].unflatten(0, (len(length_Q), group_size))
                rows.copy_(part[:, None].expand_as(rows))
        # the last prompt token is fed again by the first step, which draws the first response token
        last_Q = ids_SPW.flatten(0, 1).gather(1, length_Q[:, None] - 1)[:, 0]
        slots = lane.slots
        slots.token_B.copy_(last_Q.repeat_interleave(group_size))
        slots.position_B.copy_((length_Q - 1).repeat_interleave(group_size))
        slots.age_B.zero_()
        slots.row_B.copy_(torch.arange(len(slots.row_B), device=device))
        slots.alive_B.fill_(True)
        if uniform_BT.shape[1]:
            lane.columns.uniform_NT[:-1].copy_(uniform_BT)

    def _step(self, lane: Lane, settings: Settings) -> None:
        if lane.keys.device.type == "cpu":
            return self._decode(lane, settings)
        if not lane.graph:
            lane.graph.append(self._capture(lane, settings))
        lane.graph[0].replay()

    def _capture(self, lane: Lane, settings: Settings) -> Any:
        """A graph of one step; the state it starts from is put back after the warm-up."""
        state = [t for t in (*lane.slots, *lane.columns) if t is not None]
        values = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(lane, settings)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode(lane, settings)
        for tensor, value in zip(state, values):
            tensor.copy_(value)
        return graph

    def _decode(self, lane: Lane, settings: Settings) -> None:
        """One token for every row, all in place."""
        stack, weights, slots = self.stack, self.weights, lane.slots
        # a row that has stopped reads one key: nobody reads what it goes on to draw
        position_B = slots.position_B * slots.alive_B
        hidden_SBD = decode(
            weights,
            stack.shape,
            slots.token_B,
            position_B,
            lane.keys,
            lane.values,
            stack.cos_LC,
            stack.sin_LC,
        )
        logits_BV = (hidden_SBD @ weights.head_DV).flatten(0, 1)
        uniform_B = lane.columns.uniform_NT[slots.row_B, slots.age_B]
        drawn = pick_tokens(logits_BV, uniform_B, settings)
        best = candidates(logits_BV, settings.temperature, settings.topk) if settings.topk else None
        record(slots, lane.columns, settings, drawn, hidden_SBD.flatten(0, 1), best)


def pick_tokens(logits_BV: Tensor, uniform_B: Tensor, settings: Settings) -> Draw:
    """A token per row, by the kernel where one is there for it."""
    is_whole = settings.top_p >= 1 and not 0 < settings.top_k < logits_BV.shape[1]
    if logits_BV.is_cuda and is_whole and not settings.is_greedy:
        from counterpoise.sampling.kernels import triton_draw

        return Draw(*triton_draw.draw(logits_BV, uniform_B, settings.temperature))
    scaled_BV = logits_BV.float() / settings.temperature
    if settings.is_greedy:
        return argmax(scaled_BV)
    return draw(truncate(scaled_BV, top_k=settings.top_k, top_p=settings.top_p), uniform_B)
