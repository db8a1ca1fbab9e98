"""Builds HTTP/2 frames by hand: a client of gRPC that keeps no rule."""

from collections.abc import Callable, Iterator

from serving.http2_frames import END_HEADERS, END_STREAM, PREFACE, Kind

_METHOD = b"/grpc.health.v1.Health/Check"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    return len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4) + payload


HELLO = PREFACE + frame(Kind.SETTINGS, 0, 0)
"""The first bytes of a client."""


def literal(name: bytes, value: bytes) -> bytes:
    """Return one header that changes no table (RFC 7541, 6.2.2); both texts have at most 126 bytes."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


REQUEST = b"\x83\x86" + b"".join(
    literal(name, value)
    for name, value in (
        (b":path", _METHOD),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)
"""The header block of a call of the health service, which needs no key."""


def whole_call(stream: int, method: bytes) -> bytes:
    """Return the frames of a call with an empty message and without a key."""
    rest = REQUEST[REQUEST.index(literal(b":authority", b"localhost")) :]
    block = b"\x83\x86" + literal(b":path", method) + rest
    return frame(Kind.HEADERS, END_HEADERS, stream, block) + frame(Kind.DATA, END_STREAM, stream, bytes(5))


def new_headers(size: int) -> bytes:
    """Return ever new headers of about 100 bytes, ``size`` bytes together."""
    return b"".join(literal(b"x-%08d" % n, b"v" * 88) for n in range(size // 101))


def opened(stream: int, flags: int = END_HEADERS) -> bytes:
    """Return the frame that begins a call."""
    return frame(Kind.HEADERS, flags, stream, REQUEST)


def _continued(payload: bytes) -> Iterator[bytes]:
    yield opened(1, 0)
    while True:
        yield frame(Kind.CONTINUATION, 0, 1, payload)


def _repeated(once: bytes, again: bytes) -> Iterator[bytes]:
    yield once
    while True:
        yield again * max(1, 2**16 // len(again))


def _reset() -> Iterator[bytes]:
    for stream in range(1, 2**31, 2):
        yield opened(stream) + frame(Kind.RST_STREAM, 0, stream, bytes(4))


def _calls() -> Iterator[bytes]:
    for stream in range(1, 2**31, 2):
        yield opened(stream)


def _large_references() -> Iterator[bytes]:
    """Calls whose blocks name a header of 3,900 bytes, which is in the table once, 15,000 times."""
    value = b"v" * 3900
    stored = b"\x40\x05x-big\x7f" + bytes((0x80 | (len(value) - 127) & 0x7F, (len(value) - 127) >> 7)) + value
    yield frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, REQUEST + stored)
    for stream in range(3, 2**31, 2):
        yield frame(Kind.HEADERS, END_HEADERS | END_STREAM, stream, REQUEST + b"\xbe" * 15_000)


def _static_references() -> Iterator[bytes]:
    for stream in range(1, 2**31, 2):
        yield frame(Kind.HEADERS, END_HEADERS | END_STREAM, stream, REQUEST + b"\x92" * 15_000)


def endless(name: str) -> Iterator[bytes]:
    """Return bytes without end of the kind of this name, one of ``ENDLESS``, that follow ``HELLO``."""
    return ENDLESS[name]()


_PADDED = frame(Kind.DATA, 0x8, 1, b"\xff" + bytes(255))
ENDLESS: dict[str, Callable[[], Iterator[bytes]]] = {
    "continuation": lambda: _continued(new_headers(2**14)),
    "empty continuation": lambda: _continued(b""),
    "priority": lambda: _repeated(b"", frame(Kind.PRIORITY, 0, 1, bytes((0, 0, 0, 3, 1)))),
    "settings": lambda: _repeated(b"", frame(Kind.SETTINGS, 0, 0)),
    "large settings": lambda: _repeated(b"", frame(Kind.SETTINGS, 0, 0, b"\x00\x99\x00\x00\x00\x01" * 2000)),
    "settings acknowledged": lambda: _repeated(b"", frame(Kind.SETTINGS, 1, 0)),
    "ping": lambda: _repeated(b"", frame(Kind.PING, 0, 0, bytes(8))),
    "ping acknowledged": lambda: _repeated(b"", frame(Kind.PING, 1, 0, bytes(8))),
    "unknown": lambda: _repeated(b"", frame(0x20, 0, 1, bytes(2**14))),
    "small unknown": lambda: _repeated(b"", frame(0x20, 0, 0)),
    "push promise": lambda: _repeated(b"", frame(Kind.PUSH_PROMISE, END_HEADERS, 1, bytes(4) + REQUEST)),
    "padding": lambda: _repeated(opened(1), _PADDED),
    "empty data": lambda: _repeated(opened(1), frame(Kind.DATA, 0, 1)),
    "window update": lambda: _repeated(b"", frame(Kind.WINDOW_UPDATE, 0, 0, (1).to_bytes(4))),
    "window update of a call": lambda: _repeated(opened(1), frame(Kind.WINDOW_UPDATE, 0, 1, (1).to_bytes(4))),
    "reset": lambda: _repeated(opened(1), frame(Kind.RST_STREAM, 0, 1, bytes(4))),
    "rapid reset": _reset,
    "calls": _calls,
    "large references": _large_references,
    "static references": _static_references,
    "goaway": lambda: _repeated(b"", frame(Kind.GOAWAY, 0, 0, bytes(8) + b"x" * 1000)),
    "zeros": lambda: _repeated(b"", bytes(2**16)),
}
"""Each makes frames of one kind without end."""
