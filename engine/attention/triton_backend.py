"""Paged attention by kvbaton's Triton kernels: one launch for the prefill chunks of a step, two for its decodes.

The context of a decode, and that of a short chunk behind a long context, is divided into splits by its own lengths only, so
no row depends on the batch, with or without a graph. Without a cache (the profile run) plain torch attends.
"""

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import LayerShape, Slots, StoreKV
from engine.attention.pages import blocks_of, num_cleared_behind
from engine.attention.splits import CHUNK_SPLIT, Packing, Splits, bounds_of, is_split, passes_of, splits_of
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_paged import (
    PagedAttention,
    Pass,
    StepTensors,
    Workspace,
    decode_packing,
    item_bytes,
)
from engine.attention.triton_sizes import QUERY_TILE, chunk_rows, sizes_of
from engine.attention.triton_static import SharedTensors, TritonDecode
from engine.attention.triton_store import store_kv
from engine.compute.inputs import IntVector, PreparedInputs
from engine.compute.staging import on_device

_PASS_BYTES = 64 * 2**20
"""Partial results of one pass of a step without a graph; a step with more takes several passes."""
_GRAPH_BYTES = 512 * 2**20
"""Partial results of a graph: for about 250 requests of Llama 3.1 8B with 65,536 tokens each, or 1,000 with 16,384."""


class TritonStep(PagedAttention):
    """One step; see AttentionStep. Splits are planned when the first layer with their window attends."""

    def __init__(
        self, inputs: PreparedInputs, block_size: int, workspace: Workspace, device: torch.device
    ) -> None:
        self._inputs = inputs
        is_decode = inputs.num_scheduled_tokens == 1
        is_short = is_split(inputs)
        self._decodes = np.flatnonzero(is_decode).astype(np.int32)
        self._short_chunks = np.flatnonzero(is_short).astype(np.int32)
        self._planned: dict[Packing, list[Pass]] = {}
        tiled = np.flatnonzero(~is_decode & ~is_short)
        super().__init__(_step_tensors(inputs, tiled.tolist(), block_size, device), block_size, workspace)

    def attend(
        self,
        shape: LayerShape,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor | None,
    ) -> Tensor:
        """See AttentionStep."""
        if cache is None:
            step = TorchBackend().plan(self._inputs, self._block_size, query.device)
            return step.attend(shape, query, key, value, None)
        query = query.contiguous()
        output = torch.empty_like(query)
        self.attend_into(shape, query, cache, output)
        return output

    def attend_into(self, shape: LayerShape, query: Tensor, cache: Tensor, output: Tensor) -> None:
        """See PlannedStep. query: contiguous."""
        if len(self._tensors.tiles):
            self.attend_tiles(shape, query, cache, output)
        if len(self._decodes):
            packing = decode_packing(shape, query, cache)
            self._attend_passes(shape, query, cache, output, packing, self._decodes)
        if len(self._short_chunks):
            packing = _chunk_packing(shape, query, cache)
            self._attend_passes(shape, query, cache, output, packing, self._short_chunks)

    def _attend_passes(
        self,
        shape: LayerShape,
        query: Tensor,
        cache: Tensor,
        output: Tensor,
        packing: Packing,
        requests: IntVector,
    ) -> None:
        if packing not in self._planned:
            splits = _splits_of(self._inputs, requests, packing)
            passes = passes_of(splits, max(1, self._workspace.pass_bytes // item_bytes(packing, cache)))
            self._planned[packing] = [_pass_on(query.device, each) for each in passes]
        for each in self._planned[packing]:
            self.attend_splits(shape, query, cache, output, packing, each)


def _chunk_packing(shape: LayerShape, query: Tensor, cache: Tensor) -> Packing:
    group = query.shape[1] // cache.shape[2]
    sizes = sizes_of(cache.dtype, cache.shape[-1])
    rows = chunk_rows(cache.dtype, cache.shape[-1])
    return Packing(group, rows, CHUNK_SPLIT, shape.sliding_window, sizes["tile"])


def _splits_of(inputs: PreparedInputs, requests: IntVector, packing: Packing) -> Splits:
    counts = inputs.num_scheduled_tokens[requests]
    return splits_of(requests, bounds_of(counts, inputs.seq_lens[requests], packing), packing)


def _pass_on(device: torch.device, splits: Splits) -> Pass:
    num_items = len(splits.items)
    items, units, count = on_device([splits.items, splits.units, np.array([num_items])], device)
    return Pass(items, units, count, most_items=num_items, is_combined=num_items > len(splits.units))


def _step_tensors(
    inputs: PreparedInputs, tiled: list[int], block_size: int, device: torch.device
) -> StepTensors:
    tiles = [
        (row, first)
        for row in tiled
        for first in reversed(range(0, int(inputs.num_scheduled_tokens[row]), QUERY_TILE))
    ]
    starts, blocks = blocks_of(inputs, block_size, inputs.num_reqs)
    places, num_cleared, *others = on_device(
        [
            inputs.slot_mapping,
            num_cleared_behind(inputs, block_size),
            inputs.query_start_loc,
            inputs.seq_lens,
            blocks,
            starts,
            np.array(tiles, dtype=np.int32).reshape(-1, 2),
        ],
        device,
    )
    return StepTensors(Slots(places, num_cleared), *others)


class TritonBackend:
    """Owns the memory of the splits' results, shared by layers, steps and captured graphs, and what graphs share.

    pass_bytes: results of a pass without a graph. graph_bytes: those of a graph; longer contexts of many run without one.
    """

    def __init__(self, pass_bytes: int = _PASS_BYTES, graph_bytes: int = _GRAPH_BYTES) -> None:
        self._workspace = Workspace(pass_bytes)
        self._shared = SharedTensors(graph_bytes)

    @property
    def workspace_bytes(self) -> int:
        """The bytes of the splits' results."""
        return self._workspace.num_bytes

    @property
    def static_bytes(self) -> int:
        """The bytes of the block table and the lists of splits, which the static steps of all sizes share."""
        return self._shared.num_bytes

    def plan(self, inputs: PreparedInputs, block_size: int, device: torch.device) -> TritonStep:
        """See AttentionBackend."""
        return TritonStep(inputs, block_size, self._workspace, device)

    def plan_static(
        self, num_reqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> TritonDecode:
        """See AttentionBackend."""
        return TritonDecode(num_reqs, max_blocks, block_size, self._workspace, self._shared, device)

    def static_store(self) -> StoreKV:
        """See AttentionBackend."""
        return store_kv
