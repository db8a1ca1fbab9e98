"""What is said on a data connection of the ``tcp`` transport.

The receiver dials and sends DataHello (the session's token), the sender answers DataReply. Then, per read: ReadRequest,
and for each of its pieces (``ReadRequest.pieces``, which both sides cut alike) DataReply, the bytes of the blocks in order
where the reply is OK, and a second DataReply: the lease was valid after the last byte, or the piece is STALE, and the rest
of the read is not sent. Closing the connection makes a read terminal on the receiver's side.

What the sender says has a length that is a multiple of ALIGNMENT. So blocks lie in the stream as they lie in memory, and
the kernel copies them a tenth faster than at odd offsets (x86-64).
"""

from enum import StrEnum

import msgspec

from kv_transfer.framing import encode_frame

MAX_DATA_FRAME_BYTES = 65536
ALIGNMENT = 64


class DataStatus(StrEnum):
    """OK, or why not. STALE: no such lease (any more). DENIED: no such session."""

    OK = "ok"
    STALE = "stale"
    DENIED = "denied"


class DataHello(msgspec.Struct, frozen=True):
    """The token that both ends derived on their control link."""

    token: str


class DataReply(msgspec.Struct, frozen=True):
    """How a request went. padding: means nothing, and makes the frame long enough."""

    status: DataStatus
    message: str = ""
    padding: bytes = b""

    def padded(self) -> "DataReply":
        """The same words in a frame whose length is a multiple of ALIGNMENT."""
        length = len(encode_frame(self, MAX_DATA_FRAME_BYTES))
        return DataReply(self.status, self.message, bytes(-length % ALIGNMENT))

    @property
    def frame(self) -> bytes:
        """As it is said where blocks follow."""
        return encode_frame(self.padded(), MAX_DATA_FRAME_BYTES)


OK = DataReply(DataStatus.OK).padded()
OK_FRAME = encode_frame(OK, MAX_DATA_FRAME_BYTES)
