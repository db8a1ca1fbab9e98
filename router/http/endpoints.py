"""The handlers of the OpenAI API: body → request → pipeline → OpenAI's objects."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version
from typing import Any

from aiohttp import web
from prometheus_client.registry import Collector

from contract.errors import DeadlineError, NotFoundError
from router.batches.service import BatchService
from router.cancellation import CancellableRequests
from router.draining import Drain
from router.held_bytes import HeldBytes
from router.http.access import authorization_of, tenant_of
from router.http.body import Body, Json, read_body
from router.http.boundary import REQUEST_ID, STREAM, name_of, origin_of, request_id_header
from router.http.embeddings import EmbeddingBodies, EmbeddingEndpoint
from router.http.exchange import Exchange
from router.http.file_routes import file_routes
from router.http.generation import GenerationBodies
from router.http.lifetime import held_by
from router.http.messages import MessageBodies, MessageEndpoints
from router.http.openapi import document
from router.http.raw_body import BodyReader
from router.http.responses import ResponseBodies, ResponseEndpoints
from router.http.schema import CHAT, COMPLETION
from router.http.strictness import refuse_unknown
from router.http.timing_header import server_timing
from router.http.tokenizing import TokenizerEndpoints
from router.limits import MAX_PROMPTS
from router.model_source import ModelSource
from router.pipeline import Pipeline
from router.readiness import what_is_missing
from router.registry import Registry
from router.request import new_request_id
from router.settings import RouterSettings
from router.tokenizing import TokenizerThreads
from serving.health import health_response
from serving.metrics import CONTENT_TYPE, render


class Endpoints:
    """One method a path; add them to an application with ``routes``.

    collector: the metrics of this moment. held: the bytes of requests. needs_key: whether clients need an API key, for the
    description of the API.
    batches: None where the router keeps no files.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        models: ModelSource,
        registry: Registry,
        running: CancellableRequests,
        tokenizers: TokenizerThreads,
        collector: Callable[[], Awaitable[Collector]],
        settings: RouterSettings,
        *,
        held: HeldBytes,
        batches: BatchService | None = None,
        drain: Drain,
        needs_key: bool,
    ) -> None:
        self._pipeline = pipeline
        self._running = running
        self._tokenizers = tokenizers
        self._is_strict = settings.strict_api
        self._document = document(
            version("kvbaton"), needs_key=needs_key, metrics_need_key=settings.metrics_need_key
        )
        self._models = models
        self._max_answers = min(MAX_PROMPTS, settings.max_queue)
        self._bodies = GenerationBodies(models, self._max_answers)
        self._file_routes = file_routes(self._body, batches, settings)
        self._registry = registry
        self._drain = drain
        self._collector = collector
        self._reader = BodyReader(settings.max_body_bytes, settings.max_bodies_bytes)
        self._held = held
        self._max_values = settings.max_body_values
        self._stall_seconds = settings.client_stall_seconds
        self._body_seconds = min(settings.body_timeout_seconds, settings.request_timeout_seconds)

    def routes(self) -> list[web.RouteDef]:
        """Every path that is served."""
        tokenizing = TokenizerEndpoints(self._body, self._models, self._registry, self._tokenizers)
        bodies = EmbeddingBodies(self._models, self._max_answers)
        embedding = EmbeddingEndpoint(self._body, self._pipeline, bodies, self._running)
        return [
            *tokenizing.routes(),
            *self._file_routes,
            web.post("/v1/embeddings", embedding.embeddings),
            *ResponseEndpoints(self._body, self._answer, ResponseBodies(self._models)).routes(),
            *MessageEndpoints(
                self._body,
                self._answer,
                self._pipeline.preparer.num_prompt_tokens,
                MessageBodies(self._models),
            ).routes(),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{model:.+}", self.show_model),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        arrival = time.monotonic()
        body = await self._body(request, "chatcmpl", CHAT)
        return await self._answer(request, self._bodies.chat(body, origin_of(request, arrival)))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        arrival = time.monotonic()
        body = await self._body(request, "cmpl", COMPLETION)
        return await self._answer(request, self._bodies.completion(body, origin_of(request, arrival)))

    async def list_models(self, _: web.Request) -> web.Response:
        """GET /v1/models; empty while the model is not known yet."""
        return web.json_response({"object": "list", "data": [self._model()] if self._models.is_known else []})

    async def show_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = request.match_info["model"]
        if not self._models.is_known or name != self._models.card().name:
            raise NotFoundError(
                f"The model `{name[:100]}` does not exist.", param="model", code="model_not_found"
            )
        return web.json_response(self._model())

    async def health(self, _: web.Request) -> web.Response:
        """GET /health: 200 when requests can be answered, else 503 and what is missing."""
        return health_response(what_is_missing(self._models, self._registry))

    async def ready(self, _: web.Request) -> web.Response:
        """GET /ready: as /health, and 503 from the moment on at which the router is told to stop."""
        return health_response(self._drain.reason or what_is_missing(self._models, self._registry))

    async def version(self, _: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": version("kvbaton")})

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics."""
        return web.Response(body=render(await self._collector()), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, _: web.Request) -> web.Response:
        """GET /openapi.json."""
        return web.json_response(self._document)

    async def _body(self, request: web.Request, prefix: str, schema: Json) -> Body:
        request[REQUEST_ID] = new_request_id(prefix)
        await self._models.settled()
        try:
            async with asyncio.timeout(self._body_seconds):
                body = await read_body(
                    request, self._reader, self._max_values, schema, partial(self._hold, request)
                )
        except TimeoutError:
            raise DeadlineError(f"the body was not whole after {self._body_seconds} s") from None
        if self._is_strict:
            refuse_unknown(body.fields, schema)
        return body

    def _hold(self, request: web.Request, num_bytes: int) -> None:
        held_by(request).enter_context(self._held.holding(tenant_of(request), num_bytes))

    async def _answer(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        async with (
            self._running.open(authorization_of(request), request[REQUEST_ID], name_of(request)),
            exchange.deltas(self._pipeline) as deltas,
        ):
            if not exchange.options.stream:
                found = [delta async for delta in deltas]
                return web.json_response(
                    text=(await exchange.whole(found)).decode(), headers=server_timing(request, found)
                )
            stream = exchange.open_stream(request, request_id_header(request), self._stall_seconds)
            request[STREAM] = stream
            async for delta in deltas:
                if chunks := exchange.shape.chunks(delta):
                    await stream.send(*chunks)
            await stream.done()
            return stream.response

    def _model(self) -> dict[str, Any]:
        card = self._models.card()
        return {
            "id": card.name,
            "object": "model",
            "created": self._models.known_since,
            "owned_by": "kvbaton",
            "max_model_len": self._registry.max_model_len(card.max_model_len),
            "embeds_only": self._registry.embeds_only,
        }
