"""Inflates a request's body, piece by piece, so that a small body cannot take much memory or hold the event loop."""

import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from aiohttp import web

from contract.errors import InvalidRequestError
from router.intake.limits import Throttle

if sys.version_info >= (3, 14):
    from compression import zstd as zstd
else:
    from backports import zstd as zstd

ENCODINGS = ("gzip", "deflate", "zstd", "identity")
INFLATING_ERRORS = (zlib.error, zstd.ZstdError)
"""Raised for data that its encoding does not allow."""
_CHUNK_BYTES = 2**16
_GZIP = zlib.MAX_WBITS | 16
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
"""8 MiB, which RFC 9659 allows at most: a frame names the memory that it takes to inflate it."""


class _Inflater(Protocol):
    """Inflates a body piece by piece; several members or frames in a row are one text."""

    @property
    def is_finished(self) -> bool:
        """True once the compressed data is complete."""

    def push(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the inflated chunk in pieces of bounded size. Raises one of INFLATING_ERRORS."""


async def inflated(request: web.Request, encoding: str) -> AsyncIterator[bytes]:
    """Yield a compressed body, in pieces of at most 64 KiB. Raises InvalidRequestError if its end is missing."""
    inflater: _Inflater | None = None
    async for chunk in request.content.iter_any():
        inflater = inflater or _inflater(chunk, encoding)
        rest = Throttle()
        for piece in inflater.push(chunk):
            yield piece
            await rest.after_work()  # one chunk of zeros inflates to many pieces
    if inflater is not None and not inflater.is_finished:
        raise InvalidRequestError("the body ends before its compressed data does")


def _inflater(first: bytes, encoding: str) -> _Inflater:
    """Return the inflater of a body that begins with these bytes."""
    if encoding == "zstd":
        return ZstdInflater()
    is_zlib = first[:1] and first[0] & 0x0F == zlib.DEFLATED
    return _ZlibInflater(_GZIP if encoding == "gzip" else zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)


class _ZlibInflater:
    def __init__(self, wbits: int) -> None:
        self._wbits = wbits
        self._one = zlib.decompressobj(wbits)

    @property
    def is_finished(self) -> bool:
        return self._one.eof

    def push(self, chunk: bytes) -> Iterator[bytes]:
        while chunk:
            if self._one.eof:
                self._one = zlib.decompressobj(self._wbits)
            if piece := self._one.decompress(chunk, _CHUNK_BYTES):
                yield piece
            chunk = self._one.unused_data if self._one.eof else self._one.unconsumed_tail


class ZstdInflater:
    """Inflates zstd (RFC 8878), in frames with a window of 8 MiB at most."""

    def __init__(self) -> None:
        self._one = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)

    @property
    def is_finished(self) -> bool:
        """True once the compressed data is complete."""
        return self._one.eof

    def push(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the inflated chunk in pieces of bounded size. Raises zstd.ZstdError."""
        while chunk or not (self._one.eof or self._one.needs_input):
            if self._one.eof:
                self._one = zstd.ZstdDecompressor(options=_ZSTD_OPTIONS)
            yield self._one.decompress(chunk, _CHUNK_BYTES)  # also nothing, of many frames without content
            chunk = self._one.unused_data if self._one.eof else b""
