"""/v1/files: the files of clients.

An upload is multipart/form-data, and its file is written to the disk while it arrives, within a time that grows with its
bytes. Lists of files and of batches have pages.
"""

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from aiohttp import BodyPartReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from contract.errors import (
    CancelledError,
    DeadlineError,
    InvalidRequestError,
    PayloadTooLargeError,
    UnsupportedMediaTypeError,
)
from router.batches.operations import Storage
from router.batches.records import BatchRecord, FileRecord, Purpose
from router.batches.service import BatchRunner
from router.batches.store import Upload
from router.http.access import tenant_of
from router.http.bodies.body import Json
from router.http.bodies.json_bodies import let_body_come
from router.http.boundary import request_id_header
from router.http.schema.files import MAX_KEPT_SECONDS, MIN_KEPT_SECONDS

_PART_BYTES = 2**16
_CHUNK_BYTES = 2**18
_MAX_PAGE = 10_000
_FORM_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_MAX_FIELD_BYTES = 1024
_MAX_FIELDS = 16
_FORM_BYTES = _MAX_FIELDS * 2**14
"""Most bytes of a form beside the file: the fields, and the headers of its parts."""
_MAX_NAME_CHARACTERS = 255
_MIN_BYTES_PER_SECOND = 2**18
"""An upload whose mean rate stays below this for longer than its time ends: it holds a connection and a file."""
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
"""Control characters, line separators, marks of direction, and characters that cannot be seen."""


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
        # before a file is created, and before the client is asked for its body
        check_form(request, self._storage.store.limits.file_bytes)
        upload = Upload(self._storage.store, tenant_of(request))
        try:
            await self._storage.run(upload.create)
            async with asyncio.timeout(None) as timeout:
                deadline = UploadDeadline(timeout, self._body_seconds, self._timeout_seconds)
                form = await read_form(request, self._storage, upload, deadline)
            if (
                unknown := next((name for name in form.fields if name not in _FORM_FIELDS), None)
            ) is not None:
                raise InvalidRequestError(
                    f"Unknown parameter: {unknown[:60]!r}", param=unknown[:60], code="unknown_parameter"
                )
            if (purpose := form.fields.get("purpose")) != Purpose.BATCH:
                shown = "missing" if purpose is None else repr(purpose[:40])
                raise InvalidRequestError(
                    f"purpose is {shown}; this service keeps files for batches only: send 'batch'",
                    param="purpose",
                )
            if form.filename is None:
                raise InvalidRequestError("the form has no file", param="file")
            anchor = form.fields.get("expires_after[anchor]")
            seconds = form.fields.get("expires_after[seconds]")
            kept = None
            if anchor is not None or seconds is not None:
                is_number = seconds is not None and seconds.isdecimal()
                kept = check_expiry(anchor, int(seconds) if seconds is not None and is_number else seconds)
            file = await self._storage.run(upload.finish, form.filename, kept)
        except TimeoutError:
            raise DeadlineError(
                f"the upload is too slow: it was not complete after {self._body_seconds:g} s and the time that its bytes"
                f" take at 256 KiB/s, or after {self._timeout_seconds:g} s"
            ) from None
        finally:
            # in any case; it does nothing after ``finish``
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
        content = await self._storage.run(self._storage.store.open_file, file)
        try:
            response = web.StreamResponse(
                headers={
                    "Content-Type": "application/octet-stream",
                    "Content-Length": str(file.num_bytes),
                    **request_id_header(request),
                }
            )
            chunk = await self._storage.run(content.read, _CHUNK_BYTES)
            # behind the first read, so that a disk that fails can still be a status
            await response.prepare(request)
            while chunk:
                await self._write(request, response, chunk)
                chunk = await self._storage.run(content.read, _CHUNK_BYTES)
        finally:
            await self._storage.run(content.close)
        return response

    async def _file(self, request: web.Request) -> FileRecord:
        return await self._storage.run(
            self._storage.store.file, tenant_of(request), request.match_info["file_id"]
        )

    async def _write(self, request: web.Request, response: web.StreamResponse, chunk: bytes) -> None:
        try:
            async with asyncio.timeout(self._stall_seconds):
                await response.write(chunk)
        except TimeoutError:
            # else the end of the response waits for this client as well
            if request.transport is not None:
                request.transport.abort()
            raise CancelledError(f"the client has read nothing for {self._stall_seconds:g} s") from None


@dataclass
class Form:
    """The fields of an upload. filename: None until the file has arrived."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


def check_form(request: web.Request, max_file_bytes: int) -> None:
    """Raise UnsupportedMediaTypeError, or PayloadTooLargeError if Content-Length is too large."""
    if request.content_type != "multipart/form-data":
        raise UnsupportedMediaTypeError(
            f"the content type is {request.headers.get('Content-Type', 'missing')[:80]}; send multipart/form-data"
        )
    if (request.content_length or 0) > max_file_bytes + _FORM_BYTES:
        raise PayloadTooLargeError(
            f"the body has {request.content_length} bytes; a file may have {max_file_bytes} (files_max_bytes)",
            param="file",
        )


class UploadDeadline:
    """The end of one upload: ``seconds`` from its begin, and later for each byte that has arrived.

    timeout: the time-out around the upload, which this extends to at most ``most_seconds``.
    """

    def __init__(self, timeout: asyncio.Timeout, seconds: float, most_seconds: float) -> None:
        self._timeout = timeout
        begin = asyncio.get_running_loop().time()
        self._first = begin + seconds
        self._last = begin + most_seconds
        self._num_bytes = 0
        self.add(0)

    def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived."""
        self._num_bytes += num_bytes
        # a large file over a slow line may take long, as long as its bytes keep coming
        self._timeout.reschedule(min(self._last, self._first + self._num_bytes / _MIN_BYTES_PER_SECOND))


async def read_form(request: web.Request, storage: Storage, upload: Upload, deadline: UploadDeadline) -> Form:
    """Read the form and write its file to ``upload``; extend ``deadline`` as it arrives. Raises KvbatonError."""
    form = Form()
    await let_body_come(request)
    try:
        reader = await request.multipart()
        while (part := await reader.next()) is not None:
            if not isinstance(part, BodyPartReader):
                raise InvalidRequestError(
                    "the form contains another form; send file and purpose as its parts"
                )
            await _read_part(part, form, storage, upload, deadline)
    # aiohttp raises any of these for a form that is not well formed
    except (ValueError, AssertionError, RuntimeError, HttpProcessingError, web.RequestPayloadError) as error:
        raise InvalidRequestError(
            f"the form cannot be read: {type(error).__name__}; is it multipart/form-data with its boundary?"
        ) from error
    return form


async def _read_part(
    part: BodyPartReader, form: Form, storage: Storage, upload: Upload, deadline: UploadDeadline
) -> None:
    name = part.name or ""
    if part.headers.get(hdrs.CONTENT_TRANSFER_ENCODING, "binary").lower() not in ("binary", "8bit", "7bit"):
        raise InvalidRequestError(
            "Content-Transfer-Encoding is not allowed; send the bytes as they are", param=name[:40] or None
        )
    if name == "file":
        if form.filename is not None:
            raise InvalidRequestError("the form has two files; send one", param="file")
        form.filename = shown_name(part.filename or "")
        while chunk := await part.read_chunk(_PART_BYTES):
            await storage.run(upload.write, bytes(chunk))
            deadline.add(len(chunk))
        return
    # each field is held in memory
    if name in form.fields or len(form.fields) == _MAX_FIELDS:
        raise InvalidRequestError(
            f"the form has a field twice, or more than {_MAX_FIELDS} fields", param=name[:40] or None
        )
    form.fields[name] = await _text(part, name)


async def _text(part: BodyPartReader, name: str) -> str:
    data = b""
    while chunk := await part.read_chunk(_MAX_FIELD_BYTES):
        data += chunk
        if len(data) > _MAX_FIELD_BYTES:
            raise InvalidRequestError(
                f"a field of the form has more than {_MAX_FIELD_BYTES} bytes", param=name[:40] or None
            )
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError("a field of the form is not UTF-8", param=name[:40] or None) from error


def shown_name(filename: str) -> str:
    """Return a client's name for a file as others may show it or save by it: its last part, without invisible characters.

    Names that stand for folders, and names of which nothing is left, become "file".
    """
    text = filename.encode("utf-8", "replace").decode()  # invalid UTF-8 becomes "?"
    last = re.split(r"[/\\]", text)[-1]
    name = _INVISIBLE.sub("", last).strip()[:_MAX_NAME_CHARACTERS]
    return "file" if name.strip(". ") == "" else name


def check_expiry(anchor: object, seconds: object, param: str = "expires_after") -> int:
    """Return the seconds of an expiry, checked by OpenAI's rules. Raises InvalidRequestError."""
    if anchor != "created_at":
        raise InvalidRequestError(
            f"{param}.anchor is {str(anchor)[:40]!r}; it must be 'created_at'", param=f"{param}.anchor"
        )
    if type(seconds) is not int or not MIN_KEPT_SECONDS <= seconds <= MAX_KEPT_SECONDS:
        raise InvalidRequestError(
            f"{param}.seconds is {str(seconds)[:40]}; it must lie in {MIN_KEPT_SECONDS}..{MAX_KEPT_SECONDS}",
            param=f"{param}.seconds",
        )
    return seconds


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


Item = TypeVar("Item", FileRecord, BatchRecord)


def page(
    request: web.Request,
    oldest_first: Sequence[Item],
    show: Callable[[Item], Json],
    *,
    default: int,
    limit: int,
) -> Json:
    """Return one page of the list. default: default page size. limit: largest page size. Raises InvalidRequestError."""
    items = list(oldest_first)
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is {order[:20]!r}; it must be asc or desc", param="order")
    if order == "desc":
        items.reverse()
    # after the order: the page follows the object in the order that the client sees
    first = 0
    if (after := request.query.get("after")) is not None:
        found = next((place for place, item in enumerate(items) if item.id == after), None)
        if found is None:
            raise InvalidRequestError(
                f"after is {after[:80]!r}, which is not one of the objects", param="after"
            )
        first = found + 1
    size = _limit(request, default, limit)
    data = [show(item) for item in items[first : first + size]]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": first + size < len(items),
    }


def _limit(request: web.Request, default: int, limit: int) -> int:
    given = request.query.get("limit")
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= limit):
        raise InvalidRequestError(f"limit is {given[:20]!r}; it must lie in 1..{limit}", param="limit")
    return int(given)
