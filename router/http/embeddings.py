"""POST /v1/embeddings, by OpenAI's field names."""

import base64
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from contract.errors import InvalidRequestError
from router.answer import Delta
from router.cancellation import CancellableRequests
from router.http.access import authorization_of
from router.http.body import Body
from router.http.boundary import REQUEST_ID, name_of, origin_of
from router.http.exchange import Origin, written
from router.http.fields import refuse_unserved
from router.http.prompts import prompts_of
from router.http.schema import EMBEDDING
from router.http.timing_header import server_timing
from router.http.tokenizing import ReadBody
from router.model_source import ModelSource
from router.pipeline import Pipeline
from router.request import EmbeddingRequest, for_prompts

_FORMATS = ("float", "base64")
_NUMBERS_OF_A_PART = 64


class EmbeddingEndpoint:
    """Owns nothing."""

    def __init__(
        self,
        read_body: ReadBody,
        pipeline: Pipeline,
        bodies: "EmbeddingBodies",
        running: CancellableRequests,
    ) -> None:
        self._read_body = read_body
        self._pipeline = pipeline
        self._bodies = bodies
        self._running = running

    async def embeddings(self, request: web.Request) -> web.Response:
        """One embedding for each input, in their order; all or none."""
        arrival = time.monotonic()
        body = await self._read_body(request, "embd", EMBEDDING)
        exchange = self._bodies.embedding(body, origin_of(request, arrival))
        async with self._running.open(authorization_of(request), request[REQUEST_ID], name_of(request)):
            found = await self._pipeline.embed(*exchange.requests)
        whole = await exchange.whole(found)
        return web.json_response(text=whole.decode(), headers=server_timing(request, found))


@dataclass(frozen=True)
class EmbeddingExchange:
    """The prompts that a body wants embedded, and how the answer is written."""

    requests: list[EmbeddingRequest]
    model: str
    is_base64: bool

    async def whole(self, deltas: list[Delta]) -> bytes:
        """Return the response object as JSON."""
        num_numbers = sum(len(delta.embedding) for delta in deltas)
        return await written(num_numbers // _NUMBERS_OF_A_PART, partial(self._whole, deltas))

    def _whole(self, deltas: list[Delta]) -> bytes:
        return msgspec.json.encode(_response(deltas, self.model, is_base64=self.is_base64))


class EmbeddingBodies:
    """Owns nothing. max_inputs: of one request."""

    def __init__(self, models: ModelSource, max_inputs: int) -> None:
        self._models = models
        self._max_inputs = max_inputs

    def embedding(self, body: Body, origin: Origin) -> EmbeddingExchange:
        """Read the body of a request for embeddings. Raises KvbatonError."""
        refuse_unserved(body)
        is_base64 = _encoding_format(body) == "base64"
        first, *others = prompts_of(body.get("input"), self._max_inputs, param="input")
        one = EmbeddingRequest(
            request_id=origin.request_id,
            prompt=first,
            model=body.string("model"),
            dimensions=body.integer("dimensions"),
            priority=body.integer("priority") or 0,
            cache_salt=body.string("cache_salt") or "",
            tenant=origin.tenant,
            arrival=origin.arrival,
        )
        model = one.model or self._models.card().name
        return EmbeddingExchange(for_prompts(one, others), model, is_base64)


def _encoding_format(body: Body) -> str:
    wanted = body.string("encoding_format") or "float"
    if wanted not in _FORMATS:
        raise InvalidRequestError(
            f"encoding_format is {wanted[:20]!r}; it must be {' or '.join(_FORMATS)}", param="encoding_format"
        )
    return wanted


def _response(found: list[Delta], model: str, *, is_base64: bool) -> dict[str, Any]:
    num_tokens = sum(delta.usage.num_prompt_tokens for delta in found if delta.usage)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": delta.index,
                "embedding": _packed(delta.embedding) if is_base64 else list(delta.embedding),
            }
            for delta in found
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _packed(embedding: Sequence[float]) -> str:
    """Little-endian float32s."""
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()
