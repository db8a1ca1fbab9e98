"""Launches of our Triton kernels on a step's tensors: prefill tiles, splits with their combination, and the store of KV.

The store serves every backend that uses the pool's own layout.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.attention import triton_kernels, triton_splits
from engine.attention.backend import LayerShape, Slots
from engine.attention.splits import DECODE_SPLIT, Packing
from engine.attention.triton_sizes import (
    combine_launch,
    decode_tile,
    num_multiprocessors,
    power_of_two,
    precision_of,
    programs_at_once,
    sizes_of,
    split_launch,
    store_launch,
)
from engine.compute.staging import overlap_of


def store_kv(key: Tensor, value: Tensor, cache: Tensor, slots: Slots) -> None:
    """Write a step's KV into a layer's part of the pool."""
    key = _with_heads_together(key)
    value = _with_heads_together(value)
    num_tokens, num_kv_heads, head_dim = key.shape
    triton_kernels.store_kernel[(num_tokens,)](
        key,
        value,
        cache,
        slots.places,
        slots.num_cleared,
        key.stride(0),
        value.stride(0),
        *cache.stride()[:3],
        num_kv_heads=num_kv_heads,
        block_size=cache.shape[3],
        head_dim=head_dim,
        **store_launch(num_kv_heads, head_dim),
    )


def _with_heads_together(states: Tensor) -> Tensor:
    """Return ``states`` if each token's heads are contiguous, else a copy."""
    return states if states[0].is_contiguous() else states.contiguous()


@dataclass(frozen=True)
class StepTensors:
    """A step on the device, int32.

    query_starts ``[num_reqs + 1]``, seq_lens ``[num_reqs]``; a request's blocks are
    ``tables`` from ``table_starts[request]``. tiles ``[num_tiles, 2]``: request and first token of each prefill tile.
    """

    slots: Slots
    query_starts: Tensor
    seq_lens: Tensor
    tables: Tensor
    table_starts: Tensor
    tiles: Tensor


@dataclass(frozen=True)
class Pass:
    """The splits of one launch, on the device; see ``Splits``.

    most_items: splits of any step that these tensors hold. is_joined: the items are those of ``splits.joined``.
    """

    items: Tensor
    units: Tensor
    num_items: Tensor
    most_items: int
    is_combined: bool
    is_joined: bool = False


class Workspace:
    """Float32 memory that only grows; memory that a captured graph uses stays.

    pass_bytes: the results of one pass of a step without a graph. The first buffer holds them, so only graphs, or one unit
    with more, make it grow.
    """

    def __init__(self, pass_bytes: int) -> None:
        self.pass_bytes = pass_bytes
        self._buffers: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def get(self, num_rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``[num_rows]`` and ``[num_rows, width]``, valid until the next call."""
        needed = num_rows * (width + 1)
        if not self._buffers or len(self._buffers[-1]) < needed:
            size = max(needed, self.pass_bytes // 4)
            self._buffers.append(torch.empty(size, dtype=torch.float32, device=device))
        buffer = self._buffers[-1]
        return buffer[:num_rows], buffer[num_rows:needed].view(num_rows, width)


class PagedAttention:
    """Launches the kernels on a step's tensors."""

    def __init__(self, tensors: StepTensors, block_size: int, workspace: Workspace) -> None:
        self.slots: Slots | None = tensors.slots
        self._tensors = tensors
        self._block_size = block_size
        self._workspace = workspace

    def store(self, key: Tensor, value: Tensor, cache: Tensor) -> None:
        """See AttentionStep."""
        store_kv(key, value, cache, self._tensors.slots)

    def attend_tiles(self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor) -> None:
        """Attend for chunks, each tile with all of its context."""
        tiles = self._tensors.tiles
        sizes = sizes_of(cache.dtype, cache.shape[-1])
        triton_kernels.prefill_kernel[query.shape[1], len(tiles) * sizes["parts"]](
            query,
            output,
            cache,
            tiles,
            *self._places(query, cache),
            **self._constants(shape, query, cache),
            **sizes,
        )

    def attend_splits(
        self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor, packing: Packing, each: Pass
    ) -> None:
        """Attend for one pass of units, then combine their splits."""
        num_kv_heads = cache.shape[2]
        head_dim = cache.shape[-1]
        num_rows = num_kv_heads * packing.rows
        logs, partial = self._workspace.get(each.most_items * num_rows, head_dim, query.device)
        sizes = {name: sizes_of(cache.dtype, head_dim)[name] for name in ("head_dim", "dims")}
        units = {"num_kv_heads": num_kv_heads, "kept": packing.rows}
        padded = power_of_two(packing.rows)
        num_programs = min(num_running(packing, query, cache), each.most_items * num_kv_heads)
        triton_splits.split_kernel[(num_programs,)](
            query,
            output,
            partial,
            logs,
            cache,
            each.items,
            each.num_items,
            *self._places(query, cache),
            rows=padded,
            tile=packing.tile,
            is_decode=packing.is_decode,
            is_joined=each.is_joined,
            **self._constants(shape, query, cache),
            **units,
            **sizes,
            **split_launch(padded, sizes["dims"], packing.tile),
            **overlap_of(query.device),
        )
        if each.is_combined:
            triton_splits.combine_kernel[num_rows, len(each.units)](
                output,
                partial,
                logs,
                each.units,
                self._tensors.query_starts,
                query.stride(0),
                group=packing.group,
                **units,
                **sizes,
                **combine_launch(sizes["dims"]),
                **overlap_of(query.device),
            )

    def _places(self, query: Tensor, cache: Tensor) -> tuple[Any, ...]:
        """Return the kernel arguments that locate queries and KV."""
        own = self._tensors
        tables = (own.tables, own.table_starts)
        return own.query_starts, own.seq_lens, *tables, query.stride(0), *cache.stride()[:3]

    def _constants(self, shape: LayerShape, query: Tensor, cache: Tensor) -> dict[str, Any]:
        return {
            "scale": shape.scale * math.log2(math.e),
            "group": query.shape[1] // cache.shape[2],
            "window": shape.sliding_window or 0,
            "cap": (shape.softcap or 0.0) * math.log2(math.e),  # for scores in base 2; 0 is none
            "block_size": self._block_size,
            "precision": precision_of(cache.dtype),
        }


def item_bytes(packing: Packing, cache: Tensor) -> int:
    """Return the bytes of one split's partial results."""
    return 4 * cache.shape[2] * packing.rows * (cache.shape[-1] + 1)


def num_running(packing: Packing, query: Tensor, cache: Tensor) -> int:
    """Return the programs of the split kernel that the device runs at once."""
    dims = sizes_of(cache.dtype, cache.shape[-1])["dims"]
    at_once = programs_at_once(power_of_two(packing.rows), dims, packing.tile)
    return num_multiprocessors(query.device) * at_once


def decode_packing(shape: LayerShape, query: Tensor, cache: Tensor) -> Packing:
    """Return the packing of decodes: a unit has the query heads of one token."""
    group = query.shape[1] // cache.shape[2]
    tile = decode_tile(cache.dtype, cache.shape[-1])
    return Packing(group, group, DECODE_SPLIT, shape.sliding_window, tile, is_decode=True)
