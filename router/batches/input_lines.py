"""The input file of a batch: one JSON object per line. A problem has OpenAI's code and the number of its line."""

import codecs
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import BinaryIO

import msgspec

from contract.decoding import json_decoder
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


def digest(custom_id: str) -> bytes:
    """Return 16 bytes that identify a custom_id in memory, however long it is."""
    return blake2b(custom_id.encode(), digest_size=16).digest()


def read_line(file: BinaryIO, max_bytes: int) -> bytes:
    """Return the next line with its end, or b"" after the last one; of a longer line ``max_bytes`` + 1 bytes."""
    return file.readline(max_bytes + 1)


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
    if (problem := _problem(line, number, endpoint)) is not None:
        return problem
    return InputLine(line.custom_id, bytes(line.body))


def _problem(line: _Line, number: int, endpoint: str) -> LineProblem | None:
    code = ""
    param = ""
    message = ""
    if line.method != "POST":
        code = "invalid_method"
        param = "method"
        message = f"method is {line.method[:20]!r}; it must be 'POST'"
    elif line.url != endpoint:
        code = "url_mismatch"
        param = "url"
        message = f"url is {line.url[:60]!r}; it must be {endpoint!r}, the endpoint of the batch"
    elif not 1 <= len(line.custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        code = "invalid_custom_id"
        param = "custom_id"
        message = (
            f"custom_id has {len(line.custom_id)} characters; it may have 1 to {MAX_CUSTOM_ID_CHARACTERS}"
        )
    elif not bytes(line.body).startswith(b"{"):
        code = "invalid_request"
        param = "body"
        message = "body must be an object"
    return LineProblem(code=code, message=message, param=param, line=number) if code else None


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
                self._check_not_empty()
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
        elif (first := self._first_line.setdefault(digest(line.custom_id), number)) != number:
            message = f"custom_id is also that of line {first}; it must be unique within a batch."
            self.problems.append(
                LineProblem(code="duplicate_custom_id", message=message, param="custom_id", line=number)
            )
        return len(self.problems) < MAX_PROBLEMS

    def _check_not_empty(self) -> None:
        if not self.total:
            self.problems.append(LineProblem(code="empty_file", message="The file has no lines."))


def valid_lines(file: BinaryIO, endpoint: str, max_line_bytes: int) -> Iterator[InputLine]:
    """Yield the lines of a file that ``Validation`` has found to be valid, with one read for each."""
    number = 0
    while raw := read_line(file, max_line_bytes):
        number += 1
        line = parse_line(raw, number, endpoint)
        if isinstance(line, LineProblem):
            raise AssertionError(f"line {number} is no longer valid: {line.code}")
        yield line
