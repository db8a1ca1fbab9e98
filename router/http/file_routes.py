"""The paths of files and batches, with or without a folder for them."""

from aiohttp import web

from contract.errors import NotFoundError
from router.batches.service import BatchService
from router.http.batches import BatchEndpoints
from router.http.files import FileEndpoints
from router.http.tokenizing import ReadBody
from router.http.uploads import ignore_odd_names
from router.settings import RouterSettings


def file_routes(
    read_body: ReadBody, service: BatchService | None, settings: RouterSettings
) -> list[web.RouteDef]:
    """Return every path of files and batches; all of them are refused where ``service`` is None."""
    if service is None:
        return [web.route(method, path, _refuse) for method, path in _PATHS]
    ignore_odd_names()
    files = FileEndpoints(
        service.library, service.runner, settings.request_timeout_seconds, settings.client_stall_seconds
    )
    batches = BatchEndpoints(read_body, service.library, service.runner)
    handlers = (
        *(files.upload, files.list_files, files.show, files.delete, files.content),
        *(batches.create, batches.list_batches, batches.show, batches.cancel),
    )
    return [
        web.route(method, path, handler) for (method, path), handler in zip(_PATHS, handlers, strict=True)
    ]


async def _refuse(_: web.Request) -> web.StreamResponse:
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
