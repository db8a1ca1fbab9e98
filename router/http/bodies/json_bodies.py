"""The JSON body of a POST request, from the socket to a ``Body``, within the limits of this router."""

import asyncio
from functools import partial

from aiohttp import hdrs, web

from contract.errors import DeadlineError, InvalidRequestError, UnsupportedMediaTypeError
from router.http.access import tenant_of
from router.http.bodies.body import Body, Json
from router.http.bodies.decoding import LARGE_BYTES, decode
from router.http.bodies.raw_body import BodyReader
from router.http.bodies.strictness import reject_unknown
from router.http.boundary import REQUEST_ID
from router.http.lifetime import hold_until_end
from router.intake.held_bytes import HeldBytes
from router.intake.model_source import ModelSource
from router.intake.request import new_request_id
from router.settings import RouterSettings


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
        await self._models.settled()
        if _has_arrived(request):
            body = await self._receive(request, schema)
        else:
            body = await self._receive_in_time(request, schema)
        if self._is_strict:
            reject_unknown(body.fields, schema)
            body.is_strict = True
        return body

    async def _receive_in_time(self, request: web.Request, schema: Json) -> Body:
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
            hold_until_end(request, self._held.holding(tenant_of(request), len(raw)))
            decode = partial(decode_body, max_values=self._max_values, schema=schema)
            return await self._reader.decoded(raw, decode)


def _has_arrived(request: web.Request) -> bool:
    """Return True for a small body that has arrived whole, so that nothing is waited for. Most bodies have."""
    is_small = (request.content_length or LARGE_BYTES) < LARGE_BYTES
    return is_small and request.content.is_eof() and hdrs.CONTENT_ENCODING not in request.headers


async def decode_body(raw: bytes, max_values: int, schema: Json) -> Body:
    """Return the JSON object in ``raw``, whose fields ``schema`` describes.

    max_values: most values in it. Raises PayloadTooLargeError, InvalidRequestError.
    """
    data = await decode(raw, max_values)
    if not isinstance(data, dict):
        raise InvalidRequestError("the body must be a JSON object")
    return Body(data, schema)
