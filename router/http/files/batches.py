"""/v1/batches: the requests of a file, answered at the lowest priority; and the paths of files and batches together."""

import warnings
from typing import Any

import aiohttp
from aiohttp import web
from msgspec import to_builtins

from contract.errors import InvalidRequestError, NotFoundError
from router.batches.lines import ENDPOINTS
from router.batches.operations import NewBatch, Storage
from router.batches.records import BatchRecord
from router.batches.service import BatchRunner, BatchService
from router.http.access import tenant_of
from router.http.bodies.body import Body, Json
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.files.files import FileEndpoints, check_expiry, page
from router.http.schema.files import BATCH, MAX_METADATA_KEY, MAX_METADATA_PAIRS, MAX_METADATA_VALUE, WINDOW
from router.settings import RouterSettings

_DEFAULT_PAGE = 20
_MAX_PAGE = 100
_TIMES = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
)
_PATHS = (
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/{file_id}"),
    ("DELETE", "/v1/files/{file_id}"),
    ("GET", "/v1/files/{file_id}/content"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/{batch_id}"),
    ("POST", "/v1/batches/{batch_id}/cancel"),
)


class BatchEndpoints:
    """Handlers of batches."""

    def __init__(self, bodies: JsonBodyReader, storage: Storage, runner: BatchRunner) -> None:
        self._bodies = bodies
        self._storage = storage
        self._runner = runner

    async def create(self, request: web.Request) -> web.Response:
        """POST /v1/batches."""
        body = await self._bodies.read(request, "req", BATCH)
        window = _required(body, "completion_window")
        if window != WINDOW:
            raise InvalidRequestError(
                f"completion_window is {window[:20]!r}; it must be {WINDOW!r}", param="completion_window"
            )
        endpoint = _required(body, "endpoint")
        if endpoint not in ENDPOINTS:
            raise InvalidRequestError(
                f"endpoint is {endpoint[:60]!r}; it must be one of {', '.join(ENDPOINTS)}", param="endpoint"
            )
        seconds = None
        if body.get("output_expires_after") is not None:
            expiry = body.object("output_expires_after")
            seconds = check_expiry(expiry.get("anchor"), expiry.get("seconds"), "output_expires_after")
        new = NewBatch(
            owner=tenant_of(request),
            endpoint=endpoint,
            input_file_id=_required(body, "input_file_id"),
            completion_window=window,
            metadata=_metadata(body),
            output_seconds=seconds,
        )
        return web.json_response(batch_object(await self._runner.create(new)))

    async def list_batches(self, request: web.Request) -> web.Response:
        """GET /v1/batches."""
        store = self._storage.store
        show = self._storage.operations.show
        owner = tenant_of(request)
        batches = await self._storage.run(lambda: [show(batch) for batch in store.batches(owner)])
        return web.json_response(page(request, batches, batch_object, default=_DEFAULT_PAGE, limit=_MAX_PAGE))

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/batches/{batch_id}."""
        store = self._storage.store
        show = self._storage.operations.show
        owner = tenant_of(request)
        batch_id = request.match_info["batch_id"]
        batch = await self._storage.run(lambda: show(store.batch(owner, batch_id)))
        return web.json_response(batch_object(batch))

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/batches/{batch_id}/cancel."""
        batch = await self._runner.cancel(tenant_of(request), request.match_info["batch_id"])
        return web.json_response(batch_object(batch))


def _required(body: Body, name: str) -> str:
    value = body.string(name)
    if not value:
        raise InvalidRequestError(
            f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter"
        )
    return value


def _metadata(body: Body) -> dict[str, str] | None:
    if body.get("metadata") is None:
        return None
    pairs: dict[str, Any] = body.object("metadata").fields
    if len(pairs) > MAX_METADATA_PAIRS:
        raise InvalidRequestError(
            f"metadata has {len(pairs)} pairs; the limit is {MAX_METADATA_PAIRS}", param="metadata"
        )
    for key, value in pairs.items():
        if not isinstance(value, str) or len(value) > MAX_METADATA_VALUE or len(key) > MAX_METADATA_KEY:
            raise InvalidRequestError(
                f"metadata[{key[:20]!r}] is not valid; keys may have {MAX_METADATA_KEY} characters, and values must be "
                f"strings of at most {MAX_METADATA_VALUE}",
                param="metadata",
            )
    return pairs


def batch_object(batch: BatchRecord) -> Json:
    """Return OpenAI's batch object. Result files are shown once they are complete, if they have any line."""
    is_over = not batch.is_open
    counts = batch.counts
    problems = [to_builtins(problem) for problem in batch.errors]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": problems} if problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        # the id exists from the beginning, but a client that asked for it now would get 404
        "output_file_id": batch.output_file_id if is_over and counts.completed else None,
        "error_file_id": batch.error_file_id if is_over and counts.failed else None,
        **{name: getattr(batch, name) for name in _TIMES},
        "request_counts": to_builtins(counts),
        "metadata": batch.metadata,
    }


def file_routes(
    bodies: JsonBodyReader, service: BatchService | None, settings: RouterSettings
) -> list[web.RouteDef]:
    """Return every path of files and batches. service: None if the router keeps no files."""
    if service is None:
        return [web.route(method, path, _reject) for method, path in _PATHS]
    # a file whose name cannot be read is named "file"; aiohttp's warning repeats the client's text on standard error, and
    # Python keeps the text of every warning in memory
    warnings.filterwarnings("ignore", category=aiohttp.BadContentDispositionHeader)
    warnings.filterwarnings("ignore", category=aiohttp.BadContentDispositionParam)
    files = FileEndpoints(
        service.storage,
        service.runner,
        timeout_seconds=settings.request_timeout_seconds,
        body_seconds=settings.body_timeout_seconds,
        stall_seconds=settings.client_stall_seconds,
    )
    batches = BatchEndpoints(bodies, service.storage, service.runner)
    handlers = (
        *(files.upload, files.list_files, files.show, files.delete, files.content),
        *(batches.create, batches.list_batches, batches.show, batches.cancel),
    )
    return [
        web.route(method, path, handler) for (method, path), handler in zip(_PATHS, handlers, strict=True)
    ]


async def _reject(_: web.Request) -> web.StreamResponse:
    raise NotFoundError(
        "this service keeps no files and runs no batches: its router was started without files_dir (--files-dir)",
        code="files_not_enabled",
    )
