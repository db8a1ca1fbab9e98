"""Regions and a peer's pool as this worker's NIXL agent sees them. Called by the thread that has the agent."""

import mmap
from contextlib import ExitStack
from typing import Any

import numpy as np

from contract.errors import TransferError
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.block_views import address_of
from kv_transfer.transports.leases import SLOT_BYTES
from kv_transfer.transports.nixl.agent import SELF, NixlAgent, Region

_BOUNCE_BYTES = 4 * 2**20
_MAX_LOOKS = 64
_MAX_PARTS = 256
MAX_SLOTS_AT_ONCE = 16
"""Slots of the table that one read may look at; a read is nearly always under one lease."""


class DescribedRegion:
    """A region's blocks as ``NixlAgent.prepare`` takes them, whole or a part of each. Used by one thread at a time."""

    def __init__(self, agent: NixlAgent, region: Region, peer: str = SELF) -> None:
        self._agent = agent
        self.region = region
        self._peer = peer
        self._by_part: dict[BlockPart | None, Any] = {None: agent.describe(region, peer)}

    def blocks(self, part: BlockPart | None = None) -> Any:
        """Return the description for this part, cached. Raises TransferError for too many parts, or one outside a block."""
        if part not in self._by_part:
            if len(self._by_part) > _MAX_PARTS:
                raise TransferError(f"nixl: blocks are read in {_MAX_PARTS} different parts already")
            self._by_part[part] = self._agent.describe(self.region, self._peer, part)
        return self._by_part[part]

    def release(self) -> None:
        """Release all descriptions. Raises TransferError."""
        with ExitStack() as undo:
            for blocks in self._by_part.values():
                undo.callback(self._agent.undescribe, blocks)


class RemotePool:
    """A peer's blocks and its table of generations, and memory of our own besides the pool to read them into.

    region, table: the peer's memory. bounce: a few blocks of its size in our host memory. found: slots of the table,
    as they were when last read. num_posted: reads that are not terminal. Nothing is released before it is 0 and
    ``leave`` was called.
    """

    def __init__(self, agent_name: str, who: str, region: Region, table: Region) -> None:
        """Raises TransferError for regions that cannot be memory."""
        self.agent_name = agent_name
        self.who = who
        self.region = region
        self._table_region = table
        region.check()
        table.check()
        size = region.block_bytes
        self.bounce = HostMemory(size, min(max(1, _BOUNCE_BYTES // size), self.region.num_blocks))
        self.found = HostMemory(SLOT_BYTES, MAX_SLOTS_AT_ONCE)
        self.num_posted = 0
        self.is_left = False
        self._looks: dict[tuple[int, ...], Any] = {}
        self._undo = ExitStack()

    def enter(self, agent: NixlAgent, metadata: bytes) -> None:
        """Make it readable by ``agent``. Does not wait for the peer."""
        with ExitStack() as undo:
            agent.add_peer(metadata, self.agent_name)
            undo.callback(agent.remove_peer, self.agent_name)
            self.blocks = self._described(agent, undo, self.region, self.agent_name)
            self._table = self._described(agent, undo, self._table_region, self.agent_name)
            self.bounce_blocks = self._registered(agent, undo, self.bounce.region)
            self._found_slots = self._registered(agent, undo, self.found.region)
            undo.callback(self._forget_looks, agent)
            self._undo = undo.pop_all()

    def look_at(self, agent: NixlAgent, slots: tuple[int, ...]) -> Any:
        """Return a read of these slots into ``found``, cached: the next read is mostly under the same lease."""
        look = self._looks.get(slots)
        if look is None:
            if len(self._looks) >= _MAX_LOOKS:
                self._forget_looks(agent)
            into = np.arange(len(slots), dtype=np.int32)
            out_of = np.array(slots, np.int32)
            look = agent.prepare(self._found_slots.blocks(), into, self._table.blocks(), out_of)
            self._looks[slots] = look
        return look

    def leave(self) -> None:
        """Release everything now, or when the last read is terminal. No read may begin afterwards."""
        self.is_left = True
        self.release_if_unused()

    def release_if_unused(self) -> None:
        """Release everything if it was left and no read is posted. Raises TransferError if the library fails."""
        if self.is_left and not self.num_posted:
            self._undo.close()

    def abandon(self) -> None:
        """Release everything because the agent ends, posted reads or not. Raises TransferError."""
        self._undo.close()

    def _forget_looks(self, agent: NixlAgent) -> None:
        while self._looks:
            agent.release(self._looks.popitem()[1])

    def _described(self, agent: NixlAgent, undo: ExitStack, region: Region, *peer: str) -> DescribedRegion:
        described = DescribedRegion(agent, region, *peer)
        undo.callback(described.release)
        return described

    def _registered(self, agent: NixlAgent, undo: ExitStack, region: Region) -> DescribedRegion:
        undo.callback(agent.deregister, agent.register(region))
        return self._described(agent, undo, region)


class HostMemory:
    """Private host memory as a region; alive as long as this object."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        self._view = memoryview(mmap.mmap(-1, block_bytes * num_blocks))
        self.region = Region(address_of(self._view), block_bytes, num_blocks)

    def numbers(self, count: int) -> list[int]:
        """Return the first ``count`` 64-bit numbers."""
        return self._view[: 8 * count].cast("Q").tolist()

    def block(self, number: int) -> memoryview:
        """Return one of its blocks."""
        size = self.region.block_bytes
        return self._view[number * size : (number + 1) * size]
