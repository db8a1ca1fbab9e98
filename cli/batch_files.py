"""Reads the requests of a batch file line by line, and writes the answers as they arrive."""

import codecs
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from contract.decoding import json_decoder
from contract.errors import SettingError

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


@dataclass(frozen=True)
class BatchRequest:
    """A valid line of the input. body: its JSON, unchanged."""

    number: int
    custom_id: str
    path: str
    body: bytes


@dataclass(frozen=True)
class BadLine:
    """An invalid line of the input, and the reason."""

    number: int
    custom_id: str | None
    reason: str


class Response(msgspec.Struct):
    """The service's reply."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Problem(msgspec.Struct, omit_defaults=True):
    """The reason why there is no response. line: its number in the input file."""

    code: str
    message: str
    line: int | None = None


class Result(msgspec.Struct):
    """One line of the output file."""

    id: str
    custom_id: str | None
    response: Response | None
    error: Problem | None

    @property
    def is_answer(self) -> bool:
        """True if the request was answered; the next run sends every other line again."""
        return self.response is not None and self.response.status_code == 200


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, msgspec.Raw]


class _Raw(msgspec.Struct):
    body: msgspec.Raw


class _Name(msgspec.Struct):
    custom_id: str


_results: msgspec.json.Decoder[Result] = json_decoder(Result)
_lines: msgspec.json.Decoder[_Line] = json_decoder(_Line)
_raw_lines: msgspec.json.Decoder[_Raw] = json_decoder(_Raw)
_names: msgspec.json.Decoder[_Name] = json_decoder(_Name)


def result(custom_id: str | None, response: Response | None = None, error: Problem | None = None) -> Result:
    """Make a line of the output with a new id."""
    return Result(f"batch_req_{secrets.token_hex(12)}", custom_id, response, error)


def count_lines(path: Path) -> int:
    """Count the lines that are not blank. Raises SettingError for a file that cannot be read."""
    with _reading(path, "input") as file:
        return sum(not line.isspace() for line in file)


def read_lines(path: Path) -> Iterator[BatchRequest | BadLine]:
    """Yield every line that is not blank; a line that repeats an earlier custom_id is invalid."""
    seen: dict[str, int] = {}
    with _reading(path, "input") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            found = _read(number, line.removeprefix(codecs.BOM_UTF8))
            if isinstance(found, BatchRequest):
                first = seen.setdefault(found.custom_id, number)
                if first != number:
                    found = BadLine(number, found.custom_id, f"custom_id is also that of line {first}")
            yield found


def _read(number: int, line: bytes) -> BatchRequest | BadLine:
    try:
        parsed = _lines.decode(line)
        # The body goes to the service as it was written: numbers keep their digits.
        raw = _raw_lines.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return BadLine(number, _custom_id(line), f"not a valid request: {error}")
    if reason := _refusal(parsed):
        return BadLine(number, parsed.custom_id, reason)
    return BatchRequest(number, parsed.custom_id, parsed.url, bytes(raw.body))


def _refusal(line: _Line) -> str | None:
    if line.method != "POST":
        return f"method is {line.method!r}; it must be 'POST'"
    if line.url not in PATHS:
        return f"url is {line.url!r}; it must be one of {', '.join(PATHS)}"
    if bytes(line.body.get("stream", b"")) == b"true":
        return "body.stream is true; a batch returns complete answers only"
    return None


def _custom_id(line: bytes) -> str | None:
    try:
        return _names.decode(line).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def answered(path: Path) -> set[str]:
    """Return the custom_ids that the output file has answers for, and remove everything else from the file.

    Removed are a last line that an earlier run did not finish, and lines without an answer, which are sent again. Raises
    SettingError, and changes nothing, for a file that was not written by a batch.
    """
    if not path.exists():
        return set()
    with _reading(path, "output") as file:
        lines = sum(1 for _ in file)
        file.seek(0)
        answers = {line.custom_id for line, _ in _answers(path, file) if line.custom_id is not None}
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        is_whole = len(answers) == lines and file.read(1) in (b"\n", b"")
    if not is_whole:
        # The old file is replaced when the new one is complete: a run that is killed here loses no answer.
        fresh = path.with_name(f"{path.name}.new")
        with path.open("rb") as old, fresh.open("wb") as new:
            for _, line in _answers(path, old):
                new.write(line.rstrip(b"\n") + b"\n")
        fresh.replace(path)
    return answers


def _answers(path: Path, file: BinaryIO) -> Iterator[tuple[Result, bytes]]:
    """Yield the first answer to each request, with its line unchanged."""
    seen: set[str] = set()
    for number, line in enumerate(file, 1):
        found = _result(path, number, line)
        if found and found.is_answer and found.custom_id is not None and found.custom_id not in seen:
            seen.add(found.custom_id)
            yield found, line


def _result(path: Path, number: int, line: bytes) -> Result | None:
    """Parse a line of an output file; None for an incomplete last line."""
    try:
        return _results.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        if not line.endswith(b"\n"):  # the run before was killed while it wrote this line
            return None
        raise SettingError(
            f"line {number} of output {path} is not an answer of a batch ({error}); choose another file",
            param="output",
        ) from error


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Result], None]]:
    """Yield a function that writes one line to the output file and flushes it. Raises SettingError if that cannot work."""
    try:
        file = path.open("ab")
    except OSError as error:
        raise SettingError(f"output {path} cannot be written: {error.strerror}", param="output") from error

    def write(line: Result) -> None:
        file.write(msgspec.json.encode(line) + b"\n")
        file.flush()  # a run that is killed has lost no answer that it was given

    with file:
        yield write


@contextmanager
def _reading(path: Path, name: str) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        raise SettingError(f"{name} {path} cannot be read: {error.strerror}", param=name) from error
    with file:
        yield file
