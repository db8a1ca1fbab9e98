"""The bytes of a request's body, received and inflated within the limits of one request and of all requests together.

A client may ask before it sends its body (``Expect: 100-continue``). aiohttp answers before the middlewares run, so that a
body which is rejected anyway would be sent first. Here the reader of the body sends the answer.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import hdrs, web

from contract.errors import (
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
)
from router.http.bodies.decoding import LARGE_BYTES
from router.http.bodies.inflating import ENCODINGS, INFLATING_ERRORS, inflated

_SMALL_BYTES = 2**14
"""A body of at most this size is accepted even while the large bodies of others use up ``max_total_bytes``."""
_T = TypeVar("_T")


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

    def reading(self) -> "OneBody":
        """Return a block in which the bytes of one body are counted."""
        return OneBody(self, self._max_body_bytes)

    async def decoded(self, raw: bytes, decode: Callable[[bytes], Awaitable[_T]]) -> _T:
        """Return what ``decode`` makes of a body: of one large body at a time."""
        if len(raw) <= LARGE_BYTES:
            return await decode(raw)
        async with self._one_large:
            return await decode(raw)

    def take(self, num_bytes: int, held_by_body: int = 0) -> None:
        """Count more bytes of a body. held_by_body: those that were counted before.

        Raises OverloadedError if all bodies together have too many bytes and this body is not small.
        """
        is_small = held_by_body + num_bytes <= self._small_bytes
        if self.num_bytes + num_bytes > self._max_total_bytes and not is_small:
            raise OverloadedError(
                f"the bodies of all requests that arrive have more than {self._max_total_bytes} bytes together; "
                "send this one again later"
            )
        self.num_bytes += num_bytes


class OneBody:
    """The block of one request's body, of which ``num_bytes`` have been received."""

    def __init__(self, reader: BodyReader, max_bytes: int) -> None:
        self._reader = reader
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def __enter__(self) -> "OneBody":
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.num_bytes -= self.num_bytes

    async def read(self, request: web.Request) -> bytes:
        """Return the whole body, inflated according to Content-Encoding.

        Raises PayloadTooLargeError at the first byte beyond the limit, UnsupportedMediaTypeError for an unknown encoding,
        InvalidRequestError for a body that cannot be inflated, OverloadedError.
        """
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ENCODINGS:
            raise UnsupportedMediaTypeError(
                f"Content-Encoding is {encoding[:40]!r}; it may be {', '.join(ENCODINGS)}"
            )
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        if hdrs.EXPECT in request.headers:
            await let_body_come(request)
        pieces: list[bytes] = []
        try:
            if encoding == "identity":
                content = request.content
                # the bytes of a body that has arrived whole are taken at once, without a coroutine for them
                while piece := content.read_nowait() if content.is_eof() else await content.readany():
                    self._take(piece)
                    pieces.append(piece)
            else:
                async for piece in inflated(request, encoding):
                    self._take(piece)
                    if piece:
                        pieces.append(piece)
        except (web.RequestPayloadError, *INFLATING_ERRORS) as error:
            raise InvalidRequestError(
                "the body cannot be read; is it encoded as Content-Encoding declares?"
            ) from error
        return b"".join(pieces)

    def _take(self, piece: bytes) -> None:
        self._reader.take(len(piece), self.num_bytes)
        self.num_bytes += len(piece)
        if self.num_bytes > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(
            f"the body has more than {self._max_bytes} bytes, the limit of this service"
        )


async def check_expectation(request: web.Request) -> None:
    """Raise HTTPExpectationFailed for another expectation than ``100-continue``."""
    if request.version >= (1, 1) and not _asks(request):
        raise web.HTTPExpectationFailed(text=f"Unknown Expect: {request.headers.get(hdrs.EXPECT, '')[:40]}")


async def let_body_come(request: web.Request) -> None:
    """Let a client that asked send its body. Call it once, before the first byte is read."""
    if request.version >= (1, 1) and _asks(request):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # aiohttp takes a writer that has sent something for a response that has begun
        request.writer.output_size = 0


def _asks(request: web.Request) -> bool:
    return request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"
