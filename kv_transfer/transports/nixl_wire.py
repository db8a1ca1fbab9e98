"""What is said on the data port of the ``nixl`` transport, in frames as everywhere.

The receiver dials and sends DataHello (the session's token), the sender answers DataReply, then NixlWelcome. The
receiver reads the nonce and block 0 by the library, and says so by a NixlAsk without a lease. Then, per part of a read:
a NixlAsk for blocks, answered by a NixlGrant with the blocks; the reads; and a NixlAsk for none, whose answer
says whether the lease was valid behind the last byte. Between a welcome or a grant and the next word the sender drives
the library on, which some of UCX's lanes need. Where the blocks came with the words that they are published, the reader
asks and begins: it hears the first answer when it is done, and it counts as much as the other one.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from contract.errors import TransferError
from kv_transfer.transport import LeaseName
from kv_transfer.transports.tcp_wire import DataStatus

MAX_NIXL_FRAME_BYTES = 262144
MAX_GRANT_BLOCKS = 4096
NONCE_BYTES = 64


def encode_blocks(block_ids: Sequence[int]) -> bytes:
    """What a reader gets with the words that these blocks are published."""
    return msgspec.msgpack.encode(list(block_ids))


def decode_blocks(data: bytes) -> list[int]:
    """Raises TransferError for bytes that are no blocks."""
    try:
        return msgspec.msgpack.decode(data, type=list[Annotated[int, msgspec.Meta(ge=0)]])
    except msgspec.MsgspecError as error:
        raise TransferError(f"the sender handed out a malformed grant: {error}") from error


class NixlWelcome(msgspec.Struct, frozen=True):
    """How to read the sender's pool: its agent, and where the blocks lie.

    agent: the library's own description of the agent, its ports and its memory. is_device, device_id: the pool is in
    that GPU's memory. nonce: what the NONCE_BYTES at nonce_address hold, which only the right memory shows.
    """

    status: DataStatus
    message: str = ""
    agent: bytes = b""
    address: int = 0
    block_bytes: int = 0
    num_blocks: int = 0
    is_device: bool = False
    device_id: int = 0
    nonce_address: int = 0
    nonce: bytes = b""


class NixlAsk(msgspec.Struct, frozen=True):
    """May I read so many blocks of this lease, from ``first_block`` on? None: I have read; is the lease still valid?

    name: None for what is read under no lease.
    """

    name: LeaseName | None
    first_block: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0


class NixlGrant(msgspec.Struct, frozen=True):
    """The pool's blocks that were asked for."""

    status: DataStatus
    message: str = ""
    block_ids: list[int] = []
