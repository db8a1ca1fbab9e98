"""The lines of a batch: requests in its input file, and their results in two files that only grow.

A problem of an input line has OpenAI's code and the number of its line. Answers and errors have a result file each.
"""

import codecs
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec

from contract.decoding import json_decoder
from router.batches.folder import Disk
from router.batches.records import LineProblem

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MAX_CUSTOM_ID_CHARACTERS = 512
MAX_PROBLEMS = 100
"""Most problems that a batch lists; reading stops then."""


@dataclass(frozen=True)
class InputLine:
    """A request of a batch. body: the JSON text from the line."""

    custom_id: str
    body: bytes


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_raw: msgspec.json.Decoder[msgspec.Raw] = json_decoder(msgspec.Raw)


_lines: msgspec.json.Decoder[_Line] = json_decoder(_Line)


def parse_line(raw: bytes, number: int, endpoint: str) -> InputLine | LineProblem:
    """Parse one line. The body is only checked to be an object."""
    if number == 1:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        raw.decode()  # msgspec does not check the bytes of strings that it skips
        _raw.decode(raw)  # else a wrong type would hide broken JSON after it
        line = _lines.decode(raw)
    except msgspec.ValidationError as error:
        return LineProblem(code="invalid_request", message=f"The line is not a request: {error}", line=number)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = "This line is not parseable as valid JSON."
        return LineProblem(code="invalid_json_line", message=message, line=number)
    if line.method != "POST":
        wrong = ("invalid_method", "method", f"method is {line.method[:20]!r}; it must be 'POST'")
    elif line.url != endpoint:
        message = f"url is {line.url[:60]!r}; it must be {endpoint!r}, the endpoint of the batch"
        wrong = ("url_mismatch", "url", message)
    elif not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        message = (
            f"custom_id has {len(line.custom_id)} characters; it may have 1 to {MAX_CUSTOM_ID_CHARACTERS}"
        )
        wrong = ("invalid_custom_id", "custom_id", message)
    elif not bytes(line.body).startswith(b"{"):
        wrong = ("invalid_request", "body", "body must be an object")
    else:
        return InputLine(line.custom_id, bytes(line.body))
    code, param, message = wrong
    return LineProblem(code=code, message=message, param=param, line=number)


@dataclass
class Validation:
    """Checks an input file, some lines at a time. Owns the number of lines, their ids and the problems.

    max_line_bytes: a longer line is a problem. max_lines: a file with more lines is rejected.
    """

    file: BinaryIO
    endpoint: str
    max_lines: int
    max_line_bytes: int
    total: int = 0
    problems: list[LineProblem] = field(default_factory=list)
    _first_line: dict[bytes, int] = field(default_factory=dict)

    def advance(self, max_bytes: int) -> bool:
        """Check about ``max_bytes`` of further lines. Return True if all are checked or the result is certain."""
        num_bytes = 0
        while num_bytes < max_bytes:
            raw = read_line(self.file, self.max_line_bytes)
            if not raw:
                if not self.total:
                    self.problems.append(LineProblem(code="empty_file", message="The file has no lines."))
                return True
            num_bytes += len(raw)
            self.total += 1
            if self.total > self.max_lines:
                message = f"The file has more than {self.max_lines} lines, the limit of this service."
                self.problems = [LineProblem(code="too_many_tasks", message=message)]
                return True
            if not self._check(raw):
                return True
        return False

    def _check(self, raw: bytes) -> bool:
        """Check one line. Return False if no further line is to be read."""
        number = self.total
        if len(raw) > self.max_line_bytes:
            message = f"The line has more than {self.max_line_bytes} bytes, the limit of a request's body."
            self.problems.append(LineProblem(code="line_too_long", message=message, line=number))
            return False
        line = parse_line(raw, number, self.endpoint)
        if isinstance(line, LineProblem):
            self.problems.append(line)
        # by digest: fifty thousand ids may have 512 characters each
        elif (first := self._first_line.setdefault(digest(line.custom_id), number)) != number:
            message = f"custom_id is also that of line {first}; it must be unique within a batch."
            self.problems.append(
                LineProblem(code="duplicate_custom_id", message=message, param="custom_id", line=number)
            )
        return len(self.problems) < MAX_PROBLEMS


def valid_lines(file: BinaryIO, endpoint: str, max_line_bytes: int) -> Iterator[InputLine]:
    """Yield the lines of a file that ``Validation`` has found to be valid, with one read for each."""
    number = 0
    while raw := read_line(file, max_line_bytes):
        number += 1
        line = parse_line(raw, number, endpoint)
        if isinstance(line, LineProblem):
            raise AssertionError(f"line {number} is no longer valid: {line.code}")
        yield line


def read_line(file: BinaryIO, max_bytes: int) -> bytes:
    """Return the next line with its end, or b"" after the last one; of a longer line ``max_bytes`` + 1 bytes."""
    return file.readline(max_bytes + 1)


class Response(msgspec.Struct, frozen=True):
    """The response to a request. body: JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Problem(msgspec.Struct, frozen=True):
    """The reason why a request has no response."""

    code: str
    message: str


class Result(msgspec.Struct, frozen=True):
    """One line of a result file, with OpenAI's field names."""

    id: str
    custom_id: str
    response: Response | None
    error: Problem | None

    @property
    def is_answer(self) -> bool:
        """True for a line of the output file; others go to the error file."""
        return self.response is not None and self.response.status_code == 200


def new_result(custom_id: str, response: Response | None, error: Problem | None = None) -> Result:
    """Return a result with a new id."""
    return Result(f"batch_req_{secrets.token_hex(12)}", custom_id, response, error)


class Results:
    """Owns the two result files of one batch while they are open, and the set of requests that have a result line.

    Only whole lines count: bytes after the last whole line are cut off when the files are opened.
    """

    def __init__(self, disk: Disk, output: Path, errors: Path) -> None:
        """Open the files of an earlier run, or new ones. Raises OSError."""
        self._disk = disk
        self._paths = (output, errors)
        self._done: set[bytes] = set()
        self._counts = [0, 0]
        self._sizes = [0, 0]
        self._torn: set[int] = set()
        for number, path in enumerate(self._paths):
            if not path.exists():
                continue
            with path.open("rb") as file:
                for custom_id, size in _whole_lines(file):
                    self._done.add(digest(custom_id))
                    self._counts[number] += 1
                    self._sizes[number] += size
            # the process died while it wrote; the request of that line is answered again
            if path.stat().st_size != self._sizes[number]:
                disk.truncate(path, self._sizes[number])
        self._descriptors: list[int] = []
        try:
            for path in self._paths:
                self._descriptors.append(disk.append_to(path))
        except OSError:
            self.close()
            raise

    @property
    def num_answers(self) -> int:
        """Lines of the output file."""
        return self._counts[0]

    @property
    def num_errors(self) -> int:
        """Lines of the error file."""
        return self._counts[1]

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of both files."""
        return self._sizes[0], self._sizes[1]

    def has(self, custom_id: str) -> bool:
        """Return True if the request has a result line."""
        return digest(custom_id) in self._done

    def append(self, result: Result) -> int:
        """Write a result as one line and return its size in bytes. Raises OSError.

        A partial line of a failed write is cut off before the next write, or when the files are opened again.
        """
        number = 0 if result.is_answer else 1
        line = msgspec.json.encode(result) + b"\n"
        if number in self._torn:
            self._disk.truncate(self._paths[number], self._sizes[number])
        # before the write: one that fails may have written a part of the line
        self._torn.add(number)
        self._disk.write(self._descriptors[number], line)
        self._torn.discard(number)
        self._sizes[number] += len(line)
        self._counts[number] += 1
        self._done.add(digest(result.custom_id))
        return len(line)

    def sync(self) -> None:
        """Wait until every line would survive a power failure. Raises OSError."""
        for descriptor in self._descriptors:
            self._disk.sync(descriptor)

    def close(self) -> None:
        """Close both files. Does nothing if they are closed."""
        descriptors = self._descriptors
        self._descriptors = []
        for descriptor in descriptors:
            os.close(descriptor)


class _Head(msgspec.Struct):
    custom_id: str


_heads: msgspec.json.Decoder[_Head] = json_decoder(_Head)


def _whole_lines(file: BinaryIO) -> Iterator[tuple[str, int]]:
    """Yield custom_id and size of each line, up to the first one that is not complete."""
    for raw in file:
        if not raw.endswith(b"\n"):
            return
        try:
            head = _heads.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        yield head.custom_id, len(raw)


def digest(custom_id: str) -> bytes:
    """Return 16 bytes that identify a custom_id in memory, however long it is."""
    return blake2b(custom_id.encode(), digest_size=16).digest()
