"""The handlers of the OpenAI API: body → request → pipeline → OpenAI's objects."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client.registry import Collector

from contract.errors import DeadlineError, InvalidRequestError, NotFoundError
from contract.requests import MAX_LOGPROBS
from router.best_of import choose_best
from router.http.access import authorization_of, tenant_of
from router.http.body import Body, Json, read_body
from router.http.boundary import REQUEST_ID, STREAM, name_of, request_id_header
from router.http.chat_fields import CHAT_FIELDS, chat_of, forced_calls
from router.http.echo import echo_of, without_answer
from router.http.embeddings import EmbeddingEndpoint
from router.http.fields import choice_counts, refuse_unserved, shared_fields
from router.http.grammars import naming_grammar_field
from router.http.openapi import document
from router.http.prompts import prompts_of
from router.http.responses import OpenStream, ResponseEndpoints
from router.http.schema import CHAT, COMPLETION, MAX_LEGACY_LOGPROBS
from router.http.shapes import AnswerOptions, ChatShape, CompletionShape, Shape
from router.http.streaming import EventStream
from router.http.strictness import refuse_unknown
from router.http.timing_header import server_timing
from router.http.tokenizing import TokenizerEndpoints
from router.limits import MAX_PROMPTS
from router.model_source import ModelSource
from router.pipeline import Pipeline
from router.readiness import what_is_missing
from router.registry import Registry
from router.request import COMPLETION_MAX_TOKENS, GenerationRequest, for_prompts, new_request_id
from router.running import RunningRequests
from router.settings import RouterSettings
from serving.health import health_response
from serving.metrics import CONTENT_TYPE, render


class Endpoints:
    """One method a path; add them to an application with ``routes``.

    collector: the metrics of this moment. needs_key: whether clients need an API key, for the description of the API.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        models: ModelSource,
        registry: Registry,
        running: RunningRequests,
        collector: Callable[[], Awaitable[Collector]],
        settings: RouterSettings,
        *,
        needs_key: bool,
    ) -> None:
        self._pipeline = pipeline
        self._running = running
        self._is_strict = settings.strict_api
        self._document = document(
            version("kvbaton"), needs_key=needs_key, metrics_need_key=settings.metrics_need_key
        )
        self._models = models
        self._registry = registry
        self._collector = collector
        self._max_body_bytes = settings.max_body_bytes
        self._max_answers = min(MAX_PROMPTS, settings.max_queue)
        self._stall_seconds = settings.client_stall_seconds
        self._timeout_seconds = settings.request_timeout_seconds

    def routes(self) -> list[web.RouteDef]:
        """Every path that is served."""
        tokenizing = TokenizerEndpoints(self._body, self._models, self._registry)
        embedding = EmbeddingEndpoint(
            self._body, self._pipeline, self._models, self._running, self._max_answers
        )
        return [
            *tokenizing.routes(),
            web.post("/v1/embeddings", embedding.embeddings),
            *ResponseEndpoints(self._body, self._answer, self._models).routes(),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
            web.get("/v1/models", self.list_models),
            web.get("/v1/models/{model:.+}", self.show_model),
            web.get("/health", self.health),
            web.get("/ready", self.health),
            web.get("/version", self.version),
            web.get("/metrics", self.metrics),
            web.get("/openapi.json", self.openapi),
        ]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        arrival = time.monotonic()
        body = await self._body(request, "chatcmpl", CHAT)
        refuse_unserved(body, CHAT_FIELDS)
        longest = "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        chat = chat_of(body)
        asked = GenerationRequest(
            request_id=request[REQUEST_ID],
            prompt=chat,
            max_tokens=body.integer(longest),
            logprobs=_chat_logprobs(body),
            arrival=arrival,
            **forced_calls(chat, shared_fields(body)),
        )
        options = self._options([asked], body)
        return await self._answer(
            request,
            [asked],
            options,
            ChatShape(options, self._models.card().tokenizer, names_call=chat.tool_choice.name is not None),
        )

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        arrival = time.monotonic()
        body = await self._body(request, "cmpl", COMPLETION)
        refuse_unserved(body)
        first, *others = prompts_of(body.get("prompt"), self._max_answers, param="prompt")
        one = GenerationRequest(
            request_id=request[REQUEST_ID],
            prompt=first,
            max_tokens=1 if without_answer(body) else body.integer("max_tokens"),
            default_max_tokens=COMPLETION_MAX_TOKENS,
            logprobs=body.integer_within("logprobs", 0, MAX_LEGACY_LOGPROBS),
            arrival=arrival,
            **shared_fields(body),
        )
        if body.flag("echo") and one.prompt_logprobs is None:
            one = replace(one, prompt_logprobs=one.logprobs)
        asked = for_prompts(one, others)
        options = self._options(asked, body)
        echo = echo_of(body, asked, options.num_chosen)
        shape = CompletionShape(options, self._models.card().tokenizer, echo)
        return await self._answer(request, asked, options, shape)

    async def list_models(self, _: web.Request) -> web.Response:
        """GET /v1/models; empty while the model is not known yet."""
        return web.json_response({"object": "list", "data": [self._model()] if self._models.is_known else []})

    async def show_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = request.match_info["model"]
        if not self._models.is_known or name != self._models.card().name:
            raise NotFoundError(f"The model `{name}` does not exist.", param="model", code="model_not_found")
        return web.json_response(self._model())

    async def health(self, _: web.Request) -> web.Response:
        """GET /health and /ready: 200 when a request can be answered now, else 503 and what is missing."""
        return health_response(what_is_missing(self._models, self._registry))

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
        try:
            async with asyncio.timeout(self._timeout_seconds):
                body = await read_body(request, self._max_body_bytes, schema)
        except TimeoutError:
            raise DeadlineError(f"the body was not whole after {self._timeout_seconds} s") from None
        if self._is_strict:
            refuse_unknown(body.fields, schema)
        return body

    def _options(self, all_asked: list[GenerationRequest], body: Body) -> AnswerOptions:
        stream = body.flag("stream")
        if body.get("stream_options") is not None and not stream:
            raise InvalidRequestError("stream_options is allowed with stream only", param="stream_options")
        asked = all_asked[0]
        num_choices = len(all_asked) * asked.num_choices
        if num_choices > self._max_answers:
            raise InvalidRequestError(
                f"{num_choices} answers are too many; a request has {self._max_answers} at most", param="n"
            )
        return AnswerOptions(
            request_id=asked.request_id,
            num_choices=num_choices,
            model=asked.model or self._models.card().name,
            created=int(time.time()),
            stream=stream,
            include_usage=body.object("stream_options").flag("include_usage"),
            logprobs=asked.logprobs is not None,
            return_token_ids=body.flag("return_token_ids"),
            timings=body.flag("timings"),
            num_chosen=choice_counts(body)[0],
            prompt_logprobs=body.get("prompt_logprobs") is not None,
        )

    async def _answer(
        self,
        request: web.Request,
        asked: list[GenerationRequest],
        options: AnswerOptions,
        shape: Shape,
        open_stream: OpenStream = EventStream,
    ) -> web.StreamResponse:
        asked = [replace(one, tenant=tenant_of(request)) for one in asked]
        async with (
            self._running.open(authorization_of(request), request[REQUEST_ID], name_of(request)),
            naming_grammar_field(asked[0]),
            aclosing(self._pipeline.generate(*asked)) as deltas,
        ):
            if not options.stream:
                found = [delta async for delta in deltas]
                headers = server_timing(request, found)
                if asked[0].rates_tokens:
                    found = choose_best(found, options.num_chosen, asked[0].num_choices)
                return web.json_response(
                    text=msgspec.json.encode(shape.whole(found)).decode(),  # -inf is null, as in streams
                    headers=headers,
                )
            stream = open_stream(request, request_id_header(request), self._stall_seconds)
            request[STREAM] = stream
            async for delta in deltas:
                if chunks := shape.chunks(delta):
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


def _chat_logprobs(body: Body) -> int | None:
    top = body.integer_within("top_logprobs", 0, MAX_LOGPROBS)
    if body.flag("logprobs"):
        return top or 0
    if top:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return None
