"""Limits on the frames that a client of a gRPC port may send, with or without a key.

gRPC's library bounds the bytes of messages by flow control. It does not bound a header block that never ends, it keeps
hundreds of kilobytes for a block of 16 kB that refers 15,000 times to one header, and it takes any number of frames
without a message. Here frames are counted by type and length, and the fields of header blocks; nothing else of a payload
is read.
"""

import time
from collections.abc import Callable

from serving.http2_frames import (
    END_HEADERS,
    END_STREAM,
    MAX_FRAME_BYTES,
    PADDED,
    PREFACE,
    PRIORITY,
    Code,
    FieldCount,
    FrameReader,
    Kind,
)

MAX_BLOCK_BYTES = 2**15
"""Size of one compressed header block with its padding: twice the metadata that a port accepts."""
MAX_BLOCK_FRAMES = 64
MAX_FIELDS = 512
"""Each counts as 32 bytes of metadata at least (RFC 9113, 6.5.2): more are above what a port accepts."""
MAX_OPEN_STREAMS = 1024
"""More than a port allows at once: a client may open streams before it has received that number."""
FIRST_BURST = 512
"""Frames that a new client may send at once: fewer open and cancel the 128 calls that a port allows at a time.

The event loop takes about half a millisecond for them, and every new connection may send so many."""
BURST = 5_000
RATE = 200.0
"""Frames per second beyond those that answer a frame of the server; and how many may be saved up."""
# A larger DATA frame has a message, which flow control limits; padding has at most 255 bytes, and one for their number.
_MAX_PADDED_BYTES = 256
_BYTES_PER_UNIT = 64
_PRIORITY_BYTES = 5
_MESSAGE_KINDS = (Kind.HEADERS, Kind.DATA)


class FrameLimitError(Exception):
    """A client sent what ends its connection. code: for the client."""

    def __init__(self, code: Code, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class _HeaderBlock:
    """The size of a header block. stream: the one that has to continue it, else 0."""

    def __init__(self) -> None:
        self.stream = 0
        self._num_bytes = 0
        self._num_frames = 0
        self._fields = FieldCount()
        self._num_left = 0
        """Bytes of the frame that have not come and are fields, and, while it is unknown, padding."""
        self._has_unknown_padding = False

    def begin_frame(self, kind: int, flags: int, stream: int, length: int) -> None:
        """Count another frame. Raises FrameLimitError."""
        if not stream:
            raise FrameLimitError(Code.PROTOCOL_ERROR, "a header block belongs to no stream")
        self._num_bytes += length
        self._num_frames += 1
        if self._num_bytes > MAX_BLOCK_BYTES or self._num_frames > MAX_BLOCK_FRAMES:
            raise FrameLimitError(
                Code.ENHANCE_YOUR_CALM,
                f"a header block has more than {MAX_BLOCK_BYTES} bytes or {MAX_BLOCK_FRAMES} frames",
            )
        self.stream = 0 if flags & END_HEADERS else stream
        self._num_left = length
        if kind == Kind.HEADERS:
            self._has_unknown_padding = bool(flags & PADDED)
            if flags & PRIORITY:
                self._fields.skip(_PRIORITY_BYTES)

    def read(self, piece: bytes) -> None:
        """Count the fields in a piece of the frame, without padding. Raises FrameLimitError."""
        if self._has_unknown_padding and piece:
            # The first byte is the length of the padding at the end.
            self._num_left -= 1 + piece[0]
            self._has_unknown_padding = False
            piece = piece[1:]
        piece = piece[: max(0, self._num_left)]
        self._num_left -= len(piece)
        try:
            self._fields.feed(piece, MAX_FIELDS)
        except ValueError as error:
            raise FrameLimitError(Code.COMPRESSION_ERROR, str(error)) from error
        if self._fields.num_fields > MAX_FIELDS:
            raise FrameLimitError(Code.ENHANCE_YOUR_CALM, f"a header block has more than {MAX_FIELDS} fields")


class Calls:
    """The calls of one connection that have begun and not ended, by stream."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._last_stream = 0
        self.num_begun = 0
        self.has_accepted = False
        """True once the server has begun to answer a call."""

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, stream: int) -> None:
        """Record the end of a header block of the client, which begins a call unless it ends one."""
        # Streams of a client have growing numbers: headers of an earlier one are trailers.
        if stream > self._last_stream:
            self._last_stream = stream
            self._open.add(stream)
            self.num_begun += 1

    def end(self, stream: int) -> None:
        """Record that either side has ended a call."""
        self._open.discard(stream)


class ClientFrames:
    """Counts the frames of one connection, in both directions. Its memory does not depend on what the client sends.

    Each frame of the client costs a unit; large DATA frames cost nothing, and payloads other than headers a unit per 64
    bytes. A client begins with ``FIRST_BURST`` of them. A unit comes back for each frame of a message from the server,
    since a client acknowledges what it reads with small frames, and at ``RATE``. clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent = FrameReader(self._on_sent, lambda piece: self._block.read(piece))
        self.answered = FrameReader(self._on_answered)
        """Reads what the server sends; between its frames another one may follow."""
        self._preface = PREFACE
        self._has_settings = False
        self._block = _HeaderBlock()
        self.calls = Calls()
        self._budget = (FIRST_BURST, clock())
        self.num_blocks = 0
        """The header blocks that have ended, and 1 for the client's first frame."""

    @property
    def has_preface(self) -> bool:
        """True once the client has shown that it speaks HTTP/2."""
        return not self._preface

    @property
    def is_in_headers(self) -> bool:
        """True if the client has to continue: its first frame has not come, or a header block has not ended."""
        return not self._has_settings or bool(self._block.stream) or self._sent.is_in_payload

    def read_sent(self, data: bytes) -> None:
        """Count what the client has sent. Raises FrameLimitError."""
        if self._preface:
            begin, data = data[: len(self._preface)], data[len(self._preface) :]
            if not self._preface.startswith(begin):
                raise FrameLimitError(Code.PROTOCOL_ERROR, "this port speaks gRPC over HTTP/2")
            self._preface = self._preface[len(begin) :]
        self._sent.feed(data)

    def _on_sent(self, kind: int, flags: int, stream: int, length: int) -> bool:
        if kind == Kind.DATA:
            if length <= _MAX_PADDED_BYTES:
                self._charge(1)
            # The frequent case of a message needs no further checks.
            if not self._block.stream and self._has_settings:
                return False
        self._check_order(kind, stream, length)
        if kind in (Kind.HEADERS, Kind.CONTINUATION):
            self._charge(1)
            self._on_headers(kind, flags, stream, length)
            return True
        self._charge(1 + length // _BYTES_PER_UNIT)
        if kind == Kind.PUSH_PROMISE:
            raise FrameLimitError(Code.PROTOCOL_ERROR, "a client cannot push")
        if kind == Kind.RST_STREAM:
            self.calls.end(stream)
        elif kind == Kind.SETTINGS and not self._has_settings:
            self._has_settings = True
            self.num_blocks += 1
        return False

    def _check_order(self, kind: int, stream: int, length: int) -> None:
        if not self._has_settings and kind != Kind.SETTINGS:
            raise FrameLimitError(Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if length > MAX_FRAME_BYTES:
            raise FrameLimitError(Code.FRAME_SIZE_ERROR, f"a frame has more than {MAX_FRAME_BYTES} bytes")
        if bool(self._block.stream) != (kind == Kind.CONTINUATION) or self._block.stream not in (0, stream):
            raise FrameLimitError(Code.PROTOCOL_ERROR, "a header block is not continued by its next frame")

    def _on_headers(self, kind: int, flags: int, stream: int, length: int) -> None:
        if kind == Kind.HEADERS:
            self._block = _HeaderBlock()
        self._block.begin_frame(kind, flags, stream, length)
        if self._block.stream:
            return
        self.num_blocks += 1
        self.calls.begin(stream)
        if len(self.calls) > MAX_OPEN_STREAMS:
            raise FrameLimitError(Code.ENHANCE_YOUR_CALM, f"more than {MAX_OPEN_STREAMS} open calls")

    def _on_answered(self, kind: int, flags: int, stream: int, _length: int) -> bool:
        if kind in _MESSAGE_KINDS:
            left, since = self._budget
            self._budget = (min(BURST, left + 1), since)
            if flags & END_STREAM:
                self.calls.end(stream)
            else:
                # An error comes without a beginning: its only headers end the stream.
                self.calls.has_accepted = True
        elif kind == Kind.RST_STREAM:
            self.calls.end(stream)
        return False

    def _charge(self, units: int) -> None:
        left, since = self._budget
        if left < units:
            now = self._clock()
            left, since = min(BURST, left + int((now - since) * RATE)), now
            if left < units:
                raise FrameLimitError(Code.ENHANCE_YOUR_CALM, "too many frames that carry no message")
        self._budget = (left - units, since)
