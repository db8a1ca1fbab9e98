"""Paged attention by kvbaton's Triton kernels: one launch for the prefill chunks of a step, two for its decodes.

A decode's context is split by its own length only, so no row depends on the batch, with or without a graph. Without a
cache (the profile run) plain torch attends.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import triton_kernels
from engine.attention.backend import LayerShape
from engine.attention.torch_backend import TorchBackend
from engine.compute.inputs import PreparedInputs
from engine.compute.staging import on_device, padded

NUM_SPLITS = 16
SHORTEST_SPLIT = 256
QUERY_TILE = 128
_STAGES_AHEAD = 5
"""From five stages on Triton keeps further tiles of KV in flight: with fewer, which the loads of the block table and then of
the tiles themselves take up, it waits for each tile before it computes."""
DECODE_LAUNCH = {"num_warps": 4, "num_stages": _STAGES_AHEAD}
_LEAST_ROWS = 16
NO_SLOT = -1


class TritonBackend:
    """Owns the memory of the splits' results, shared by layers, steps and captured graphs."""

    def __init__(self) -> None:
        self._workspace = Workspace()

    def plan(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> "TritonStep":
        """See AttentionBackend."""
        return TritonStep(_step_tensors(inputs, block_size, device), block_size, self._workspace, inputs)

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> "TritonDecode":
        """See AttentionBackend."""
        return TritonDecode(num_reqs, max_blocks, block_size, device, self._workspace)


@dataclass(frozen=True)
class StepTensors:
    """A step on the device, int32.

    slots, num_cleared ``[num_tokens]``: the slot of a token's KV (-1: none), and the number of slots to zero behind it, as
    the torch backend clears a fresh block. query_starts ``[num_reqs + 1]``, seq_lens ``[num_reqs]``, tables
    ``[num_reqs, blocks]``. tiles ``[num_tiles, 2]``: request and first token of each prefill tile. decodes: the other
    requests.
    """

    slots: Tensor
    num_cleared: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    tables: Tensor
    tiles: Tensor
    decodes: Tensor


class TritonStep:
    """One step; see AttentionStep."""

    def __init__(
        self, tensors: StepTensors, block_size: int, workspace: "Workspace", inputs: PreparedInputs | None
    ) -> None:
        self._tensors = tensors
        self._block_size = block_size
        self._workspace = workspace
        self._inputs = inputs

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        store_kv(key, value, cache, self._tensors.slots, self._tensors.num_cleared)

    def attend(
        self, shape: LayerShape, query: Tensor, key: Tensor, value: Tensor, cache: Tensor | None
    ) -> Tensor:
        """See AttentionStep."""
        if cache is None:
            assert self._inputs is not None
            step = TorchBackend().plan(self._inputs, self._block_size, query.device)
            return step.attend(shape, query, key, value, None)
        query = query.contiguous()
        output = torch.empty_like(query)
        if len(self._tensors.tiles):
            self._attend_chunks(shape, query, cache, output)
        if len(self._tensors.decodes):
            self._attend_decodes(shape, query, cache, output)
        return output

    def _attend_chunks(self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor) -> None:
        tensors = self._tensors
        sizes = sizes_of(cache.dtype, cache.shape[-1])
        grid = (query.shape[1], len(tensors.tiles) * sizes["parts"])
        triton_kernels.prefill_kernel[grid](
            query,
            output,
            cache,
            tensors.tiles,
            *self._places(query, cache),
            shape.scale * math.log2(math.e),
            group=query.shape[1] // cache.shape[2],
            window=shape.sliding_window or 0,
            cap=_cap(shape),
            block_size=self._block_size,
            precision=precision_of(cache.dtype),
            **sizes,
        )

    def _attend_decodes(self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor) -> None:
        tensors = self._tensors
        num_heads = query.shape[1]
        num_kv_heads = cache.shape[2]
        group = num_heads // num_kv_heads
        num_rows = len(tensors.decodes)
        logs, partial = self._workspace.take(num_rows * num_heads * NUM_SPLITS, cache.shape[-1], query.device)
        sizes = {name: sizes_of(cache.dtype, cache.shape[-1])[name] for name in ("head_dim", "dims", "tile")}
        splits = {"window": shape.sliding_window or 0, "num_splits": NUM_SPLITS, "shortest": SHORTEST_SPLIT}
        triton_kernels.decode_kernel[num_kv_heads, NUM_SPLITS, num_rows](
            query,
            partial,
            logs,
            cache,
            tensors.decodes,
            *self._places(query, cache),
            shape.scale * math.log2(math.e),
            group=group,
            heads=_power_of_two(group),
            cap=_cap(shape),
            block_size=self._block_size,
            precision=precision_of(cache.dtype),
            **sizes,
            **splits,
            **DECODE_LAUNCH,
        )
        rows = (tensors.decodes, tensors.query_starts, tensors.seq_lens)
        triton_kernels.combine_kernel[num_heads, num_rows](
            output, partial, logs, *rows, query.stride(0), **sizes, **splits
        )

    def _places(self, query: Tensor, cache: Tensor) -> tuple[Any, ...]:
        """Return the kernel arguments that locate queries and KV."""
        own = self._tensors
        table = (own.tables, own.tables.stride(0))
        return own.query_starts, own.seq_lens, *table, query.stride(0), *cache.stride()[:3]


class TritonDecode(TritonStep):
    """Steps of ``num_reqs`` requests with one token each, in tensors at fixed addresses; see StaticDecode."""

    def __init__(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device, workspace: "Workspace"
    ) -> None:
        empty = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        counting = torch.arange(num_reqs + 1, dtype=torch.int32, device=device)
        tensors = StepTensors(
            slots=empty.clone().fill_(NO_SLOT),
            num_cleared=empty.clone(),
            query_starts=counting,
            seq_lens=empty.clone().fill_(1),
            tables=torch.zeros(num_reqs, max_blocks, dtype=torch.int32, device=device),
            tiles=empty.new_empty(0, 2),
            decodes=counting[:-1],
        )
        super().__init__(tensors, block_size, workspace, None)

    def refill(self, inputs: PreparedInputs) -> None:
        """See StaticDecode."""
        own = self._tensors
        device = self._tensors.slots.device
        num_reqs = len(own.slots)
        slots, cleared, seq_lens, tables = on_device(
            [
                padded(inputs.slot_mapping, num_reqs, NO_SLOT),
                padded(num_cleared_behind(inputs, self._block_size), num_reqs),
                padded(inputs.seq_lens, num_reqs, 1),
                padded(_used(inputs, self._block_size), num_reqs),
            ],
            device,
        )
        own.slots.copy_(slots)
        own.num_cleared.copy_(cleared)
        own.seq_lens.copy_(seq_lens)
        own.tables[:, : tables.shape[1]].copy_(tables)


class Workspace:
    """Float32 memory that only grows; memory that a captured graph uses stays."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def take(self, num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``[num_rows]`` and ``[num_rows, width]``, valid until the next call."""
        needed = num_rows * (width + 1)
        if not self._buffers or len(self._buffers[-1]) < needed:
            self._buffers.append(torch.empty(needed, dtype=torch.float32, device=device))
        buffer = self._buffers[-1]
        return buffer[:num_rows], buffer[num_rows:needed].view(num_rows, width)


def store_kv(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, num_cleared: Tensor) -> None:
    """Write a step's KV into a layer's part of the pool; the vectors as in ``StepTensors``."""
    key = _with_heads_together(key)
    value = _with_heads_together(value)
    triton_kernels.store_kernel[key.shape[0], key.shape[1]](
        key,
        value,
        cache,
        slots,
        num_cleared,
        key.stride(0),
        value.stride(0),
        *cache.stride()[:3],
        block_size=cache.shape[3],
        head_dim=cache.shape[4],
        dims=_power_of_two(cache.shape[4]),
    )


def _with_heads_together(states: Tensor) -> Tensor:
    """Return ``states`` if each token's heads are contiguous, else a copy."""
    return states if states[0].is_contiguous() else states.contiguous()


def _step_tensors(inputs: PreparedInputs, block_size: int, device: torch.device) -> StepTensors:
    is_decode = inputs.num_scheduled_tokens == 1
    tiles = [
        (row, first)
        for row in np.flatnonzero(~is_decode).tolist()
        for first in reversed(range(0, int(inputs.num_scheduled_tokens[row]), QUERY_TILE))
    ]
    return StepTensors(
        *on_device(
            [
                inputs.slot_mapping,
                num_cleared_behind(inputs, block_size),
                inputs.query_start_loc,
                inputs.seq_lens,
                _used(inputs, block_size),
                np.array(tiles, dtype=np.int32).reshape(-1, 2),
                np.flatnonzero(is_decode),
            ],
            device,
        )
    )


def num_cleared_behind(inputs: PreparedInputs, block_size: int) -> NDArray[np.integer[Any]]:
    """Return the slots to zero behind each token: the rest of a block whose first slot this step writes."""
    is_last = np.ones(inputs.num_tokens, dtype=bool)
    is_last[:-1] = inputs.block_offsets[:-1] + 1 != inputs.block_offsets[1:]
    is_last[inputs.query_start_loc[1:] - 1] = True
    computed = np.repeat(inputs.num_computed_tokens, inputs.num_scheduled_tokens)
    is_fresh = inputs.positions - inputs.block_offsets >= computed
    return np.where(is_last & is_fresh, block_size - 1 - inputs.block_offsets, 0)


def _used(inputs: PreparedInputs, block_size: int) -> NDArray[np.int32]:
    """Return the block table without the columns that no sequence reaches."""
    return inputs.block_table[:, : -(-int(inputs.seq_lens.max()) // block_size)]


def sizes_of(dtype: torch.dtype, head_dim: int) -> dict[str, int]:
    """Return the kernels' tile sizes for this number format, which fit the registers of compute capability 9.0.

    tokens: queries of a prefill program. tile: tokens of KV per iteration. dims: the head dim, padded.
    """
    dims = _power_of_two(head_dim)
    is_wide = dtype == torch.float32 or dims > 256
    tokens, tile = (32, 16) if is_wide else (128, 64) if dims <= 128 else (64, 32)
    num_stages = _STAGES_AHEAD if dims <= 128 else 3
    launch = {"num_warps": 8 if tokens == QUERY_TILE else 4, "num_stages": num_stages}
    return {
        "head_dim": head_dim, "dims": dims, "tokens": tokens, "parts": QUERY_TILE // tokens, "tile": tile, **launch
    }  # fmt: skip


def _cap(shape: LayerShape) -> float:
    """Return the soft cap for scores in base 2; 0 is none."""
    return 0.0 if shape.softcap is None else shape.softcap * math.log2(math.e)


def precision_of(dtype: torch.dtype) -> str:
    """Return the precision of products: float32 without TF32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def _power_of_two(size: int) -> int:
    """Return the smallest power of two from ``size`` on that the tensor cores support."""
    return max(_LEAST_ROWS, 1 << (size - 1).bit_length())
