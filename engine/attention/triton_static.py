"""Decode steps of our Triton kernels in tensors at fixed addresses, so that they can be captured."""

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import LayerShape, Slots
from engine.attention.pages import blocks_of
from engine.attention.splits import (
    ITEM_FIELDS,
    RUN_FIELDS,
    UNIT_FIELDS,
    Packing,
    bounds_of,
    joined,
    splits_needed,
    splits_of,
)
from engine.attention.triton_paged import (
    PagedAttention,
    Pass,
    StepTensors,
    Workspace,
    decode_packing,
    num_running,
)
from engine.attention.triton_sizes import splits_joined
from engine.attention.triton_store import NO_SLOT, num_cleared_behind
from engine.compute.inputs import IntVector, PreparedInputs
from engine.compute.staging import copy_into, padded


class TritonDecode(PagedAttention):
    """Steps of ``num_reqs`` requests with one token each; see StaticDecode."""

    def __init__(
        self, num_reqs: int, max_blocks: int, block_size: int, workspace: Workspace, device: torch.device
    ) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self._rows = empty(4, num_reqs)
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
            tables=empty(num_reqs * max_blocks),
            table_starts=table_starts,
            tiles=empty(0, 2),
        )
        super().__init__(tensors, block_size, workspace)

    def attend(
        self,
        shape: LayerShape,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        cache: Tensor | None,
    ) -> Tensor:
        """See AttentionStep. Each kind of layer must have attended once before a graph is captured."""
        assert cache is not None
        query = query.contiguous()
        output = torch.empty_like(query)
        packing = decode_packing(shape, query, cache)
        if packing not in self._lists:
            num_rows = len(self._seq_lens)
            most_joined = splits_joined(num_rows * cache.shape[2], num_running(packing, query, cache))
            self._lists[packing] = _SplitList(num_rows, self._most_splits, packing, most_joined, query.device)
            self._lists[packing].refill(self._seq_lens)
        self.attend_splits(shape, query, cache, output, packing, self._lists[packing].tensors)
        return output

    def refill(self, inputs: PreparedInputs) -> None:
        """See StaticDecode."""
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
        for each in self._lists.values():
            each.refill(self._seq_lens)


class _SplitList:
    """The splits of the layers with one window; they change when a row begins a new split, not in every step."""

    def __init__(
        self, num_rows: int, most_splits: int, packing: Packing, most_joined: int, device: torch.device
    ) -> None:
        most_items = num_rows * most_splits
        fields = ITEM_FIELDS if most_joined == 1 else RUN_FIELDS
        sizes = [most_items * fields, num_rows * UNIT_FIELDS, 1]
        items, units, num_items = torch.split(
            torch.zeros(sum(sizes), dtype=torch.int32, device=device), sizes
        )
        self.tensors = Pass(
            items.view(-1, fields),
            units.view(-1, UNIT_FIELDS),
            num_items,
            most_items,
            is_combined=most_splits > 1,
            is_joined=most_joined > 1,
        )
        self._most_joined = most_joined
        self._packing = packing
        self._requests: IntVector = np.arange(num_rows, dtype=np.int32)
        self._bounds: IntVector | None = None

    def refill(self, seq_lens: IntVector) -> None:
        """Load the splits of these lengths."""
        bounds = bounds_of(np.ones_like(seq_lens), seq_lens, self._packing)
        if self._bounds is not None and np.array_equal(bounds, self._bounds):
            return
        self._bounds = bounds
        splits = splits_of(self._requests, bounds, self._packing)
        items = joined(splits, self._most_joined) if self.tensors.is_joined else splits.items
        own = self.tensors
        copy_into([own.items, own.units, own.num_items], [items, splits.units, np.array([len(items)])])
