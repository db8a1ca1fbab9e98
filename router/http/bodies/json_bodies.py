"""The JSON body of a POST request, from the socket to a ``Body``, within the limits of one request and of all together.

A body is received, inflated piece by piece, so that a small one cannot take much memory or hold the event loop, and decoded.
A client may ask before it sends its body (``Expect: 100-continue``). aiohttp answers before the middlewares run, so that a
body which is rejected anyway would be sent first. Here the reader of the body sends the answer.
"""

import asyncio
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import TypeVar

from aiohttp import hdrs, web

from contract.errors import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
)
from router.http.access import tenant_of
from router.http.bodies.body import Body, Json
from router.http.bodies.decoding import LARGE_BYTES, decode_body
from router.http.boundary import OPEN, REQUEST_ID
from router.intake.limits import HeldBytes, Throttle
from router.intake.model_source import ModelSource
from router.intake.request import new_request_id
from router.settings import RouterSettings

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
_SMALL_BYTES = 2**14
"""A body of at most this size is accepted even while the large bodies of others use up ``max_total_bytes``."""
_T = TypeVar("_T")


class JsonBodyReader:
    """Reads the bodies of all endpoints. held: counts their bytes until the requests are answered."""

    def __init__(self, models: ModelSource, held: HeldBytes, settings: RouterSettings) -> None:
        self._models = models
        self._held = held
        self._reader = BodyReader(settings.max_body_bytes, settings.max_bodies_bytes)
        self._max_values = settings.max_body_values
        self._max_seconds = min(settings.body_timeout_seconds, settings.request_timeout_seconds)
        self._is_strict = settings.strict_api

    async def read(self, request: web.Request, id_prefix: str, schema: Json) -> Body:
        """Give the request an id with this prefix and return its fields, which ``schema`` describes.

        Raises UnsupportedMediaTypeError, PayloadTooLargeError, OverloadedError, InvalidRequestError, DeadlineError.
        """
        request[REQUEST_ID] = new_request_id(id_prefix)
        # a worker that is sending its model makes the request possible in a moment
        await self._models.wait_settled()
        is_small = (request.content_length or LARGE_BYTES) < LARGE_BYTES
        # most bodies have arrived whole: without a timer, since nothing is waited for
        if is_small and request.content.is_eof() and hdrs.CONTENT_ENCODING not in request.headers:
            return await self._receive(request, schema)
        try:
            async with asyncio.timeout(self._max_seconds):
                return await self._receive(request, schema)
        except TimeoutError:
            raise DeadlineError(f"the body was not complete after {self._max_seconds} s") from None

    async def _receive(self, request: web.Request, schema: Json) -> Body:
        if request.content_type != "application/json":
            given = request.headers.get("Content-Type") or "missing"
            raise UnsupportedMediaTypeError(f"the content type is {given[:100]}; send application/json")
        with self._reader.reading() as body:
            raw = await body.read(request)
            # until the answer has ended, since the parsed request is about as large as its body
            request[OPEN].hold(self._held.holding(tenant_of(request), len(raw)))
            decode = partial(
                decode_body, max_values=self._max_values, schema=schema, is_strict=self._is_strict
            )
            return await self._reader.decoded(raw, decode)


class BodyReader:
    """Owns the count of the bytes of bodies that are in memory undecoded.

    max_body_bytes: of one body, after it has been inflated. max_total_bytes: of all bodies at once.
    """

    def __init__(self, max_body_bytes: int, max_total_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_total_bytes = max_total_bytes
        # small bodies pass the limit, so they are kept small beside it
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
        # decoded values take many times the bytes of their text
        async with self._one_large:
            return await decode(raw)

    def count(self, num_bytes: int, held_by_body: int = 0) -> None:
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
        # before the first byte is asked for
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        if hdrs.EXPECT in request.headers:
            await let_body_come(request)
        pieces: list[bytes] = []
        try:
            if encoding == "identity":
                content = request.content
                # the bytes of a body that has arrived whole are taken at once, without a coroutine for them
                if content.is_eof():
                    whole = content.read_nowait()
                    self._count(whole)
                    return whole
                while piece := content.read_nowait() if content.is_eof() else await content.readany():
                    self._count(piece)
                    pieces.append(piece)
            else:
                async for piece in inflated(request, encoding):
                    self._count(piece)
                    if piece:
                        pieces.append(piece)
        except (web.RequestPayloadError, *INFLATING_ERRORS) as error:
            raise InvalidRequestError(
                "the body cannot be read; is it encoded as Content-Encoding declares?"
            ) from error
        return b"".join(pieces)

    def _count(self, piece: bytes) -> None:
        self._reader.count(len(piece), self.num_bytes)
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


class _ZlibInflater:
    """Inflates gzip and deflate; several members in a row are one text."""

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


async def inflated(request: web.Request, encoding: str) -> AsyncIterator[bytes]:
    """Yield a compressed body, in pieces of at most 64 KiB. Raises InvalidRequestError if its end is missing."""
    inflater: _ZlibInflater | ZstdInflater | None = None
    async for chunk in request.content.iter_any():
        if inflater is None and encoding == "zstd":
            inflater = ZstdInflater()
        elif inflater is None:
            # clients send "deflate" with the header of zlib, as in the RFC, and without it
            is_zlib = chunk[:1] and chunk[0] & 0x0F == zlib.DEFLATED
            deflate = zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS
            inflater = _ZlibInflater(_GZIP if encoding == "gzip" else deflate)
        rest = Throttle()
        for piece in inflater.push(chunk):
            yield piece
            await rest.after_work()  # one chunk of zeros inflates to many pieces
    if inflater is not None and not inflater.is_finished:
        raise InvalidRequestError("the body ends before its compressed data does")
