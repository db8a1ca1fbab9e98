"""Decode steps of our Triton kernels in tensors at fixed addresses, so that they can be captured."""

import numpy as np
import torch
from torch import Tensor

from engine.attention.backend import LayerShape, Slots
from engine.attention.pages import NO_SLOT, blocks_of, num_cleared_behind
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
    item_bytes,
    num_running,
)
from engine.attention.triton_sizes import splits_joined
from engine.compute.inputs import IntVector, PreparedInputs
from engine.compute.staging import copy_into, padded


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

    def take(self, name: object, size: int, device: torch.device) -> Tensor:
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
            tables=shared.take("tables", num_reqs * max_blocks, device),
            table_starts=table_starts,
            tiles=torch.zeros(0, 2, dtype=torch.int32, device=device),
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
            shared.take((packing, "items"), most_items * RUN_FIELDS, device)[: most_items * fields].view(
                -1, fields
            ),
            shared.take((packing, "units"), num_rows * UNIT_FIELDS, device).view(-1, UNIT_FIELDS),
            shared.take((packing, "number"), 1, device),
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
