"""Request bodies that are answered in process, for batches: as HTTP would, but behind every other request."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from contract.errors import InternalError, InvalidRequestError, KvbatonError
from router.answer import Delta
from router.batches.answering import Answered
from router.http.body import Body, Json, decode_body
from router.http.embeddings import EmbeddingBodies
from router.http.exchange import Exchange, Origin
from router.http.generation import GenerationBodies
from router.http.responses import ResponseBodies
from router.http.schema import CHAT, COMPLETION, EMBEDDING, RESPONSE
from router.http.strictness import refuse_unknown
from router.model_source import ModelSource
from router.pipeline import Pipeline
from router.request import BACKGROUND_PRIORITY, new_request_id
from serving.errors import http_status, openai_error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Path:
    """What the body of one path is, and what the id of its request begins with."""

    prefix: str
    schema: Json
    read: Callable[[Body, Origin], Exchange] | None


class BodyAnswers:
    """Owns nothing; an ``AnswerBody`` for the paths of batches."""

    def __init__(
        self,
        pipeline: Pipeline,
        models: ModelSource,
        has_workers: Callable[[], bool],
        max_answers: int,
        *,
        max_values: int,
        is_strict: bool,
    ) -> None:
        self._pipeline = pipeline
        self._has_workers = has_workers
        self._max_values = max_values
        self._is_strict = is_strict
        generation = GenerationBodies(models, max_answers)
        self._embeddings = EmbeddingBodies(models, max_answers)
        self._paths = {
            "/v1/chat/completions": _Path("chatcmpl", CHAT, generation.chat),
            "/v1/completions": _Path("cmpl", COMPLETION, generation.completion),
            "/v1/responses": _Path("resp_", RESPONSE, ResponseBodies(models).response),
            "/v1/embeddings": _Path("embd", EMBEDDING, None),
        }

    async def __call__(
        self, endpoint: str, body: bytes, tenant: str, on_begun: Callable[[], None]
    ) -> Answered:
        """Answer ``body``; an error is an answer. The boundary of batches: a bug is logged and answered as one."""
        path = self._paths[endpoint]
        origin = Origin(request_id=new_request_id(path.prefix), tenant=tenant, arrival=time.monotonic())
        try:
            whole = await self._whole(path, body, origin, on_begun)
        except KvbatonError as error:
            return _failed(origin.request_id, error, has_workers=self._has_workers())
        except Exception:
            logger.exception("%s: a bug", origin.request_id)
            bug = InternalError(f"an internal error; the log names it by {origin.request_id}")
            return _failed(origin.request_id, bug, has_workers=True)
        return Answered(request_id=origin.request_id, status_code=200, body=whole)

    async def _whole(self, path: _Path, raw: bytes, origin: Origin, on_begun: Callable[[], None]) -> bytes:
        body = await decode_body(raw, self._max_values, path.schema)
        if self._is_strict:
            refuse_unknown(body.fields, path.schema)
        _refuse_what_batches_lack(body)
        if path.read is None:
            return await self._embedded(body, origin)
        exchange = path.read(body, origin)
        behind = [replace(one, priority=BACKGROUND_PRIORITY, is_background=True) for one in exchange.requests]
        exchange = replace(exchange, requests=behind)
        found: list[Delta] = []
        async with exchange.deltas(self._pipeline) as deltas:
            async for delta in deltas:
                on_begun()
                found.append(delta)
        return await exchange.whole(found)

    async def _embedded(self, body: Body, origin: Origin) -> bytes:
        exchange = self._embeddings.embedding(body, origin)
        behind = [replace(one, priority=BACKGROUND_PRIORITY, is_background=True) for one in exchange.requests]
        return await exchange.whole(await self._pipeline.embed(*behind))


def _refuse_what_batches_lack(body: Body) -> None:
    if body.fields.get("stream"):
        raise InvalidRequestError(
            "stream is not allowed in a batch, whose answers are whole: leave it out", param="stream"
        )
    if body.fields.get("priority"):
        raise InvalidRequestError(
            "priority is not allowed in a batch, which is answered behind all other requests: leave it out",
            param="priority",
        )


def _failed(request_id: str, error: KvbatonError, *, has_workers: bool) -> Answered:
    return Answered(
        request_id=request_id,
        status_code=http_status(error.kind),
        body=msgspec.json.encode(openai_error(error)),
        kind=error.kind,
        has_workers=has_workers,
    )
