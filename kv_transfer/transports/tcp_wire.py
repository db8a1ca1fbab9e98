"""What is said on a data connection of the ``tcp`` transport.

The receiver dials and sends DataHello (the session's token), the sender answers DataReply. Then, per piece: ReadRequest,
DataReply, the bytes of the blocks in order where the reply is OK, and a second DataReply: the lease was valid after
the last byte, or the piece is STALE. Closing the connection makes a read terminal on the receiver's side.
"""

from enum import StrEnum

import msgspec

MAX_DATA_FRAME_BYTES = 65536


class DataStatus(StrEnum):
    """OK, or why not. STALE: no such lease (any more). DENIED: no such session."""

    OK = "ok"
    STALE = "stale"
    DENIED = "denied"


class DataHello(msgspec.Struct, frozen=True):
    """The token that both ends derived on their control link."""

    token: str


class DataReply(msgspec.Struct, frozen=True):
    """How a request went."""

    status: DataStatus
    message: str = ""
