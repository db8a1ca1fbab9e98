"""A peer's pool as this worker's NIXL agent sees it. Its methods are called by who has the agent only."""

from contextlib import ExitStack
from typing import Any

import numpy as np

from kv_transfer.transports.generations import NUM_SLOTS, SLOT_BYTES
from kv_transfer.transports.nixl.agent import DescribedRegion, NixlAgent
from kv_transfer.transports.nixl.memory import HostMemory, Region
from kv_transfer.transports.nixl.wire import NixlWelcome

_BOUNCE_BYTES = 4 * 2**20
_MAX_LOOKS = 64
MAX_SLOTS_AT_ONCE = 16
"""Of the table; a read is nearly always under one lease."""


class RemotePool:
    """What is known of a peer's blocks and its table of generations, and what they are read into beside our own pool.

    bounce: a few blocks of their size in host memory of our own. found: slots of the table, as they were when read last.
    num_posted: reads that are not terminal. Nothing is given back before it is 0, and ``leave`` was called.
    """

    def __init__(self, agent_name: str, who: str, welcome: NixlWelcome) -> None:
        """Raises TransferError for a welcome that names no memory."""
        self.agent_name = agent_name
        self.who = who
        self.region = Region(
            welcome.address, welcome.block_bytes, welcome.num_blocks, welcome.is_device, welcome.device_id
        )
        self._table_region = Region(welcome.table_address, SLOT_BYTES, NUM_SLOTS)
        self.region.check()
        self._table_region.check()
        size = self.region.block_bytes
        self.bounce = HostMemory(size, min(max(1, _BOUNCE_BYTES // size), self.region.num_blocks))
        self.found = HostMemory(SLOT_BYTES, MAX_SLOTS_AT_ONCE)
        self.num_posted = 0
        self.is_left = False
        self._looks: dict[tuple[int, ...], Any] = {}
        self._undo = ExitStack()

    def enter(self, agent: NixlAgent, metadata: bytes) -> None:
        """Make it readable. Does not wait for the peer."""
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
        """A read of these slots into ``found``, to be posted; kept, since the next read is mostly under the same lease."""
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
        """Nobody will read from it any more. What was taken is given back now, or when the last read is terminal."""
        self.is_left = True
        self.give_back()

    def give_back(self) -> None:
        """Give everything back, if nobody needs it. Raises TransferError where the library fails."""
        if self.is_left and not self.num_posted:
            self._undo.close()

    def abandon(self) -> None:
        """Give everything back because the agent ends, posted reads or not. Raises TransferError."""
        self._undo.close()

    def _forget_looks(self, agent: NixlAgent) -> None:
        while self._looks:
            agent.release(self._looks.popitem()[1])

    def _described(self, agent: NixlAgent, undo: ExitStack, region: Region, *peer: str) -> DescribedRegion:
        described = DescribedRegion(agent, region, *peer)
        undo.callback(described.give_back)
        return described

    def _registered(self, agent: NixlAgent, undo: ExitStack, region: Region) -> DescribedRegion:
        undo.callback(agent.deregister, agent.register(region))
        return self._described(agent, undo, region)
