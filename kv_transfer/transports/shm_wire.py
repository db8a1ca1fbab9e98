"""What is said on the Unix socket of the ``shm`` transport, in frames as everywhere.

The receiver dials and sends DataHello (the session's token). The sender answers ShmWelcome; with an OK come three
descriptors by SCM_RIGHTS: the pool and the table of generations, both read-only, and a pidfd of the sender's process.
Then, per part of a read: ReadRequest, answered by ShmGrant. The receiver copies the granted blocks out of the pool and
compares the generation afterwards; the sender never learns of that and never waits for it.
"""

from typing import Annotated

import msgspec

from kv_transfer.transports.tcp_wire import DataStatus

MAX_SHM_FRAME_BYTES = 65536
MAX_GRANT_BLOCKS = 4096
NUM_DESCRIPTORS = 3
NUM_SLOTS = 65536
"""64-bit counters in the table of generations. Slot 0 holds a random number that only a true mapping shows."""


class ShmWelcome(msgspec.Struct, frozen=True):
    """Whether the dialer may read, and what the descriptors stand for. nonce: what slot 0 of the table holds."""

    status: DataStatus
    message: str = ""
    nonce: int = 0
    num_blocks: int = 0
    block_bytes: int = 0


class ShmGrant(msgspec.Struct, frozen=True):
    """The blocks behind the indices of a lease, which hold its content while ``slot`` shows ``generation``."""

    status: DataStatus
    message: str = ""
    slot: int = 0
    generation: int = 0
    block_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
