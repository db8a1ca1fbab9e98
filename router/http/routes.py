"""Every path of the public HTTP API."""

from collections.abc import Awaitable, Callable
from importlib.metadata import version

from aiohttp import web
from prometheus_client.registry import Collector

from router.attempts.draining import Drain
from router.batches.service import BatchService
from router.client_access import ClientAccess
from router.http.answer_writer import AnswerWriter
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.embeddings import EmbeddingEndpoint, EmbeddingParser
from router.http.files.routes import file_routes
from router.http.generation.endpoints import GenerationEndpoints
from router.http.generation.parser import GenerationParser
from router.http.messages.endpoints import MessageEndpoints
from router.http.messages.parser import MessageParser
from router.http.models import ModelEndpoints
from router.http.openapi import document
from router.http.pages import PageEndpoints
from router.http.responses.endpoints import ResponseEndpoints
from router.http.responses.parser import ResponseParser
from router.http.status import StatusEndpoints
from router.http.tokenizing import TokenizerEndpoints
from router.request_path import RequestPath
from router.settings import RouterSettings


def all_routes(
    settings: RouterSettings,
    path: RequestPath,
    clients: ClientAccess,
    drain: Drain,
    batches: BatchService | None,
    collector: Callable[[], Awaitable[Collector]],
) -> list[web.RouteDef]:
    """Return the routes. batches: None if the router keeps no files. collector: returns the metrics of this moment."""
    models = path.models
    registry = path.registry
    bodies = JsonBodyReader(models, clients.held, settings)
    answers = AnswerWriter(path.pipeline, settings.client_stall_seconds, settings.stream_keep_alive_seconds)
    api = document(
        version("kvbaton"),
        needs_key=clients.keys.are_required,
        metrics_need_key=settings.metrics_need_key,
    )
    generation = GenerationParser(models, settings.max_answers)
    embeddings = EmbeddingParser(models, settings.max_answers)
    return [
        *GenerationEndpoints(bodies, answers, generation).routes(),
        *ResponseEndpoints(bodies, answers, ResponseParser(models)).routes(),
        *MessageEndpoints(bodies, answers, path.pipeline, MessageParser(models)).routes(),
        *EmbeddingEndpoint(bodies, path.pipeline, embeddings).routes(),
        *TokenizerEndpoints(bodies, models, registry, path.tokenizers).routes(),
        *file_routes(bodies, batches, settings),
        *ModelEndpoints(models, registry).routes(),
        *PageEndpoints(api, lambda: path.missing, lambda: path.tracker.num_held).routes(),
        *StatusEndpoints(lambda: path.missing, lambda: path.degraded, drain, collector, api).routes(),
    ]
