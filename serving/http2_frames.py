"""Finds the frames of one direction of an HTTP/2 connection (RFC 9113, section 4) by their first nine bytes."""

from collections.abc import Callable
from enum import IntEnum

HEAD_BYTES = 9
MAX_FRAME_BYTES = 2**14
"""The largest frame that a client may send: gRPC's server announces no other size."""
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
END_STREAM = 0x1
"""Flag of DATA and HEADERS."""
END_HEADERS = 0x4
"""Flag of HEADERS and CONTINUATION."""
PADDED = 0x8
PRIORITY = 0x20
"""Flags of HEADERS, for what its payload has beside fields."""


class Kind(IntEnum):
    """The types of frames; further ones have to be ignored."""

    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Code(IntEnum):
    """Reasons for which a connection ends (RFC 9113, section 7)."""

    PROTOCOL_ERROR = 1
    FRAME_SIZE_ERROR = 6
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


OnFrame = Callable[[int, int, int, int], bool]
"""Gets type, flags, stream and length of a frame, and returns True to get its payload."""


class FrameReader:
    """Finds frames in a stream of bytes, which may be cut anywhere. Keeps at most eight bytes.

    on_frame: called once for each frame, in order, before its payload has arrived; an exception ends the reading.
    on_payload: called with the pieces of the payloads for which ``on_frame`` returned True.
    """

    def __init__(self, on_frame: OnFrame, on_payload: Callable[[bytes], None] = lambda _: None) -> None:
        self._on_frame = on_frame
        self._on_payload = on_payload
        self._passes_payload = False
        self._begun = b""
        self._num_to_skip = 0

    @property
    def is_between_frames(self) -> bool:
        """True if no frame has begun that has not ended."""
        return not self._begun and not self._num_to_skip

    @property
    def is_in_payload(self) -> bool:
        """True if a payload for which ``on_frame`` returned True is not complete."""
        return self._passes_payload and self._num_to_skip > 0

    def feed(self, data: bytes) -> None:
        """Read the next bytes."""
        if self._begun:
            data = self._begun + data
            self._begun = b""
        at = self._num_to_skip
        end = len(data)
        if self._passes_payload and at:
            self._on_payload(data[:at])
        while at + HEAD_BYTES <= end:
            length = data[at] << 16 | data[at + 1] << 8 | data[at + 2]
            stream = int.from_bytes(data[at + 5 : at + 9]) & 0x7FFFFFFF
            self._passes_payload = self._on_frame(data[at + 3], data[at + 4], stream, length)
            at += HEAD_BYTES
            if self._passes_payload:
                self._on_payload(data[at : at + length])
            at += length
        self._num_to_skip = max(0, at - end)
        self._begun = data[at:]


def goaway(code: Code, reason: str) -> bytes:
    """Return the frame that names the reason for the end of a connection."""
    payload = bytes(4) + code.to_bytes(4) + reason.encode()
    return len(payload).to_bytes(3) + bytes((Kind.GOAWAY, 0)) + bytes(4) + payload
