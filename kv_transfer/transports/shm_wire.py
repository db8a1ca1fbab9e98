"""What is said on the Unix socket of the ``shm`` transport, in frames as everywhere.

The receiver dials and sends DataHello (the session's token). The sender answers ShmWelcome; with an OK come three
descriptors by SCM_RIGHTS: the pool and the table of generations, both read-only, and a pidfd of the sender's process.
Nothing else is said: the connection stays open as long as the session, and its end is the end of all reads.

Which blocks a lease lends comes by the control link, in a ShmGrant per published range. The receiver copies them out of
the pool and compares the generation before and afterwards; the sender never learns of that and never waits for it.
"""

from array import array
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from contract.errors import TransferError
from kv_transfer.transports.tcp_wire import DataStatus

MAX_SHM_FRAME_BYTES = 65536
NUM_DESCRIPTORS = 3
_ID, _ID_BYTES = "q", array("q").itemsize
NUM_SLOTS = 65536
"""64-bit counters in the table of generations. Slot 0 holds a random number that only a true mapping shows."""


class ShmWelcome(msgspec.Struct, frozen=True):
    """Whether the dialer may read, and what the descriptors stand for. nonce: what slot 0 of the table holds."""

    status: DataStatus
    message: str = ""
    nonce: int = 0
    num_blocks: int = 0
    block_bytes: int = 0


class ShmGrant(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of the sender's pool, which hold what the lease lends while ``slot`` shows ``generation``.

    packed_ids: the blocks' ids, 64 bits each; both ends are on one host.
    """

    slot: Annotated[int, msgspec.Meta(gt=0, lt=NUM_SLOTS)]
    generation: int
    packed_ids: bytes

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        return len(self.packed_ids) // _ID_BYTES


def unpack_ids(grants: Sequence[ShmGrant]) -> npt.NDArray[np.int64]:
    """The blocks of all of them, in order."""
    return np.frombuffer(b"".join([grant.packed_ids for grant in grants]), np.int64)


_grants = msgspec.msgpack.Decoder(ShmGrant)


def encode_grant(slot: int, generation: int, block_ids: Sequence[int]) -> bytes:
    """What the receiver gets by the control link."""
    return msgspec.msgpack.encode(ShmGrant(slot, generation, array(_ID, block_ids).tobytes()))


def decode_grant(data: bytes) -> ShmGrant:
    """Raises TransferError for bytes that are no grant."""
    try:
        grant = _grants.decode(data)
    except msgspec.MsgspecError as error:
        raise TransferError(f"the sender handed out a malformed grant: {error}") from error
    if len(grant.packed_ids) % _ID_BYTES:
        raise TransferError(f"the sender granted {len(grant.packed_ids)} bytes of block ids")
    return grant
