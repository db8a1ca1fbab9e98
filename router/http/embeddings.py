"""POST /v1/embeddings."""

import base64
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from aiohttp import web

from contract.errors import InvalidRequestError
from router.answers.answer import Delta
from router.http.answer_writer import json_bytes
from router.http.bodies.body import Body, Json
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.boundary import origin_of
from router.http.exchange import Origin, encoded
from router.http.fields.prompts import prompts_of
from router.http.fields.unsupported import reject_unsupported
from router.http.lifetime import let_client_cancel
from router.http.schema.embedding import EMBEDDING
from router.http.timing_header import server_timing
from router.intake.model_source import ModelSource
from router.intake.request import EmbeddingRequest, for_prompts
from router.pipeline import Pipeline

_FORMATS = ("float", "base64")
_NUMBERS_OF_A_PART = 64


@dataclass(frozen=True)
class EmbeddingExchange:
    """The prompts of one body, and the format of the answer."""

    requests: list[EmbeddingRequest]
    model: str
    is_base64: bool

    async def whole(self, deltas: list[Delta]) -> bytes:
        """Return the response object as JSON."""
        num_numbers = sum(len(delta.embedding) for delta in deltas)
        return await encoded(num_numbers // _NUMBERS_OF_A_PART, partial(self._encode, deltas))

    def _encode(self, deltas: list[Delta]) -> bytes:
        return msgspec.json.encode(_response(deltas, self.model, is_base64=self.is_base64))


class EmbeddingParser:
    """Parses requests for embeddings of the model of ``models``. max_inputs: most inputs of one request."""

    def __init__(self, models: ModelSource, max_inputs: int) -> None:
        self._models = models
        self._max_inputs = max_inputs

    def embedding(self, body: Body, origin: Origin) -> EmbeddingExchange:
        """Parse the body of a request for embeddings. Raises KvbatonError."""
        reject_unsupported(body)
        is_base64 = _encoding_format(body) == "base64"
        first, *others = prompts_of(body.get("input"), self._max_inputs, param="input")
        request = EmbeddingRequest(
            request_id=origin.request_id,
            prompt=first,
            model=body.string("model"),
            dimensions=body.integer("dimensions"),
            priority=body.integer("priority") or 0,
            cache_salt=body.string("cache_salt") or "",
            tenant=origin.tenant,
            arrival=origin.arrival,
        )
        model = request.model or self._models.card().name
        return EmbeddingExchange(for_prompts(request, others), model, is_base64)


class EmbeddingEndpoint:
    """The handler of embeddings."""

    def __init__(self, bodies: JsonBodyReader, pipeline: Pipeline, parser: EmbeddingParser) -> None:
        self._bodies = bodies
        self._pipeline = pipeline
        self._parser = parser

    def routes(self) -> list[web.RouteDef]:
        """Return the path."""
        return [web.post("/v1/embeddings", self.create)]

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/embeddings: one embedding for each input, in their order; all or none."""
        arrival = time.monotonic()
        body = await self._bodies.read(request, "embd", EMBEDDING)
        exchange = self._parser.embedding(body, origin_of(request, arrival))
        let_client_cancel(request)
        found = await self._pipeline.embed(*exchange.requests)
        return json_bytes(await exchange.whole(found), server_timing(request, found))


def _encoding_format(body: Body) -> str:
    wanted = body.string("encoding_format") or "float"
    if wanted not in _FORMATS:
        raise InvalidRequestError(
            f"encoding_format is {wanted[:20]!r}; it must be {' or '.join(_FORMATS)}", param="encoding_format"
        )
    return wanted


def _response(found: list[Delta], model: str, *, is_base64: bool) -> Json:
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
    """Return the base64 of little-endian float32 values."""
    return base64.b64encode(struct.pack(f"<{len(embedding)}f", *embedding)).decode()
