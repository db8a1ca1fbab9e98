"""POST /v1/embeddings."""

import base64
import struct
import time
from dataclasses import dataclass
from typing import cast

import msgspec
from aiohttp import web

from contract.errors import InvalidRequestError
from contract.requests import PoolingParams, PoolingType
from router.answers.answer import Delta
from router.http.answer_writer import json_bytes, server_timing
from router.http.bodies.body import Body, Json
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.boundary import let_client_cancel, origin_of
from router.http.exchange import Origin, encoded
from router.http.fields.sampling import prompts_of
from router.http.fields.unsupported import reject_unsupported
from router.http.schema.completion import EMBEDDING
from router.intake.model_source import ModelSource
from router.intake.request import EmbeddingRequest, for_prompts
from router.pipeline import Pipeline

EMBEDDING_PREFIX = "embd"
"""Beginning of the ids of requests for embeddings."""
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
        # by numbers, since one embedding may have thousands
        num_numbers = sum(len(delta.embedding) for delta in deltas)
        return await encoded(
            num_numbers // _NUMBERS_OF_A_PART,
            lambda: msgspec.json.encode(_response(deltas, self.model, is_base64=self.is_base64)),
        )


class EmbeddingParser:
    """Parses requests for embeddings of the model of ``models``. max_inputs: most inputs of one request."""

    def __init__(self, models: ModelSource, max_inputs: int) -> None:
        self._models = models
        self._max_inputs = max_inputs

    def embedding(self, body: Body, origin: Origin) -> EmbeddingExchange:
        """Parse the body of a request for embeddings. Raises KvbatonError."""
        reject_unsupported(body)
        wanted = body.string("encoding_format") or "float"
        if wanted not in _FORMATS:
            raise InvalidRequestError(
                f"encoding_format is {wanted[:20]!r}; it must be {' or '.join(_FORMATS)}",
                param="encoding_format",
            )
        first, *others = prompts_of(body.get("input"), self._max_inputs, param="input")
        request = EmbeddingRequest(
            request_id=origin.request_id,
            prompt=first,
            model=body.string("model"),
            dimensions=body.integer("dimensions"),
            pooling=PoolingParams(
                cast(PoolingType | None, body.string("pooling_type")), body.flag("normalize", default=True)
            ),
            priority=body.integer("priority") or 0,
            cache_salt=body.string("cache_salt") or "",
            tenant=origin.tenant,
            arrival=origin.arrival,
        )
        model = request.model or self._models.card().name
        return EmbeddingExchange(for_prompts(request, others), model, is_base64=wanted == "base64")


def embedding_route(bodies: JsonBodyReader, pipeline: Pipeline, parser: EmbeddingParser) -> web.RouteDef:
    """Return POST /v1/embeddings: one embedding for each input, in their order; all or none."""

    async def create(request: web.Request) -> web.Response:
        arrival = time.monotonic()
        body = await bodies.read(request, EMBEDDING_PREFIX, EMBEDDING)
        exchange = parser.embedding(body, origin_of(request, arrival))
        let_client_cancel(request)
        found = await pipeline.embed(*exchange.requests)
        return json_bytes(await exchange.whole(found), server_timing(request, found))

    return web.post("/v1/embeddings", create)


def _response(found: list[Delta], model: str, *, is_base64: bool) -> Json:
    """Return the response. is_base64: each embedding is the base64 of little-endian float32 values."""
    num_tokens = sum(delta.usage.num_prompt_tokens for delta in found if delta.usage)
    return {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": delta.index,
                "embedding": base64.b64encode(
                    struct.pack(f"<{len(delta.embedding)}f", *delta.embedding)
                ).decode()
                if is_base64
                else list(delta.embedding),
            }
            for delta in found
        ],
        "model": model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
