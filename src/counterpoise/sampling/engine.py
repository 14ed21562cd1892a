"""The rollout engine: a static cache, prompts read once, stopped rows replaced by waiting ones.

On an accelerator a decode step is captured in a CUDA graph; on a CPU steps run in C where there is
a compiler.

The same seed gives the same tokens on the same device. A row's draws depend on its own random
stream alone; which rows share a batch changes a logit by rounding only.

Axes: N rollouts, T response tokens, B slots (rows in flight), L cache slots, P distinct prompts.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from counterpoise.policy.adapters import is_low_rank, under_adapters
from counterpoise.policy.architecture import why_not_llama_like
from counterpoise.policy.prompts import distinct, pad_prompts
from counterpoise.sampling.decoder import decode, fuse_weights, prefill, refresh, rotary, shape_of
from counterpoise.sampling.draw import Draw, argmax, candidates, draw, truncate
from counterpoise.sampling.kernels import cpu as kernels_cpu
from counterpoise.sampling.slots import (
    Columns,
    Dialogue,
    Moved,
    Settings,
    Slots,
    Watch,
    empty_cache,
    empty_columns,
    hand_over,
    record,
)
from counterpoise.sampling.talk import hold_conversations

log = logging.getLogger("counterpoise.sampling")
COMPACT_FRAC = 0.9  # the batch shrinks once no more than this share of it is alive
SYNC_STEPS = 16  # decode steps on an accelerator, or in C, between two looks at who has stopped
BUCKET = 64  # attention reads the cache up to a multiple of this
PREFILL_TOKENS = 32768  # prompt tokens of one prefill pass
_ENGINES: WeakKeyDictionary[Any, Engine | None] = WeakKeyDictionary()


def engine_for(model: PreTrainedModel) -> Engine | None:
    """The engine of a model, made once; None, with a warning, for an unknown architecture."""
    if model not in _ENGINES:
        plain = under_adapters(model)
        reason = why_not_llama_like(plain, is_low_rank)
        if reason:
            log.warning(
                "sample: the fast engine does not know this model (%s); the generic path is used.",
                reason,
            )
        _ENGINES[model] = None if reason else Engine(plain)
    return _ENGINES[model]


class Engine:
    """Fused weights, cache and captured graphs of one model; they live as long as the model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.shape = shape_of(model)
        self.weights: Any = None
        self.keys = self.values = torch.empty(0)
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.slots: Any = None
        self.columns: Any = None
        self.columns_for: tuple[Any, ...] = ()
        self.decode: Callable[..., Tensor] = decode
        self.candidates: Callable[..., tuple[Tensor, Tensor]] = candidates
        self.kernels: ModuleType | None = None
        self.panels: Any = None

    @torch.no_grad()
    def fill(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Sequence[int]],
        uniform_NT: Tensor,
        settings: Settings,
        max_rows: int,
        dialogue: Dialogue | None = None,
        watch: Watch | None = None,
    ) -> Columns:
        """Sample every row, ``prompts[i]`` being the prompt of row i; with a ``dialogue`` a row
        goes on after each of its turns with what the other side says. ``watch`` hears of rows that
        have stopped while others run.

        Adapters are added to the weights. The columns are the engine's own: copy what you keep.
        """
        model = under_adapters(model)
        device = model.device
        is_autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_autocast else model.dtype
        with torch.autocast(device.type, enabled=False):
            self._load(model, dtype)
            self._reserve(
                model, min(max_rows, len(prompts)), max(map(len, prompts)) + settings.max_new_tokens
            )
            self._reserve_columns(len(prompts), settings, uniform_NT)
            try:
                with self._as_panels() as self.panels:
                    if dialogue is None:
                        self._run(prompts, settings, watch)
                    else:
                        hold_conversations(self, prompts, settings, dialogue)
            finally:
                self.panels = None  # a copy of all weights
        return self.columns

    def _load(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        if (
            self.weights is None
            or self.weights.layers[0].qkv.dtype != dtype
            or self.weights.norm_D.device != model.device
        ):
            self.weights, self.graphs = fuse_weights(model, dtype), {}
            self.keys = self.values = torch.empty(0)
            self._choose_kernels(model, dtype)
        else:
            refresh(self.weights, model)

    def _choose_kernels(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Triton's kernels on a GPU, those in C on a CPU, if they know the dtypes; else torch."""
        self.decode, self.candidates, self.kernels, self.panels = decode, candidates, None, None
        if model.device.type == "cuda" and importlib.util.find_spec("triton") is not None:
            from counterpoise.sampling.kernels import triton_decoder as decoder_triton
            from counterpoise.sampling.kernels import triton_draw as kernels_draw

            if dtype in decoder_triton.DTYPES:
                self.decode, self.candidates, self.kernels = (
                    decoder_triton.decode,
                    kernels_draw.candidates,
                    kernels_draw,
                )
        elif model.device.type == "cpu" and kernels_cpu.can_decode(
            self.weights, self.shape, *rotary(model, 2)
        ):
            self.kernels = kernels_cpu

    def _as_panels(self) -> AbstractContextManager[Any]:
        """The weights of this call as C reads them; None where it does not."""
        if self.kernels is not kernels_cpu:
            return nullcontext()
        return kernels_cpu.panels(
            self.weights, self.shape, self.keys, self.values, self.cos, self.sin
        )

    def _reserve(self, model: PreTrainedModel, num_slots: int, num_positions: int) -> None:
        """A cache of at least this size and slots for it; a captured graph is void once an address
        changes.
        """
        num_positions = -(-num_positions // BUCKET) * BUCKET
        if (
            self.keys.dim() != 5
            or self.keys.shape[1] < num_slots
            or self.keys.shape[3] < num_positions
        ):
            self.keys = self.values = torch.empty(0)
            size = (
                self.shape.num_layers,
                num_slots,
                self.shape.num_kv_heads,
                num_positions,
                self.shape.head_size,
            )
            self.keys, self.values = empty_cache(
                size, self.weights.layers[0].qkv.dtype, model.device
            )
            self.cos, self.sin = rotary(model, num_positions)
            self.slots, self.graphs = None, {}
        num_slots = min(num_slots, self.keys.shape[1])
        if self.slots is None or len(self.slots.row_B) != num_slots:
            whole = torch.zeros(num_slots, dtype=torch.long, device=model.device)
            self.slots, self.graphs = (
                Slots(whole, whole.clone(), whole.clone(), whole.clone(), whole.bool()),
                {},
            )

    def _reserve_columns(self, num_rows: int, settings: Settings, uniform_NT: Tensor) -> None:
        asked = settings.max_new_tokens, settings.has_hidden, settings.topk, settings.has_turns
        key = (num_rows, *asked, self.weights.head_DV.dtype, uniform_NT.device)
        if self.columns_for != key:
            self.columns = empty_columns(
                num_rows, settings, self.weights.head_DV, uniform_NT.device
            )
            self.columns_for, self.graphs = key, {}
        if uniform_NT.shape[1]:
            self.columns.uniform_NT[:-1].copy_(uniform_NT)

    def _run(
        self, prompts: Sequence[Sequence[int]], settings: Settings, watch: Watch | None
    ) -> None:
        waiting = sorted(range(len(prompts)), key=lambda row: (len(prompts[row]), row))
        num_slots, running = len(self.slots.row_B), set()
        for column, start in zip(self.slots, (0, 0, 0, len(prompts), False)):
            column.fill_(start)
        while True:
            if watch is not None:
                in_use = Slots(*(column[:num_slots] for column in self.slots))
                running = hand_over(watch, in_use, self.columns, running)
            num_alive = int(self.slots.alive_B[:num_slots].sum())
            free = num_slots - num_alive
            if waiting and free >= min(len(waiting), max(1, num_slots // 8)):
                taken, waiting = waiting[:free], waiting[free:]
                slot_R = (~self.slots.alive_B).nonzero()[: len(taken), 0]
                self.admit(slot_R, taken, [prompts[row] for row in taken])
                running.update(taken)
            elif num_alive == 0:
                return
            elif (
                not waiting
                and num_alive <= num_slots * COMPACT_FRAC
                and not self.is_native(settings)
            ):
                num_slots = self.compact(self.slots.alive_B, num_slots).num_slots
            self.advance(num_slots, settings)

    def is_native(self, settings: Settings) -> bool:
        """Whether C draws and records too; its threads then leave out slots that have ended,
        wherever they lie.
        """
        return self.panels is not None and (settings.is_greedy or self._is_whole(settings))

    def _is_whole(self, settings: Settings) -> bool:
        """Whether tokens are drawn from all of the vocabulary."""
        return (
            settings.top_p >= 1.0
            and not 0 < settings.top_k < self.weights.head_DV.shape[1]
            and not settings.is_greedy
        )

    def advance(self, num_slots: int, settings: Settings) -> None:
        """The steps between two looks at who has stopped."""
        if self.is_native(settings):
            return kernels_cpu.advance(self.panels, self.slots, self.columns, settings, SYNC_STEPS)
        num_steps = (
            1 if self.keys.device.type == "cpu" else SYNC_STEPS
        )  # a look at the host costs nothing on a CPU
        seen = self._seen(num_slots, num_steps)
        for _ in range(num_steps):
            self._step(num_slots, seen, settings)

    def _seen(self, num_slots: int, num_steps: int) -> int:
        """Cache slots that the next steps must look at; few different numbers where every one is a
        graph.
        """
        if self.kernels is not None:  # their attention ends at a row's own position
            return self.keys.shape[3]
        top = int(self.slots.position_B[:num_slots].max()) + num_steps
        return (
            top
            if self.keys.device.type == "cpu"
            else min(-(-top // BUCKET) * BUCKET, self.keys.shape[3])
        )

    def admit(
        self,
        slot_R: Tensor,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        ages: Sequence[int] | None = None,
    ) -> None:
        """Read the distinct prompts of these rows and put each row into its slot; ``ages`` are
        tokens of a row that its prompt here already holds.
        """
        device = slot_R.device
        different, number = distinct(prompts)
        pick_R = torch.tensor(number, device=device)
        per_pass = max(1, PREFILL_TOKENS // max(map(len, different)))
        for start in range(0, len(different), per_pass):
            some = different[start : start + per_pass]
            ids_PW = pad_prompts(some, device)
            width = ids_PW.shape[1]
            keys, values = prefill(self.weights, self.shape, ids_PW, self.cos, self.sin)
            is_here_R = (pick_R >= start) & (pick_R < start + len(some))
            here_R, source_R = slot_R[is_here_R], pick_R[is_here_R] - start
            self.keys[:, here_R, :, :width] = keys[:, source_R]
            self.values[:, here_R, :, :width] = values[:, source_R]
        # the last prompt token is fed again by the first step, which then draws the first response
        # token
        slots = self.slots
        slots.token_B[slot_R] = torch.tensor([prompt[-1] for prompt in prompts], device=device)
        slots.position_B[slot_R] = torch.tensor(
            [len(prompt) - 1 for prompt in prompts], device=device
        )
        slots.age_B[slot_R] = torch.tensor(ages or [0] * len(rows), device=device)
        slots.row_B[slot_R] = torch.tensor(rows, device=device)
        slots.alive_B[slot_R] = True

    def compact(self, is_kept_B: Tensor, num_slots: int) -> Moved:
        """Kept slots from beyond the new end fill the gaps before it; the batch shrinks to the next
        power of two (any number on a CPU).
        """
        num_kept, is_cpu = int(is_kept_B[:num_slots].sum()), self.keys.device.type == "cpu"
        size = num_kept if is_cpu else max(8, 1 << (num_kept - 1).bit_length())
        size = min(num_slots, size)
        from_R = is_kept_B[size:num_slots].nonzero()[:, 0] + size
        to_R = (~is_kept_B[:size]).nonzero()[: len(from_R), 0]
        for column in self.slots:
            column[to_R] = column[from_R]
        self.keys[:, to_R] = self.keys[:, from_R]
        self.values[:, to_R] = self.values[:, from_R]
        return Moved(size, from_R, to_R)

    def _step(self, num_slots: int, seen: int, settings: Settings) -> None:
        if self.keys.device.type == "cpu":
            return self._decode(num_slots, seen, settings)
        key = (num_slots, seen, settings)
        if key not in self.graphs:
            self.graphs[key] = self._capture(num_slots, seen, settings)
        self.graphs[key].replay()

    def _capture(self, num_slots: int, seen: int, settings: Settings) -> Any:
        """A graph of one step; the state it starts from is put back after the warm-up that
        capturing needs.
        """
        state = [tensor for tensor in (*self.slots, *self.columns) if tensor is not None]
        values = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(num_slots, seen, settings)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._decode(num_slots, seen, settings)
        for tensor, value in zip(state, values):
            tensor.copy_(value)
        return graph

    def _decode(self, num_slots: int, seen: int, settings: Settings) -> None:
        """One token for every slot, all in place."""
        token_B, position_B, age_B, row_B, alive_B = (column[:num_slots] for column in self.slots)
        columns, keys, values = (
            self.columns,
            self.keys[:, :num_slots, :, :seen],
            self.values[:, :num_slots, :, :seen],
        )
        if self.panels is not None:
            hidden_BD, logits_BV = kernels_cpu.decode(self.panels, token_B, position_B)
        else:
            hidden_BD = self.decode(
                self.weights, self.shape, token_B, position_B, keys, values, self.cos, self.sin
            )
            logits_BV = hidden_BD @ self.weights.head_DV
        drawn = self._draw(logits_BV, columns.uniform_NT, row_B, age_B, settings)
        best = (
            self.candidates(logits_BV, settings.temperature, settings.topk)
            if settings.topk
            else None
        )
        record(
            Slots(token_B, position_B, age_B, row_B, alive_B),
            columns,
            settings,
            drawn,
            hidden_BD,
            best,
        )

    def _draw(
        self,
        logits_BV: Tensor,
        uniform_NT: Tensor,
        row_B: Tensor,
        age_B: Tensor,
        settings: Settings,
    ) -> Draw:
        if self.kernels is not None and self._is_whole(settings):
            return Draw(
                *self.kernels.draw(logits_BV, uniform_NT[row_B, age_B], settings.temperature)
            )
        logits_BV = (
            logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / settings.temperature
        )
        if settings.is_greedy:
            return argmax(logits_BV)
        return draw(
            truncate(logits_BV, top_k=settings.top_k, top_p=settings.top_p),
            uniform_NT[row_B, age_B],
        )
