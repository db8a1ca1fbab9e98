"""The results of a batch: two files of lines that only grow, one for answers and one for errors."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from contract.decoding import json_decoder
from router.batches.disk import Disk
from router.batches.input_lines import digest


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
            self._recover(number, path)
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

    def _recover(self, number: int, path: Path) -> None:
        if not path.exists():
            return
        with path.open("rb") as file:
            for custom_id, size in _whole_lines(file):
                self._done.add(digest(custom_id))
                self._counts[number] += 1
                self._sizes[number] += size
        if path.stat().st_size != self._sizes[number]:
            self._disk.truncate(path, self._sizes[number])


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
