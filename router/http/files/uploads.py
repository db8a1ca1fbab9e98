"""The body of an upload: multipart/form-data, whose file is written to the disk while it arrives."""

import asyncio
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import aiohttp
from aiohttp import BodyPartReader, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from contract.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedMediaTypeError
from router.batches.storage import Storage
from router.batches.store import Upload
from router.http.bodies.raw_body import let_body_come
from router.http.schema.files import MAX_KEPT_SECONDS, MIN_KEPT_SECONDS

_CHUNK_BYTES = 2**16
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


def ignore_odd_names() -> None:
    """Ignore aiohttp's warnings about unreadable file names; such a file is named "file".

    A warning repeats the client's text on standard error, and Python keeps the text of every warning in memory.
    """
    warnings.filterwarnings("ignore", category=aiohttp.BadContentDispositionHeader)
    warnings.filterwarnings("ignore", category=aiohttp.BadContentDispositionParam)


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
        self._timeout.reschedule(min(self._last, self._first + self._num_bytes / _MIN_BYTES_PER_SECOND))


def shown_name(filename: str) -> str:
    """Return a client's name for a file as others may show it or save by it: its last part, without invisible characters.

    Names that stand for folders, and names of which nothing is left, become "file".
    """
    text = filename.encode("utf-8", "replace").decode()  # invalid UTF-8 becomes "?"
    last = re.split(r"[/\\]", text)[-1]
    name = _INVISIBLE.sub("", last).strip()[:_MAX_NAME_CHARACTERS]
    return "file" if name.strip(". ") == "" else name


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
        while chunk := await part.read_chunk(_CHUNK_BYTES):
            await storage.run(upload.write, bytes(chunk))
            deadline.add(len(chunk))
        return
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


def kept_seconds(fields: Mapping[str, str]) -> int | None:
    """Return the seconds of ``expires_after``; None if it is not given. Raises InvalidRequestError."""
    anchor = fields.get("expires_after[anchor]")
    seconds = fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    return check_expiry(anchor, int(seconds) if seconds is not None and seconds.isdecimal() else seconds)


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
