"""Both roles of ``nixl`` without control links, and a process that plays the sender.

As a program: ``BOOT_ID``. It lends its pool, the last block first, and prints the grant. Each line on standard input is a
command: an empty one ends the lease, ``end`` ends the session. ``UCX_TLS=self,tcp`` in its environment leaves only the lane
on which its help is needed.
"""

import base64
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from contract.layout import KVLayout
from kv_transfer.protocol.reads import LeaseName, RangeGrant, Read, ReadRequest, Source
from kv_transfer.transports.block_views import write_views
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.nixl.agent import NixlLibrary, load
from kv_transfer.transports.nixl.nixl_thread import NixlThread
from kv_transfer.transports.nixl.receiver import NixlReceiver, SlowReads
from kv_transfer.transports.nixl.sender import NixlSender
from kv_transfer.transports.transport import TransportContext
from tests.kv_transfer.fakes import ByteMemory, context_of

NAME = LeaseName("t", 0, "lease")
LAYOUT = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, block_size=16, dtype="float32")
NUM_BLOCKS = 100
TOKEN = "token"


def context_for(
    boot_id: str, sessions: Sessions, idle: list[LeaseName], timeout_seconds: float = 30.0, **settings: Any
) -> TransportContext:
    return context_of(boot_id, sessions, idle.append, read_timeout_seconds=timeout_seconds, **settings)


def is_driving(nixl_thread: NixlThread) -> bool:
    """The thread does not rest, because something is read from here or by this worker."""
    return nixl_thread.ask(lambda driver: driver.pause_seconds() is not None)


class NixlPort:
    """A sender with one session, whose block i is full of bytes i + 1."""

    def __init__(self, boot_id: str = "boot", memory: ByteMemory | None = None) -> None:
        self.sessions, self.idle = Sessions(), list[LeaseName]()
        self.sessions.begin(TOKEN)
        self.sender = NixlSender(context_for(boot_id, self.sessions, self.idle), load("127.0.0.1"))
        self.nixl_thread = self.sender.nixl_thread
        self.memory = memory or ByteMemory(LAYOUT, NUM_BLOCKS)
        for block_id in range(self.memory.num_blocks):
            self.memory.fill(block_id, bytes([block_id + 1]))
        self.sender.start(self.memory)
        self.source = Source("p", boot_id, self.sender.address, TOKEN, "nixl")
        self.grants: dict[LeaseName, tuple[RangeGrant, ...]] = {}

    def until_resting(self) -> None:
        """Wait until no reader needs help."""
        while is_driving(self.nixl_thread):
            time.sleep(0.001)

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> tuple[RangeGrant, ...]:
        """All that the lease has handed out so far, as the control link would bring it."""
        given, grant = self.grants.get(name, ()), self.sender.publish(name, block_ids)
        assert grant is not None
        first = given[-1].end_block if given else 0
        self.grants[name] = (*given, RangeGrant(first, len(block_ids), {"nixl": grant}))
        return self.grants[name]


class Reader:
    """A receiver with a pool of its own, which is registered as a worker's is."""

    def __init__(
        self,
        library: NixlLibrary | None = None,
        timeout_seconds: float = 30.0,
        slow_reads: SlowReads | None = None,
    ) -> None:
        self.memory = ByteMemory(LAYOUT, NUM_BLOCKS)
        self._sender = NixlSender(context_for("reader", Sessions(), []), library or load("127.0.0.1"))
        self.nixl_thread = self._sender.nixl_thread
        self._sender.start(self.memory)
        self.receiver = NixlReceiver(self.nixl_thread, timeout_seconds, slow_reads)

    def fetch(
        self,
        source: Source,
        blocks: range,
        grants: tuple[RangeGrant, ...],
        into: Sequence[int] | None = None,
        read: Read | None = None,
        name: LeaseName = NAME,
    ) -> None:
        """Read these of the lease's blocks into the pool's blocks ``into``, else into the first ones."""
        views = write_views(self.memory, into or range(len(blocks)))
        request = ReadRequest(name, blocks.start, len(blocks), grants)
        self.receiver.fetch(source, request, views, read or Read())

    def holds(self, block_id: int, byte: int) -> bool:
        """The whole block is full of it."""
        return bytes(self.memory.read_view(block_id)) == bytes([byte]) * LAYOUT.block_bytes

    def close(self) -> None:
        self.receiver.close()
        self._sender.close()


class HookedRead(Read):
    """A read that does something at its look number ``number`` whether it was stopped."""

    def __init__(self, number: int, hook: Callable[[], None]) -> None:
        super().__init__()
        self._looks_left, self._hook = number, hook

    def check(self) -> None:
        self._looks_left -= 1
        if self._looks_left == 0:
            self._hook()
        super().check()


BEFORE_POST, BEHIND_POST = 2, 3
"""Once connected, fetch looks at its begin, before each part that it posts, and behind it."""


def from_words(words: object) -> tuple[RangeGrant, ...]:
    """Return the grant that a sender's process has printed."""
    return (RangeGrant(0, NUM_BLOCKS, {"nixl": base64.b64decode(str(words))}),)


def say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main(boot_id: str) -> None:
    port = NixlPort(boot_id)
    (given,) = port.publish(NAME, range(NUM_BLOCKS)[::-1])
    say(address=port.sender.address, grant=base64.b64encode(given.by_transport["nixl"]).decode())
    for word in sys.stdin:
        if word.strip() == "end":
            port.sessions.end(TOKEN)
        else:
            port.sender.release(NAME)
        say(idle=len(port.idle))
    port.sender.close()


if __name__ == "__main__":
    main(sys.argv[1])
