"""The messages on data connections: the greeting that transports share, and the reads of the ``tcp`` transport.

The receiver dials, both prove their session (``data_greeting``), the sender says DataReply. Then, per read: ReadRequest,
and for each of its pieces (``ReadRequest.pieces``, which both sides cut alike) an answer, the bytes of the blocks in order
where it is OK, and a second answer: the lease was valid after the last byte. Where one of the two is STALE the sender closes
the connection behind it. Closing the connection makes a read terminal on the receiver's side.

An answer is a DataReply without a message, in a frame of ALIGNMENT bytes. So a receiver takes answers and blocks by one
call, and blocks lie in the stream as in memory: the kernel copies them a tenth faster than at odd offsets (x86-64).
"""

from enum import StrEnum

import msgspec

from kv_transfer.links.framing import encode_frame

MAX_DATA_FRAME_BYTES = 65536
ALIGNMENT = 64


class DataStatus(StrEnum):
    """OK, or why not. STALE: no such lease (any more). DENIED: no such session."""

    OK = "ok"
    STALE = "stale"
    DENIED = "denied"


class DataHello(msgspec.Struct, frozen=True):
    """Which session the connection is for, by the name of its token, and a nonce for the sender."""

    session: str
    transport: str
    nonce: str


class DataChallenge(msgspec.Struct, frozen=True):
    """The sender's proof over both nonces, and its own. DENIED: without, and ``message`` says why."""

    status: DataStatus
    message: str = ""
    nonce: str = ""
    proof: str = ""


class DataProve(msgspec.Struct, frozen=True):
    """The receiver's proof over both nonces."""

    proof: str


class DataReply(msgspec.Struct, frozen=True):
    """How a request went. padding: means nothing, and makes the frame long enough."""

    status: DataStatus
    message: str = ""
    padding: bytes = b""


def reply_frame(status: DataStatus, message: str = "") -> bytes:
    """A DataReply whose frame has a length that is a multiple of ALIGNMENT."""
    length = len(encode_frame(DataReply(status, message), MAX_DATA_FRAME_BYTES))
    return encode_frame(DataReply(status, message, bytes(-length % ALIGNMENT)), MAX_DATA_FRAME_BYTES)


OK_FRAME = reply_frame(DataStatus.OK)
STALE_FRAME = reply_frame(DataStatus.STALE)
"""The answers among blocks: ALIGNMENT bytes each."""
