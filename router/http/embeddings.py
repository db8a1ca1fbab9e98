"""POST /v1/embeddings, by OpenAI's field names."""

import base64
import struct
import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from contract.errors import InvalidRequestError
from router.answer import Delta
from router.http.access import authorization_of, tenant_of
from router.http.body import Body
from router.http.boundary import REQUEST_ID, name_of
from router.http.fields import refuse_unserved
from router.http.prompts import prompts_of
from router.http.schema import EMBEDDING
from router.http.timing_header import server_timing
from router.http.tokenizing import ReadBody
from router.model_source import ModelSource
from router.pipeline import Pipeline
from router.request import EmbeddingRequest, for_prompts
from router.running import RunningRequests

_FORMATS = ("float", "base64")


class EmbeddingEndpoint:
    """Owns nothing. max_inputs: of one request."""

    def __init__(
        self,
        read_body: ReadBody,
        pipeline: Pipeline,
        models: ModelSource,
        running: RunningRequests,
        max_inputs: int,
    ) -> None:
        self._read_body, self._pipeline, self._models = read_body, pipeline, models
        self._running, self._max_inputs = running, max_inputs

    async def embeddings(self, request: web.Request) -> web.Response:
        """One embedding for each input, in their order; all or none."""
        arrival = time.monotonic()
        body = await self._read_body(request, "embd", EMBEDDING)
        refuse_unserved(body)
        is_base64 = _encoding_format(body) == "base64"
        first, *others = prompts_of(body.get("input"), self._max_inputs, param="input")
        one = EmbeddingRequest(
            request_id=request[REQUEST_ID],
            prompt=first,
            model=body.string("model"),
            dimensions=body.integer("dimensions"),
            priority=body.integer("priority") or 0,
            cache_salt=body.string("cache_salt") or "",
            tenant=tenant_of(request),
            arrival=arrival,
        )
        asked = for_prompts(one, others)
        async with self._running.open(authorization_of(request), request[REQUEST_ID], name_of(request)):
            found = await self._pipeline.embed(*asked)
        return web.json_response(
            _response(found, one.model or self._models.card().name, is_base64=is_base64),
            headers=server_timing(request, found),
        )


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
