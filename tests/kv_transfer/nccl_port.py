"""Both roles of ``nccl`` (by gloo) without control links, and a process that plays the sender: see ``nixl_port``."""

import sys

from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.transports.block_views import write_views
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.nccl.transport import NcclReceiver, NcclSender
from tests.kv_transfer.fakes import ByteMemory
from tests.kv_transfer.nixl_port import LAYOUT, NAME, NUM_BLOCKS, TOKEN, context_for, say


class NcclPort:
    """A sender with one session, whose block i is full of bytes i + 1."""

    def __init__(self, boot_id: str = "boot", timeout_seconds: float = 30.0) -> None:
        self.sessions, self.idle = Sessions(), list[LeaseName]()
        self.sessions.begin(TOKEN)
        self.sender = NcclSender(context_for(boot_id, self.sessions, self.idle, timeout_seconds))
        self.memory = ByteMemory(LAYOUT, NUM_BLOCKS)
        for block_id in range(NUM_BLOCKS):
            self.memory.fill(block_id, bytes([block_id + 1]))
        self.sender.start(self.memory)
        self.source = Source("p", boot_id, self.sender.address, TOKEN, "nccl")


class Reader:
    """A receiver with a pool of its own."""

    def __init__(self, timeout_seconds: float = 30.0) -> None:
        self.memory = ByteMemory(LAYOUT, NUM_BLOCKS)
        context = context_for("reader", Sessions(), [], timeout_seconds)
        self._sender = NcclSender(context)
        self._sender.start(self.memory)
        self.receiver = NcclReceiver(self._sender, context.settings)

    def fetch(self, source: Source, blocks: range, read: Read | None = None) -> None:
        """Read these of the lease's blocks into the first ones."""
        views = write_views(self.memory, range(len(blocks)))
        self.receiver.fetch(source, ReadRequest(NAME, blocks.start, len(blocks)), views, read or Read())

    def holds(self, block_id: int, byte: int) -> bool:
        """The whole block is full of it."""
        return bytes(self.memory.read_view(block_id)) == bytes([byte]) * LAYOUT.block_bytes

    def close(self) -> None:
        self.receiver.close()
        self._sender.close()


def main(boot_id: str, timeout_seconds: float) -> None:
    port = NcclPort(boot_id, timeout_seconds)
    port.sender.publish(NAME, range(NUM_BLOCKS)[::-1])
    say(address=port.sender.address)
    for _ in sys.stdin:
        port.sender.release(NAME)
        say(idle=len(port.idle))
    port.sender.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
