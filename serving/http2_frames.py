"""Finds the frames of one direction of an HTTP/2 connection (RFC 9113, section 4) by their first nine bytes.

The fields of a compressed header block (HPACK, RFC 7541) are counted without decoding a name or a value.
"""

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


class FieldCount:
    """Walks over the representations of one block, whose bytes may be cut anywhere. Keeps at most six bytes."""

    def __init__(self) -> None:
        self.num_fields = 0
        self._num_strings = 0  # of the current field, those that have not begun
        self._num_to_skip = 0
        self._begun = b""

    def skip(self, num_bytes: int) -> None:
        """Leave out the next bytes, which belong to no field."""
        self._num_to_skip += num_bytes

    def feed(self, data: bytes, most: int) -> None:
        """Count fields until there are more than ``most``. Raises ValueError for a number that no client sends."""
        data = self._begun + data
        at = self._num_to_skip
        end = len(data)
        while at < end and self.num_fields <= most:
            first = data[at]
            num_bits = 7
            if not self._num_strings and first < 0x80:
                # The bits of the number in the first byte of a representation (RFC 7541, section 6).
                num_bits = 6 if first & 0x40 else 5 if first & 0x20 else 4
            found = _number(data, at, num_bits)
            if found is None:
                break
            value, at = found
            if self._num_strings:
                self._num_strings -= 1
                at += value
                continue
            self.num_fields += 1
            if first < 0x80 and first >> 5 != 1:  # not a reference to a table, and not a new size of it
                self._num_strings = 1 if value else 2
        self._num_to_skip = max(0, at - end)
        self._begun = data[at:]


def _number(data: bytes, at: int, num_bits: int) -> tuple[int, int] | None:
    """Return a number and the place after it; None if it is not complete (RFC 7541, section 5.1)."""
    largest = (1 << num_bits) - 1
    value = data[at] & largest
    if value < largest:
        return value, at + 1
    for index, byte in enumerate(data[at + 1 : at + 5]):
        value += (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + 2 + index
    if len(data) >= at + 5:
        raise ValueError("a number of a header block has more than four further bytes")
    return None
