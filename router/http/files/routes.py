"""The paths of files and batches. A router without a folder for them rejects them all with an explanation."""

from aiohttp import web

from contract.errors import NotFoundError
from router.batches.service import BatchService
from router.http.bodies.json_bodies import JsonBodyReader
from router.http.files.batches import BatchEndpoints
from router.http.files.files import FileEndpoints
from router.http.files.uploads import ignore_odd_names
from router.settings import RouterSettings


def file_routes(
    bodies: JsonBodyReader, service: BatchService | None, settings: RouterSettings
) -> list[web.RouteDef]:
    """Return every path of files and batches. service: None if the router keeps no files."""
    if service is None:
        return [web.route(method, path, _reject) for method, path in _PATHS]
    ignore_odd_names()
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
