"""Answers to the lines of batches: the same objects as over HTTP, computed in process at the lowest priority."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import structs

from contract.errors import InternalError, InvalidRequestError, KvbatonError
from router.answers.answer import Delta
from router.batches.answering import LineAnswer
from router.http.bodies.body import Body, Json
from router.http.bodies.json_bodies import decode_body
from router.http.bodies.strictness import reject_unknown
from router.http.embeddings import EmbeddingParser
from router.http.exchange import Exchange, Origin
from router.http.generation.parser import GenerationParser
from router.http.responses.parser import ResponseParser
from router.http.schema.chat import CHAT
from router.http.schema.completion import COMPLETION
from router.http.schema.embedding import EMBEDDING
from router.http.schema.responses import RESPONSE
from router.intake.model_source import ModelSource
from router.intake.request import BACKGROUND_PRIORITY, EmbeddingRequest, GenerationRequest, new_request_id
from router.pipeline import Pipeline
from router.settings import RouterSettings
from serving.errors import http_status, openai_error

logger = logging.getLogger(__name__)

_Request = TypeVar("_Request", GenerationRequest, EmbeddingRequest)


@dataclass(frozen=True)
class _Endpoint:
    """The bodies of one path. id_prefix: of the ids of its requests. parse: None for embeddings."""

    id_prefix: str
    schema: Json
    parse: Callable[[Body, Origin], Exchange] | None


class BatchAnswers:
    """Answers lines; an ``AnswerLine``. has_workers: returns True if the service could answer another request."""

    def __init__(
        self,
        pipeline: Pipeline,
        models: ModelSource,
        has_workers: Callable[[], bool],
        settings: RouterSettings,
    ) -> None:
        self._pipeline = pipeline
        self._has_workers = has_workers
        self._max_values = settings.max_body_values
        self._is_strict = settings.strict_api
        generation = GenerationParser(models, settings.max_answers)
        self._embeddings = EmbeddingParser(models, settings.max_answers)
        self._endpoints = {
            "/v1/chat/completions": _Endpoint("chatcmpl", CHAT, generation.chat),
            "/v1/completions": _Endpoint("cmpl", COMPLETION, generation.completion),
            "/v1/responses": _Endpoint("resp_", RESPONSE, ResponseParser(models).response),
            "/v1/embeddings": _Endpoint("embd", EMBEDDING, None),
        }

    async def __call__(
        self, endpoint: str, body: bytes, tenant: str, on_begun: Callable[[], None]
    ) -> LineAnswer:
        """Answer ``body``; an error is an answer. This is the boundary of batches: unexpected errors are logged here."""
        found = self._endpoints[endpoint]
        origin = Origin(request_id=new_request_id(found.id_prefix), tenant=tenant, arrival=time.monotonic())
        try:
            whole = await self._whole(found, body, origin, on_begun)
        except KvbatonError as error:
            return _failed(origin.request_id, error, has_workers=self._has_workers())
        except Exception:
            logger.exception("%s: unexpected error", origin.request_id)
            internal = InternalError(f"an internal error; the log names it by {origin.request_id}")
            return _failed(origin.request_id, internal, has_workers=True)
        return LineAnswer(request_id=origin.request_id, status_code=200, body=whole)

    async def _whole(
        self, endpoint: _Endpoint, raw: bytes, origin: Origin, on_begun: Callable[[], None]
    ) -> bytes:
        body = await decode_body(raw, self._max_values, endpoint.schema)
        if self._is_strict:
            reject_unknown(body.fields, endpoint.schema)
            body.is_strict = True
        _reject_unsupported(body)
        if endpoint.parse is None:
            return await self._embedded(body, origin)
        exchange = endpoint.parse(body, origin)
        exchange = structs.replace(exchange, requests=_in_background(exchange.requests))
        found: list[Delta] = []
        with exchange.naming_fields():
            async with self._pipeline.generate(*exchange.requests) as deltas:
                async for delta in deltas:
                    on_begun()
                    found.append(delta)
        return await exchange.whole(found)

    async def _embedded(self, body: Body, origin: Origin) -> bytes:
        exchange = self._embeddings.embedding(body, origin)
        return await exchange.whole(await self._pipeline.embed(*_in_background(exchange.requests)))


def _in_background(requests: list[_Request]) -> list[_Request]:
    return [structs.replace(one, priority=BACKGROUND_PRIORITY, is_background=True) for one in requests]


def _reject_unsupported(body: Body) -> None:
    """Raise InvalidRequestError for fields that have no meaning in a batch."""
    if body.fields.get("stream"):
        raise InvalidRequestError("stream is not allowed in a batch; leave it out", param="stream")
    if body.fields.get("priority"):
        raise InvalidRequestError(
            "priority is not allowed in a batch, which has the lowest one; leave it out", param="priority"
        )


def _failed(request_id: str, error: KvbatonError, *, has_workers: bool) -> LineAnswer:
    return LineAnswer(
        request_id=request_id,
        status_code=http_status(error.kind),
        body=msgspec.json.encode(openai_error(error)),
        kind=error.kind,
        has_workers=has_workers,
    )
