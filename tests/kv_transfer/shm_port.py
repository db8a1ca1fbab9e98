"""Both roles of ``shm`` without control links, and a process that plays one of them.

As a program: ``sender FOLDER`` or ``receiver ADDRESS TOKEN BOOT_ID GRANT``, controlled by lines on standard input. A sender
lends blocks 0..NUM_BLOCKS-1 of its pool; a line ends that. A receiver gets a grant of them, reads them all, prints
``{"middle": true}`` before block GATED_BLOCK, continues after a line, and prints how the read ended.
"""

import base64
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contract.errors import KvbatonError
from contract.layout import KVLayout
from kv_transfer.protocol.reads import LeaseName, RangeGrant, Read, ReadRequest, Source
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.shm.receiver import ShmReceiver
from kv_transfer.transports.shm.sender import ShmSender
from tests.kv_transfer.fakes import ByteMemory, GatedRead, context_of

NAME = LeaseName("t", 0, "lease")
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
NUM_BLOCKS, GATED_BLOCK = 100, 40
TOKEN = "token"


class ShmPort:
    """A sender with one session, whose block i is full of bytes i + 1."""

    def __init__(self, folder: Path | None, boot_id: str = "boot", memory: ByteMemory | None = None) -> None:
        self.sessions, self.idle = Sessions(), list[LeaseName]()
        self.sessions.begin(TOKEN)
        self.sender = ShmSender(context_of(boot_id, self.sessions, self.idle.append, shm_dir=folder))
        self.memory = memory or ByteMemory(LAYOUT, NUM_BLOCKS)
        for block_id in range(self.memory.num_blocks):
            self.memory.fill(block_id, bytes([block_id + 1]))
        self.sender.start(self.memory)
        self.source = Source("p", boot_id, self.sender.address, TOKEN, "shm")
        self.grants: dict[LeaseName, tuple[RangeGrant, ...]] = {}

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> tuple[RangeGrant, ...]:
        """All that the lease has handed out so far, as the control link would bring it."""
        given, grant = self.grants.get(name, ()), self.sender.publish(name, block_ids)
        assert grant is not None
        first = given[-1].end_block if given else 0
        self.grants[name] = (*given, RangeGrant(first, len(block_ids), {"shm": grant}))
        return self.grants[name]


class Reader:
    """A receiver with a pool of its own."""

    def __init__(self) -> None:
        self.receiver, self.memory = ShmReceiver(30.0), ByteMemory(LAYOUT, NUM_BLOCKS)

    def fetch(
        self, source: Source, blocks: range, grants: tuple[RangeGrant, ...], read: Read | None = None
    ) -> None:
        """Read these of the lease's blocks into the first ones."""
        views = [self.memory.write_view(number) for number in range(len(blocks))]
        request = ReadRequest(NAME, blocks.start, len(blocks), grants)
        self.receiver.fetch(source, request, views, read or Read())

    def first_bytes(self, count: int) -> list[int]:
        return [self.memory.read_view(number)[0] for number in range(count)]


def say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def be_sender(folder: str) -> None:
    port = ShmPort(Path(folder))
    (given,) = port.publish(NAME, range(NUM_BLOCKS))
    say(address=port.sender.address, grant=in_words(given))
    for _ in sys.stdin:
        port.sender.release(NAME)
        say(idle=len(port.idle))
    port.sender.close()


def in_words(given: RangeGrant) -> str:
    return base64.b64encode(given.by_transport["shm"]).decode()


def from_words(words: str) -> tuple[RangeGrant, ...]:
    return (RangeGrant(0, NUM_BLOCKS, {"shm": base64.b64decode(words)}),)


class _ToldRead(GatedRead):
    """Waits for a line of the parent's instead of an event."""

    def check(self) -> None:
        self._checks_left -= 1
        if self._checks_left == 0:
            say(middle=True)
            sys.stdin.readline()
        Read.check(self)


def be_receiver(address: str, token: str, boot_id: str, grant: str) -> None:
    reader, outcome = Reader(), "read"
    try:
        source = Source("p", boot_id, address, token, "shm")
        reader.fetch(source, range(NUM_BLOCKS), from_words(grant), _ToldRead(GATED_BLOCK))
    except KvbatonError as error:
        outcome = type(error).__name__
    say(outcome=outcome)
    reader.receiver.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["sender", folder]:
            be_sender(folder)
        case ["receiver", address, token, boot_id, grant]:
            be_receiver(address, token, boot_id, grant)
