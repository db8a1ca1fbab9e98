"""A peer's pool as this worker's NIXL agent sees it. Its methods are called by the owner's thread only."""

from contextlib import ExitStack

from kv_transfer.transports.nixl_agent import DescribedRegion, NixlAgent
from kv_transfer.transports.nixl_memory import HostMemory, Region
from kv_transfer.transports.nixl_wire import NixlWelcome

_BOUNCE_BYTES = 4 * 2**20


class RemotePool:
    """What is known of a peer's blocks, and ``bounce``: a few blocks of their size in host memory of our own.

    num_posted: reads that are not terminal. Nothing is given back before it is 0, and ``leave`` was called.
    """

    def __init__(self, agent_name: str, who: str, welcome: NixlWelcome) -> None:
        """Raises TransferError for a welcome that names no memory."""
        self.agent_name, self.who = agent_name, who
        self.region = Region(
            welcome.address, welcome.block_bytes, welcome.num_blocks, welcome.is_device, welcome.device_id
        )
        self._nonce_region = Region(welcome.nonce_address, len(welcome.nonce), 1)
        self.region.check()
        self._nonce_region.check()
        size = self.region.block_bytes
        self.bounce = HostMemory(size, min(max(1, _BOUNCE_BYTES // size), self.region.num_blocks))
        self.found_nonce = HostMemory(len(welcome.nonce), 1)
        self.num_posted = 0
        self._is_left = False
        self._undo = ExitStack()

    def enter(self, agent: NixlAgent, metadata: bytes) -> None:
        """Make it readable. Does not wait for the peer."""
        with ExitStack() as undo:
            agent.add_peer(metadata, self.agent_name)
            undo.callback(agent.remove_peer, self.agent_name)
            self.blocks = self._described(agent, undo, self.region, self.agent_name)
            self.nonce = self._described(agent, undo, self._nonce_region, self.agent_name)
            self.bounce_blocks = self._registered(agent, undo, self.bounce.region)
            self.nonce_blocks = self._registered(agent, undo, self.found_nonce.region)
            self._undo = undo.pop_all()

    def leave(self) -> None:
        """Nobody will read from it any more. What was taken is given back now, or when the last read is terminal."""
        self._is_left = True
        self.give_back()

    def give_back(self) -> None:
        """Give everything back, if nobody needs it. Raises TransferError where the library fails."""
        if self._is_left and not self.num_posted:
            self._undo.close()

    def abandon(self) -> None:
        """Give everything back because the agent ends, posted reads or not. Raises TransferError."""
        self._undo.close()

    def _described(self, agent: NixlAgent, undo: ExitStack, region: Region, *peer: str) -> DescribedRegion:
        described = DescribedRegion(agent, region, *peer)
        undo.callback(described.give_back)
        return described

    def _registered(self, agent: NixlAgent, undo: ExitStack, region: Region) -> DescribedRegion:
        undo.callback(agent.deregister, agent.register(region))
        return self._described(agent, undo, region)
