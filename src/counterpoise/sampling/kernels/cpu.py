"""Decode steps on a CPU: ``cpu.c``, built once with the system's C compiler.

It computes in float32 what ``decoder`` and ``draw`` compute with torch, to rounding; the tests hold
them against each other. Where there is no compiler, or it fails, ``library`` is None and the engine
works with torch alone.

Threads are Python's, as many as torch has: a call into C lets go of the interpreter and is long. So
there is no second OpenMP runtime beside torch's. Which thread takes a row, and which rows it takes
with it, changes no bit of the row.

Axes: B slots, R slots of a call, L cache slots, D hidden size, V vocabulary, N rollouts, T response
    tokens.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from counterpoise.policy.kernels.build import address, load_library, structure
from counterpoise.sampling.decoder import Layer, Shape, Weights
from counterpoise.sampling.decoder import decode as plain_decode

log = logging.getLogger("counterpoise.sampling")
SOURCE = Path(__file__).with_suffix(".c")
PANEL = 16  # columns of a weight that lie together, as in the C source
# the structs of the C source, field by field
LayerStruct = structure("LayerStruct", pointer=" ".join(Layer._fields))
ModelStruct = structure(
    "ModelStruct",
    pointer="layers embed norm head cos sin keys values",
    whole="num_layers H K C D F V B L",
    real="eps scaling",
)
SlotsStruct = structure("SlotsStruct", pointer="token position age row alive")
ColumnsStruct = structure(
    "ColumnsStruct",
    pointer="token_ids length logp entropy hidden uniform stops topk_ids topk_logp given limit",
    whole="num_stops T nowhere K",
    real="inverse",
    flag="is_greedy",
)
ARGUMENTS = {"decode": "pppnppp", "advance": "ppppnnp", "draw": "ppfpppnn", "scratch_size": "p"}


class Panels(NamedTuple):
    """A model as the C source reads it, the tensors it points to, and the threads."""

    struct: Any
    kept: tuple[Any, ...]
    pool: ThreadPoolExecutor
    num_threads: int


@functools.cache
def library() -> Any:
    """The loaded kernels, built first if need be; None, with one line in the log, where they cannot
    be had.
    """
    instead = "the engine works with torch alone"
    loaded = load_library(SOURCE, ARGUMENTS, log, "rollouts", instead)
    if loaded is not None:
        loaded.scratch_size.restype = ctypes.c_int64
    return loaded


def build_name() -> str:
    """The name of the loaded build: a hash of the source, the compiler, its flags and the
    processor.
    """
    return Path(library()._name).stem


@contextmanager
def panels(
    weights: Weights, shape: Shape, keys: Tensor, values: Tensor, cos_LC: Tensor, sin_LC: Tensor
) -> Iterator[Panels]:
    """The weights in panels (a copy, of what they are now) with the cache, [layers, B, K, L, C],
    that decoding writes to.
    """
    layers = [_layer(layer) for layer in weights.layers]
    table = (LayerStruct * len(layers))(*(LayerStruct(*map(address, layer)) for layer in layers))
    read = weights.embed_VD, weights.norm_D, _panels(weights.head_DV), cos_LC, sin_LC
    tensors = *(tensor.contiguous() for tensor in read), keys, values
    hidden_size, num_tokens = weights.head_DV.shape
    sizes = (
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_size,
        hidden_size,
        len(weights.layers[0].down),
        num_tokens,
    )
    struct = ModelStruct(
        ctypes.addressof(table),
        *map(address, tensors),
        *(len(layers), *sizes, keys.shape[1], keys.shape[3]),
        *(shape.eps, shape.scaling),
    )
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as pool:
        yield Panels(struct, (table, layers, tensors), pool, num_threads)


def can_decode(weights: Weights, shape: Shape, cos_LC: Tensor, sin_LC: Tensor) -> bool:
    """Whether there are kernels, the weights are float32, and the logits of two tokens are those of
    torch.

    The last is tried because compilers and processors are many and a wrong token is silent.
    """
    read = (
        weights.embed_VD,
        weights.norm_D,
        weights.head_DV,
        *(tensor for layer in weights.layers for tensor in layer),
    )
    if (
        any(tensor.dtype != torch.float32 for tensor in read if tensor is not None)
        or library() is None
    ):
        return False
    token_B, position_B = torch.tensor([0, 1]), torch.tensor([0, 1])
    cache = [
        torch.zeros(shape.num_layers, 2, shape.num_kv_heads, 2, shape.head_size) for _ in range(4)
    ]
    with panels(weights, shape, cache[0], cache[1], cos_LC, sin_LC) as model:
        _, logits_BV = decode(model, token_B, position_B)
    expected_BV = (
        plain_decode(weights, shape, token_B, position_B, cache[2], cache[3], cos_LC, sin_LC)
        @ weights.head_DV
    )
    if torch.allclose(
        logits_BV,
        expected_BV,
        rtol=1e-3,
        atol=1e-3 * float(expected_BV.abs().max()),
        equal_nan=True,
    ):
        return True
    log.warning(
        "rollouts: the C kernels give other logits than torch on this machine and are left aside;"
        " please report it."
    )
    return False


def decode(model: Panels, token_B: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
    """Final normed hidden states [B, D] and logits [B, V] after one more token in each of the first
    B slots of the cache.
    """
    hidden_BD, logits_BV = (
        torch.empty(len(token_B), model.struct.D),
        torch.empty(len(token_B), model.struct.V),
    )
    slots = SlotsStruct(address(token_B), address(position_B))

    def run(slot_R: Tensor, scratch: Tensor) -> None:
        start, structs = int(slot_R[0]), map(ctypes.byref, (model.struct, slots))
        outs = map(address, (hidden_BD[start:], logits_BV[start:], scratch))
        library().decode(*structs, address(slot_R), len(slot_R), *outs)

    _share(model, torch.arange(len(token_B)), run)
    return hidden_BD, logits_BV


def advance(model: Panels, slots: Any, columns: Any, settings: Any, num_steps: int) -> None:
    """Up to ``num_steps`` tokens in every living slot, drawn and written into the columns as the
    engine does it one by one.
    """
    stops_S, wanted = (
        torch.tensor(settings.stop_ids, dtype=torch.long),
        columns.hidden_NTD if settings.has_hidden else None,
    )
    tensors = (
        columns.token_ids_NT,
        columns.length_N,
        columns.sampler_logp_NT,
        columns.entropy_NT,
        wanted,
        columns.uniform_NT,
        stops_S,
        columns.topk_ids_NTK,
        columns.topk_logp_NTK,
        columns.given_NT,
        columns.limit_N,
    )
    sizes = len(stops_S), settings.max_new_tokens, len(columns.length_N) - 1, settings.topk
    table = ColumnsStruct(
        *map(address, tensors), *sizes, 1.0 / settings.temperature, settings.is_greedy
    )
    state = SlotsStruct(*map(address, slots))

    def run(slot_R: Tensor, scratch: Tensor) -> None:
        structs = map(ctypes.byref, (model.struct, state, table))
        library().advance(*structs, address(slot_R), len(slot_R), num_steps, address(scratch))

    _share(model, slots.alive_B.nonzero()[:, 0], run)


def _share(model: Panels, slot_B: Tensor, run: Callable[[Tensor, Tensor], None]) -> None:
    """Threads take parts of the slots until none is left, each with memory to work in; the caller
    is one of them.
    """
    size = library().scratch_size(ctypes.byref(model.struct))
    parts = _parts(slot_B, model.num_threads)
    left = iter(parts)  # shared: a part goes to the thread that asks first

    def work() -> None:
        scratch = torch.empty(size)
        for slot_R in left:
            run(slot_R, scratch)

    others = [model.pool.submit(work) for _ in parts[1 : model.num_threads]]
    work()
    for other in others:
        other.result()


def _parts(slot_B: Tensor, num_threads: int) -> list[Tensor]:
    """As many parts for every thread, of whole tiles and of equal size up to one tile."""
    tile, most = (
        ctypes.c_int64.in_dll(library(), name).value for name in ("rows_of_tile", "rows_of_call")
    )
    num_tiles, num_parts = (
        -(-len(slot_B) // tile),
        -(-len(slot_B) // (most * num_threads)) * num_threads,
    )
    cuts = [num_tiles * part // num_parts * tile for part in range(1, num_parts)]
    return [part for part in slot_B.tensor_split(cuts) if len(part)]


def draw(logits_BV: Tensor, uniform_B: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """A token a row from ``softmax(logits / temperature)`` where its cumulative probability passes
    ``uniform_B``; log-prob; entropy.
    """
    token_B = torch.empty(len(logits_BV), dtype=torch.long)
    logp_B, entropy_B = torch.empty(2, len(logits_BV)).unbind(0)
    outs = map(address, (token_B, logp_B, entropy_B))
    library().draw(
        address(logits_BV), address(uniform_B), 1.0 / temperature, *outs, *logits_BV.shape
    )
    return token_B, logp_B, entropy_B


def _layer(layer: Layer) -> list[Tensor | None]:
    """Weights in panels, biases up to the end of the last panel, norms as they are."""
    forms: dict[str, Callable[[Tensor], Tensor]] = dict.fromkeys(
        ("qkv", "out", "gate_up", "down"), _panels
    )
    forms |= {f"{name}_bias": _filled for name in forms}
    return [
        value if value is None else forms.get(name, Tensor.contiguous)(value)
        for name, value in layer._asdict().items()
    ]


def _panels(weight: Tensor) -> Tensor:
    """[in, out] as [panels, in, PANEL], zeros after the last column."""
    return _filled(weight).unflatten(1, (-1, PANEL)).transpose(0, 1).contiguous()


def _filled(value: Tensor) -> Tensor:
    return torch.nn.functional.pad(value, (0, -value.shape[-1] % PANEL))
