"""The bytes of a request's body: read and inflated within the limits of one request and of all together."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from contract.errors import (
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
)
from router.http.decoding import LARGE_BYTES
from router.throttling import Throttle

_CHUNK_BYTES = 2**16
_SMALL_BYTES = 2**14
"""A body up to this size is taken in also while large ones of others hold all that bodies may hold."""
_GZIP = zlib.MAX_WBITS | 16
_ENCODINGS = ("gzip", "deflate", "identity")


class BodyReader:
    """Owns the count of the bytes of bodies that are in memory undecoded.

    max_body_bytes: of one body, after it has been inflated. max_total_bytes: of all bodies at once.
    """

    def __init__(self, max_body_bytes: int, max_total_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_total_bytes = max_total_bytes
        self._small_bytes = min(_SMALL_BYTES, max_total_bytes // 64)
        self._one_large = asyncio.Semaphore(1)
        self.num_bytes = 0
        """Bytes of the bodies that are being read or decoded."""

    @contextmanager
    def reading(self) -> Iterator["OneBody"]:
        """Within the block a body's bytes count as held."""
        body = OneBody(self, self._max_body_bytes)
        try:
            yield body
        finally:
            self.num_bytes -= body.num_bytes

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Hold the event loop's time for decoding a body; one large body is decoded at a time."""
        if num_bytes <= LARGE_BYTES:
            yield
            return
        async with self._one_large:
            yield

    def take(self, num_bytes: int, held_by_body: int = 0) -> None:
        """Count bytes of a body that holds some already.

        Raises OverloadedError if all bodies together hold too many bytes and this body is not small.
        """
        is_small = held_by_body + num_bytes <= self._small_bytes
        if self.num_bytes + num_bytes > self._max_total_bytes and not is_small:
            raise OverloadedError(
                f"the bodies of all requests that arrive have more than {self._max_total_bytes} bytes together; "
                "send this one again later"
            )
        self.num_bytes += num_bytes


class OneBody:
    """The body of one request; ``num_bytes`` of it are held."""

    def __init__(self, reader: BodyReader, max_bytes: int) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self.num_bytes = 0

    async def read(self, request: web.Request) -> bytes:
        """Return the whole body, inflated as Content-Encoding says.

        Raises PayloadTooLargeError as soon as there is one byte too many, UnsupportedMediaTypeError for an encoding
        that is not served, InvalidRequestError for what cannot be read, OverloadedError.
        """
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in _ENCODINGS:
            raise UnsupportedMediaTypeError(
                f"Content-Encoding is {encoding[:40]!r}; it may be {', '.join(_ENCODINGS)}"
            )
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        pieces: list[bytes] = []
        try:
            async for piece in _inflated(request, encoding):
                self._reader.take(len(piece), self.num_bytes)
                self.num_bytes += len(piece)
                if self.num_bytes > self._max_bytes:
                    raise self._too_large()
                pieces.append(piece)
        except (web.RequestPayloadError, zlib.error) as error:
            raise InvalidRequestError(
                "the body cannot be read; is it encoded as Content-Encoding says?"
            ) from error
        return b"".join(pieces)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(
            f"the body has more than {self._max_bytes} bytes, the limit of this service"
        )


async def _inflated(request: web.Request, encoding: str) -> AsyncIterator[bytes]:
    """Yield the body in pieces of at most 64 KiB where it is inflated."""
    inflater: _Inflater | None = None
    async for chunk in request.content.iter_any():
        if encoding == "identity":
            yield chunk
            continue
        inflater = inflater or _Inflater(chunk, encoding)
        rest = Throttle()
        for piece in inflater.push(chunk):
            yield piece
            await rest.after_work()  # a chunk of zeros is many pieces
    if inflater is not None and not inflater.is_finished:
        raise InvalidRequestError("the body ends before its compressed data does")


class _Inflater:
    """Inflates what it is given, a bounded piece at a time; several gzip members in a row are one text."""

    def __init__(self, first: bytes, encoding: str) -> None:
        is_zlib = first[:1] and first[0] & 0x0F == zlib.DEFLATED
        self._wbits = _GZIP if encoding == "gzip" else zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS
        self._one = zlib.decompressobj(self._wbits)

    @property
    def is_finished(self) -> bool:
        """Whether the compressed data is complete."""
        return self._one.eof

    def push(self, chunk: bytes) -> Iterator[bytes]:
        """Yield what the chunk inflates to. Raises zlib.error."""
        while chunk:
            if self._one.eof:
                self._one = zlib.decompressobj(self._wbits)
            if piece := self._one.decompress(chunk, _CHUNK_BYTES):
                yield piece
            chunk = self._one.unused_data if self._one.eof else self._one.unconsumed_tail
