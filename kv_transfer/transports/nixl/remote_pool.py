"""Regions and a peer's pool as this worker's NIXL agent sees them. Called by the thread that has the agent."""

import mmap
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from contract.errors import TransferError
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.block_views import address_of, check_group
from kv_transfer.transports.leases import SLOT_BYTES
from kv_transfer.transports.nixl.agent import ID_TYPE, SELF, NixlAgent, Region

_BOUNCE_BYTES = 4 * 2**20
_MAX_LOOKS = 64
_MAX_PARTS = 256
# Slots of the table that one read may look at; a read is nearly always under one lease.
MAX_SLOTS_AT_ONCE = 16


class DescribedRegion:
    """A region's blocks as ``NixlAgent.prepare`` takes them, whole or a part of each; ``undo`` releases them."""

    def __init__(self, agent: NixlAgent, region: Region, undo: ExitStack, peer: str = SELF) -> None:
        self.region = region
        self._agent = agent
        self._undo = undo
        self._peer = peer
        self._by_part: dict[BlockPart | None, Any] = {}
        self.blocks()

    def blocks(self, part: BlockPart | None = None) -> Any:
        """Return the description for this part, cached. Raises TransferError for too many parts, or one outside a block."""
        if part not in self._by_part:
            if len(self._by_part) > _MAX_PARTS:
                raise TransferError(f"nixl: blocks are read in {_MAX_PARTS} different parts already")
            self._by_part[part] = self._agent.describe(self.region, self._peer, part, self._undo)
        return self._by_part[part]


class RemoteGroup:
    """A peer's blocks of one group of layers. bounce: a few blocks of their size in our host memory."""

    def __init__(self, region: Region) -> None:
        region.check()
        size = region.block_bytes
        self.region = region
        self.bounce = HostMemory(size, min(max(1, _BOUNCE_BYTES // size), region.num_blocks))

    def enter(self, agent: NixlAgent, peer: str, undo: ExitStack) -> None:
        """Make the blocks readable by ``agent``, and ``bounce`` writable."""
        self.blocks = DescribedRegion(agent, self.region, undo, peer)
        agent.register(self.bounce.region, undo)
        self.bounce_blocks = DescribedRegion(agent, self.bounce.region, undo)


class RemotePool:
    """A peer's blocks and its table of generations, and memory of our own besides the pool to read them into.

    regions, table: the peer's memory. groups: of each group of layers. found: slots of the table, as they were when last
    read. landing: an area of our device for its blocks, once one is read into.
    """

    landing: DescribedRegion | None = None
    _landing_memory: object = None

    def __init__(self, agent_name: str, who: str, regions: Sequence[Region], table: Region) -> None:
        """Raises TransferError for regions that cannot be memory."""
        self.who = who
        self.groups = list(map(RemoteGroup, regions))
        self._agent_name = agent_name
        self._table_region = table
        table.check()
        self.found = HostMemory(SLOT_BYTES, MAX_SLOTS_AT_ONCE)
        self._looks: dict[tuple[int, ...], Any] = {}
        self._landing_undo = ExitStack()
        self._undo = ExitStack()
        self._undo.callback(self.leave_landing)

    def enter(self, agent: NixlAgent, metadata: bytes) -> None:
        """Make it readable by ``agent``. Does not wait for the peer. Needs ``release``, also after a failure."""
        agent.add_peer(metadata, self._agent_name, self._undo)
        for group in self.groups:
            group.enter(agent, self._agent_name, self._undo)
        self._table = DescribedRegion(agent, self._table_region, self._undo, self._agent_name)
        agent.register(self.found.region, self._undo)
        self._found_slots = DescribedRegion(agent, self.found.region, self._undo)
        self._undo.callback(self._forget_looks, agent)

    def group(self, number: int) -> RemoteGroup:
        """Return a group of layers. Raises TransferError if the peer does not have it."""
        check_group(number, len(self.groups), self.who)
        return self.groups[number]

    @property
    def is_device(self) -> bool:
        """True if the blocks are on a device."""
        return self.groups[0].region.is_device

    def land_in(self, agent: NixlAgent, region: Region, memory: object) -> None:
        """Make an area of a device the one to read into. memory: owns it, and is kept while it is registered."""
        self.leave_landing()
        self._landing_memory = memory
        with ExitStack() as undo:
            agent.register(region, undo)
            self.landing = DescribedRegion(agent, region, undo)
            self._landing_undo = undo.pop_all()

    def leave_landing(self) -> None:
        """Release the area, if there is one."""
        self._landing_undo.close()
        self.landing = None
        self._landing_memory = None

    def look_at(self, agent: NixlAgent, slots: tuple[int, ...]) -> Any:
        """Return a read of these slots into ``found``, cached: the next read is mostly under the same lease."""
        look = self._looks.get(slots)
        if look is None:
            if len(self._looks) >= _MAX_LOOKS:
                self._forget_looks(agent)
            into = np.arange(len(slots), dtype=ID_TYPE)
            out_of = np.array(slots, ID_TYPE)
            look = agent.prepare(self._found_slots.blocks(), into, self._table.blocks(), out_of)
            self._looks[slots] = look
        return look

    def release(self) -> None:
        """Release everything, when no read is posted or the agent ends. Idempotent. Raises TransferError."""
        self._undo.close()

    def _forget_looks(self, agent: NixlAgent) -> None:
        while self._looks:
            agent.release(self._looks.popitem()[1])


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
