"""Paged attention by kvbaton's Triton kernels: one launch for the prefill chunks of a step, two for its decodes.

The context of a decode, and that of a short chunk behind a long context, is divided into splits by its own lengths only, so
no row depends on the batch, with or without a graph. Without a cache (the profile run) plain torch attends.
Decode steps also exist in tensors at fixed addresses, so that they can be captured.
"""

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import LayerShape, Slots, StoreKV
from engine.attention.pages import NO_SLOT, blocks_of, num_cleared_behind
from engine.attention.splits import (
    CHUNK_SPLIT,
    ITEM_FIELDS,
    RUN_FIELDS,
    UNIT_FIELDS,
    Packing,
    Splits,
    bounds_of,
    is_split,
    joined,
    passes_of,
    splits_needed,
    splits_of,
)
from engine.attention.torch_backend import TorchBackend
from engine.attention.triton_paged import (
    PagedAttention,
    Pass,
    StepTensors,
    Workspace,
    decode_packing,
    item_bytes,
    num_running,
    store_kv,
)
from engine.attention.triton_sizes import QUERY_TILE, chunk_rows, sizes_of, splits_joined
from engine.compute.inputs import IntVector, PreparedInputs
from engine.compute.staging import copy_into, on_device, padded

# Partial results of one pass of a step without a graph; a step with more takes several passes.
_PASS_BYTES = 64 * 2**20
# Partial results of a graph: for about 250 requests of Llama 3.1 8B with 65,536 tokens each, or 1,000 with 16,384.
_GRAPH_BYTES = 512 * 2**20


class SharedTensors:
    """Holds what static steps of all sizes share, since their graphs never run at the same time: the largest has the most.

    A step's block table, and its list of splits for each kind of layer, take far more memory than everything else of it.
    most_result_bytes: the partial results of a graph; a step with more splits than fit is not loaded.
    """

    def __init__(self, most_result_bytes: int) -> None:
        self.most_result_bytes = most_result_bytes
        self.num_bytes = 0
        self.filled_by: dict[Packing, object] = {}
        """The list of splits whose content is in the tensors of these layers."""
        self._tensors: dict[object, Tensor] = {}

    def get(self, name: object, size: int, device: torch.device) -> Tensor:
        """Return int32 ``[size]``, the beginning of the tensor of this name; the first call has the largest size."""
        if name not in self._tensors:
            self._tensors[name] = torch.zeros(size, dtype=torch.int32, device=device)
            self.num_bytes += self._tensors[name].nbytes
        return self._tensors[name][:size]


class TritonDecode(PagedAttention):
    """Steps of ``num_reqs`` requests with one token each; see StaticDecode."""

    def __init__(
        self,
        num_reqs: int,
        max_blocks: int,
        block_size: int,
        workspace: Workspace,
        shared: SharedTensors,
        device: torch.device,
    ) -> None:
        self._shared = shared
        self._rows = torch.zeros(4, num_reqs, dtype=torch.int32, device=device)
        self._most_splits = splits_needed(max_blocks * block_size)
        self._lists: dict[Packing, _SplitList] = {}
        self._seq_lens: IntVector = np.ones(num_reqs, dtype=np.int32)
        slots, num_cleared, seq_lens, table_starts = self._rows
        slots.fill_(NO_SLOT)
        seq_lens.fill_(1)
        tensors = StepTensors(
            slots=Slots(slots, num_cleared),
            query_starts=torch.arange(num_reqs + 1, dtype=torch.int32, device=device),
            seq_lens=seq_lens,
            tables=shared.get("tables", num_reqs * max_blocks, device),
            table_starts=table_starts,
            tiles=torch.zeros(0, 2, dtype=torch.int32, device=device),
        )
        super().__init__(tensors, block_size, workspace)

    def attend(
        self, shape: LayerShape, query: Tensor, key: Tensor | None, value: Tensor | None, cache: Tensor | None
    ) -> Tensor:
        """See AttentionStep. Each kind of layer must have attended once before a graph is captured."""
        assert cache is not None
        query = query.contiguous()
        output = torch.empty_like(query)
        packing = decode_packing(shape, query, cache)
        if packing not in self._lists:
            num_rows = len(self._seq_lens)
            most_joined = splits_joined(num_rows * cache.shape[2], num_running(packing, query, cache))
            most_items = self._shared.most_result_bytes // item_bytes(packing, cache)
            most_items = max(num_rows, min(num_rows * self._most_splits, most_items))
            self._lists[packing] = _SplitList(
                self._shared, num_rows, most_items, packing, most_joined, query.device
            )
        splits = self._lists[packing]
        if not splits.is_filled:  # before a capture, in the run that precedes it
            splits.refill(self._seq_lens)
        self.attend_splits(shape, query, cache, output, packing, splits.tensors)
        return output

    def refill(self, inputs: PreparedInputs) -> bool:
        """See StaticDecode. Return False if a list has too few places for the splits."""
        num_reqs = len(self._seq_lens)
        self._seq_lens = padded(inputs.seq_lens, num_reqs, 1)
        starts, blocks = blocks_of(inputs, self._block_size, num_reqs)
        rows = [
            padded(inputs.slot_mapping, num_reqs, NO_SLOT),
            padded(num_cleared_behind(inputs, self._block_size), num_reqs),
            self._seq_lens,
            starts[:-1],
        ]
        copy_into([self._rows, self._tensors.tables], [np.stack(rows), blocks])
        return all(each.refill(self._seq_lens) for each in self._lists.values())


class _SplitList:
    """The splits of the layers with one window; they change when a row begins a new split, not in every step."""

    def __init__(
        self,
        shared: SharedTensors,
        num_rows: int,
        most_items: int,
        packing: Packing,
        most_joined: int,
        device: torch.device,
    ) -> None:
        fields = ITEM_FIELDS if most_joined == 1 else RUN_FIELDS
        self.tensors = Pass(
            # The first size may have single splits where a later one joins them: room for both.
            shared.get((packing, "items"), most_items * RUN_FIELDS, device)[: most_items * fields].view(
                -1, fields
            ),
            shared.get((packing, "units"), num_rows * UNIT_FIELDS, device).view(-1, UNIT_FIELDS),
            shared.get((packing, "number"), 1, device),
            most_items,
            is_combined=most_items > num_rows,
            is_joined=most_joined > 1,
        )
        self._shared = shared
        self._most_joined = most_joined
        self._packing = packing
        self._requests: IntVector = np.arange(num_rows, dtype=np.int32)
        self._bounds: IntVector | None = None

    @property
    def is_filled(self) -> bool:
        """True while the tensors hold this list: another size may have taken them."""
        return self._shared.filled_by.get(self._packing) is self

    def refill(self, seq_lens: IntVector) -> bool:
        """Load the splits of these lengths; return False, and load nothing, if there are more than have a place."""
        bounds = bounds_of(np.ones_like(seq_lens), seq_lens, self._packing)
        if self.is_filled and self._bounds is not None and np.array_equal(bounds, self._bounds):
            return True
        splits = splits_of(self._requests, bounds, self._packing)
        own = self.tensors
        if len(splits.items) > own.most_items:
            return False
        self._bounds = bounds
        self._shared.filled_by[self._packing] = self
        items = joined(splits, self._most_joined) if own.is_joined else splits.items
        copy_into([own.items, own.units, own.num_items], [items, splits.units, np.array([len(items)])])
        return True


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
        output: Tensor | None = None,
    ) -> Tensor:
        """See PlannedStep."""
        if cache is None:
            step = TorchBackend().plan(self._inputs, self._block_size, query.device)
            return step.attend(shape, query, key, value, None)
        query = query.contiguous()
        if output is None:
            output = torch.empty_like(query)
        if len(self._tensors.tiles):
            self.attend_tiles(shape, query, cache, output)
        if len(self._decodes):
            packing = decode_packing(shape, query, cache)
            self._attend_passes(shape, query, cache, output, packing, self._decodes)
        if len(self._short_chunks):
            tile = sizes_of(cache.dtype, cache.shape[-1])["tile"]
            rows = chunk_rows(cache.dtype, cache.shape[-1])
            group = query.shape[1] // cache.shape[2]
            packing = Packing(group, rows, CHUNK_SPLIT, shape.sliding_window, tile)
            self._attend_passes(shape, query, cache, output, packing, self._short_chunks)
        return output

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
            counts = self._inputs.num_scheduled_tokens[requests]
            bounds = bounds_of(counts, self._inputs.seq_lens[requests], packing)
            splits = splits_of(requests, bounds, packing)
            # As many of them at a time as there is memory for their partial results, but one unit at least.
            passes = passes_of(splits, max(1, self._workspace.pass_bytes // item_bytes(packing, cache)))
            self._planned[packing] = [_pass_on(query.device, each) for each in passes]
        for each in self._planned[packing]:
            self.attend_splits(shape, query, cache, output, packing, each)


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
