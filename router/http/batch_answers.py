"""Answers to the lines of batches: the same objects as over HTTP, computed in process at the lowest priority."""

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import structs

from contract.errors import InternalError, InvalidRequestError, KvbatonError
from router.answers.answer import Delta
from router.batches.run import LineAnswer
from router.http.bodies.decoding import decode_body
from router.http.embeddings import EMBEDDING_PREFIX, EmbeddingParser
from router.http.endpoints import Endpoint, text_endpoints
from router.http.exchange import NamingFields, Origin
from router.http.schema.completion import EMBEDDING
from router.intake.model_source import ModelSource
from router.intake.request import BACKGROUND_PRIORITY, EmbeddingRequest, GenerationRequest, new_request_id
from router.pipeline import Pipeline
from router.settings import RouterSettings
from serving.errors import http_status, openai_error

logger = logging.getLogger(__name__)

_Request = TypeVar("_Request", GenerationRequest, EmbeddingRequest)


class BatchAnswers:
    """Answers lines; an ``AnswerLine``.

    has_workers: returns True if the service could answer another request. is_background: requests yield to all others, and
    may not name a priority.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        models: ModelSource,
        has_workers: Callable[[], bool],
        settings: RouterSettings,
        *,
        is_background: bool = True,
    ) -> None:
        self._pipeline = pipeline
        self._is_background = is_background
        self._has_workers = has_workers
        self._max_values = settings.max_body_values
        self._is_strict = settings.strict_api
        self._endpoints = text_endpoints(models, settings.max_answers)
        self._embeddings = EmbeddingParser(models, settings.max_answers)

    async def __call__(
        self, endpoint: str, body: bytes, tenant: str, on_begun: Callable[[], None]
    ) -> LineAnswer:
        """Answer ``body``; an error is an answer. This is the boundary of batches: unexpected errors are logged here."""
        found = self._endpoints.get(endpoint)
        id_prefix = found.id_prefix if found else EMBEDDING_PREFIX
        origin = Origin(request_id=new_request_id(id_prefix), tenant=tenant, arrival=time.monotonic())
        try:
            whole = await self._whole(found, body, origin, on_begun)
        except KvbatonError as error:
            return _failed(origin.request_id, error, has_workers=self._has_workers())
        except Exception:
            logger.exception("%s: unexpected error", origin.request_id)
            internal = InternalError(f"an internal error; the log names it by {origin.request_id}")
            # a bug is no sign of missing workers, so the line is not tried again because of them
            return _failed(origin.request_id, internal, has_workers=True)
        return LineAnswer(request_id=origin.request_id, status_code=200, body=whole)

    async def _whole(
        self, endpoint: Endpoint | None, raw: bytes, origin: Origin, on_begun: Callable[[], None]
    ) -> bytes:
        """Return the response object. endpoint: None for embeddings. Raises KvbatonError."""
        schema = endpoint.schema if endpoint else EMBEDDING
        body = await decode_body(raw, self._max_values, schema, is_strict=self._is_strict)
        if body.fields.get("stream"):
            raise InvalidRequestError("stream is not allowed in a batch; leave it out", param="stream")
        if self._is_background and body.fields.get("priority"):
            raise InvalidRequestError(
                "priority is not allowed in a batch, which has the lowest one; leave it out", param="priority"
            )
        if endpoint is None:
            inputs = self._embeddings.embedding(body, origin)
            return await inputs.whole(await self._pipeline.embed(*self._ranked(inputs.requests)))
        exchange = endpoint.parse(body, origin)
        exchange = structs.replace(exchange, requests=self._ranked(exchange.requests))
        found: list[Delta] = []
        with NamingFields(exchange):
            async with self._pipeline.generate(*exchange.requests) as deltas:
                async for delta in deltas:
                    on_begun()
                    found.append(delta)
        return await exchange.whole(found)

    def _ranked(self, requests: list[_Request]) -> list[_Request]:
        if not self._is_background:
            return requests
        return [structs.replace(one, priority=BACKGROUND_PRIORITY, is_background=True) for one in requests]


def _failed(request_id: str, error: KvbatonError, *, has_workers: bool) -> LineAnswer:
    return LineAnswer(
        request_id=request_id,
        status_code=http_status(error.kind),
        body=msgspec.json.encode(openai_error(error)),
        kind=error.kind,
        has_workers=has_workers,
    )
