"""Blocks of a pool as one piece for a group, and back; on the GPU where the pool is there."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.connector import KVMemory
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.block_views import OnDevice, block_span, read_views


class GroupPool:
    """This worker's pool as a group sees it. backend, device: see ``NcclWelcome``."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self.block_bytes = memory.layout.block_bytes
        self._rows: Any = None
        self.backend, self.device, self.place = "gloo", "", torch.device("cpu")
        if isinstance(memory, OnDevice) and memory.pool.device.type == "cuda":
            pool = memory.pool
            self._rows = pool.view(memory.num_blocks, -1)
            self.backend = "nccl"
            self.place = pool.device
            self.device = str(torch.cuda.get_device_properties(pool.device).uuid)

    def gather(self, block_ids: Sequence[int], part: BlockPart | None = None) -> torch.Tensor:
        """These blocks, or the part of each, side by side, as bytes. Raises TransferError for a part that no block has."""
        start, end = block_span(self.block_bytes, part)
        if self._rows is not None:
            rows = self._rows if part is None else self._rows.view(torch.uint8)[:, start:end]
            taken: torch.Tensor = rows[torch.tensor(block_ids, device=self.place)]
            torch.cuda.synchronize(self.place)
            return taken.view(torch.uint8).flatten()
        content = self.empty(len(block_ids) * (end - start))
        size = end - start
        target = content.numpy().data
        for number, view in enumerate(read_views(self._memory, block_ids, part)):
            target[number * size : (number + 1) * size] = view
        return content

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Room for so many bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.place)

    def scatter(self, content: torch.Tensor, views: Sequence[memoryview]) -> None:
        """Put the bytes into views of one size, one after the other."""
        source = content.cpu().numpy().data
        size = views[0].nbytes
        for number, view in enumerate(views):
            view[:] = source[number * size : (number + 1) * size]
