"""/v1/files: the files of clients."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import BinaryIO

from aiohttp import web

from contract.errors import CancelledError, DeadlineError, InvalidRequestError
from router.batches.records import FileRecord, Purpose
from router.batches.runner import BatchRunner
from router.batches.storage import Storage
from router.batches.store import Upload
from router.http.access import tenant_of
from router.http.bodies.body import Json
from router.http.boundary import request_id_header
from router.http.files.pages import page
from router.http.files.uploads import UploadDeadline, check_form, kept_seconds, read_form

_CHUNK_BYTES = 2**18
_MAX_PAGE = 10_000
_FORM_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


class FileEndpoints:
    """Handlers of files.

    timeout_seconds: time for one upload. body_seconds: time for one that is slow. stall_seconds: time in which a client may
    read nothing of a file's content.
    """

    def __init__(
        self,
        storage: Storage,
        runner: BatchRunner,
        *,
        timeout_seconds: float,
        body_seconds: float,
        stall_seconds: float,
    ) -> None:
        self._storage = storage
        self._runner = runner
        self._timeout_seconds = timeout_seconds
        self._body_seconds = body_seconds
        self._stall_seconds = stall_seconds

    async def upload(self, request: web.Request) -> web.Response:
        """POST /v1/files."""
        check_form(request, self._storage.store.limits.file_bytes)
        upload = Upload(self._storage.store, tenant_of(request))
        try:
            await self._storage.run(upload.create)
            async with asyncio.timeout(None) as timeout:
                deadline = UploadDeadline(timeout, self._body_seconds, self._timeout_seconds)
                form = await read_form(request, self._storage, upload, deadline)
            _check_fields(form.fields)
            if form.filename is None:
                raise InvalidRequestError("the form has no file", param="file")
            file = await self._storage.run(upload.finish, form.filename, kept_seconds(form.fields))
        except TimeoutError:
            raise DeadlineError(
                f"the upload is too slow: it was not complete after {self._body_seconds:g} s and the time that its bytes"
                f" take at 256 KiB/s, or after {self._timeout_seconds:g} s"
            ) from None
        finally:
            await self._storage.run(upload.abort)
        return web.json_response(file_object(file))

    async def list_files(self, request: web.Request) -> web.Response:
        """GET /v1/files."""
        files = await self._storage.run(self._storage.store.files, tenant_of(request))
        if (purpose := request.query.get("purpose")) is not None:
            files = [file for file in files if file.purpose == purpose]
        return web.json_response(page(request, files, file_object, default=_MAX_PAGE, limit=_MAX_PAGE))

    async def show(self, request: web.Request) -> web.Response:
        """GET /v1/files/{file_id}."""
        return web.json_response(file_object(await self._file(request)))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/files/{file_id}."""
        file_id = request.match_info["file_id"]
        await self._runner.delete_file(tenant_of(request), file_id)
        return web.json_response({"id": file_id, "object": "file", "deleted": True})

    async def content(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files/{file_id}/content."""
        file = await self._file(request)
        async with self._opened(file) as content:
            response = web.StreamResponse(
                headers={
                    "Content-Type": "application/octet-stream",
                    "Content-Length": str(file.num_bytes),
                    **request_id_header(request),
                }
            )
            chunk = await self._storage.run(content.read, _CHUNK_BYTES)
            await response.prepare(request)
            while chunk:
                await self._write(request, response, chunk)
                chunk = await self._storage.run(content.read, _CHUNK_BYTES)
        return response

    async def _file(self, request: web.Request) -> FileRecord:
        return await self._storage.run(
            self._storage.store.file, tenant_of(request), request.match_info["file_id"]
        )

    @asynccontextmanager
    async def _opened(self, file: FileRecord) -> AsyncIterator[BinaryIO]:
        content = await self._storage.run(self._storage.store.open_file, file)
        try:
            yield content
        finally:
            await self._storage.run(content.close)

    async def _write(self, request: web.Request, response: web.StreamResponse, chunk: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await response.write(chunk)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise CancelledError(f"the client has read nothing for {self._stall_seconds:g} s") from None


def _check_fields(fields: dict[str, str]) -> None:
    if (unknown := next((name for name in fields if name not in _FORM_FIELDS), None)) is not None:
        raise InvalidRequestError(
            f"Unknown parameter: {unknown[:60]!r}", param=unknown[:60], code="unknown_parameter"
        )
    purpose = fields.get("purpose")
    if purpose != Purpose.BATCH:
        shown = "missing" if purpose is None else repr(purpose[:40])
        raise InvalidRequestError(
            f"purpose is {shown}; this service keeps files for batches only: send 'batch'", param="purpose"
        )


def file_object(file: FileRecord) -> Json:
    """Return OpenAI's file object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose.value,
        "status": "processed",
        "status_details": None,
    }
