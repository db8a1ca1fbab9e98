"""/v1/batches: the requests of a file, answered at the lowest priority."""

from typing import Any

from aiohttp import web
from msgspec import to_builtins

from contract.errors import InvalidRequestError
from router.batches.input_lines import ENDPOINTS
from router.batches.operations import NewBatch
from router.batches.records import BatchRecord
from router.batches.runner import BatchRunner
from router.batches.storage import Storage
from router.http.access import tenant_of
from router.http.bodies.body import Body, Json
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.files.pages import page
from router.http.files.uploads import check_expiry
from router.http.schema.files import BATCH, MAX_METADATA_KEY, MAX_METADATA_PAIRS, MAX_METADATA_VALUE, WINDOW

_DEFAULT_PAGE = 20
_MAX_PAGE = 100
_TIMES = (
    *("created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at"),
    *("failed_at", "expired_at", "cancelling_at", "cancelled_at"),
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
        batch = await self._runner.create(_new_batch(body, tenant_of(request)))
        return web.json_response(batch_object(batch))

    async def list_batches(self, request: web.Request) -> web.Response:
        """GET /v1/batches."""
        batches = await self._storage.run(self._shown, tenant_of(request))
        return web.json_response(page(request, batches, batch_object, default=_DEFAULT_PAGE, limit=_MAX_PAGE))

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/batches/{batch_id}."""
        owner = tenant_of(request)
        batch_id = request.match_info["batch_id"]
        return web.json_response(batch_object(await self._storage.run(self._shown_one, owner, batch_id)))

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/batches/{batch_id}/cancel."""
        batch = await self._runner.cancel(tenant_of(request), request.match_info["batch_id"])
        return web.json_response(batch_object(batch))

    def _shown(self, owner: str) -> list[BatchRecord]:
        return [self._storage.operations.show(batch) for batch in self._storage.store.batches(owner)]

    def _shown_one(self, owner: str, batch_id: str) -> BatchRecord:
        return self._storage.operations.show(self._storage.store.batch(owner, batch_id))


def _new_batch(body: Body, owner: str) -> NewBatch:
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
    return NewBatch(
        owner=owner,
        endpoint=endpoint,
        input_file_id=_required(body, "input_file_id"),
        completion_window=window,
        metadata=_metadata(body),
        output_seconds=_output_seconds(body),
    )


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


def _output_seconds(body: Body) -> int | None:
    if body.get("output_expires_after") is None:
        return None
    expiry = body.object("output_expires_after")
    return check_expiry(expiry.get("anchor"), expiry.get("seconds"), "output_expires_after")


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
        "output_file_id": batch.output_file_id if is_over and counts.completed else None,
        "error_file_id": batch.error_file_id if is_over and counts.failed else None,
        **{name: getattr(batch, name) for name in _TIMES},
        "request_counts": to_builtins(counts),
        "metadata": batch.metadata,
    }
