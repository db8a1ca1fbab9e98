"""Every path of the public HTTP API."""

from collections.abc import Awaitable, Callable
from functools import partial
from importlib.metadata import version

from aiohttp import web
from prometheus_client.registry import Collector

from router.attempts.draining import Drain
from router.batches.service import BatchService
from router.client_access import ClientAccess
from router.http.answer_writer import AnswerWriter
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.embeddings import EmbeddingParser, embedding_route
from router.http.endpoints import text_endpoints
from router.http.files.batches import file_routes
from router.http.openapi import document
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
    bodies = JsonBodyReader(models, clients.held, settings)
    answers = AnswerWriter(
        bodies, path.pipeline, settings.client_stall_seconds, settings.stream_keep_alive_seconds
    )
    api = document(
        version("kvbaton"),
        needs_key=clients.keys.are_required,
        metrics_need_key=settings.metrics_need_key,
    )
    endpoints = text_endpoints(models, settings.max_answers)
    return [
        *(web.post(url, partial(answers.answer, endpoint)) for url, endpoint in endpoints.items()),
        embedding_route(bodies, path.pipeline, EmbeddingParser(models, settings.max_answers)),
        *TokenizerEndpoints(bodies, path).routes(),
        *file_routes(bodies, batches, settings),
        *StatusEndpoints(path, drain, collector, api).routes(),
    ]
