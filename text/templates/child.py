"""The process that renders chat templates: it answers one frame with one frame until its input ends.

A template is code of an untrusted author. In this process its CPU time and memory are limited: the kernel ends the process
at the first limit, and an allocation fails at the second.

"""

import json
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

from contract.errors import InvalidRequestError, SettingError
from text.templates.sandbox import LocalRenderer

HEADER = struct.Struct("<Q")
"""The header of each frame: its length in bytes."""
TOO_MUCH = "too much"
REFUSAL = "refusal"
INVALID = "invalid"
TEXT = "text"
"""The kinds of answers; each answer has one key."""
_LENGTH = "length"
_FREE_CHARACTERS = 2**20
_CHARACTERS_PER_BYTE = 16
"""Limits of a prompt's characters: a free number, plus a number per byte of its inputs."""


def main() -> None:
    """Serve one parent: the first frame has the limits and sources, each further one a template's name and variables."""
    # The parent ends this process, also after a signal to the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    source = sys.stdin.buffer
    sink = sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    resource.setrlimit(resource.RLIMIT_AS, (first["max_memory_bytes"], first["max_memory_bytes"]))
    # A process that the kernel ends would leave a core file of its whole memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    renderer: LocalRenderer | None = None
    frame: dict[str, Any] | None = first
    while frame is not None:
        signal.setitimer(signal.ITIMER_PROF, first["cpu_seconds"])
        try:
            if renderer is None:
                renderer = LocalRenderer(frame["sources"])
                answer = {TEXT: ""}
            else:
                answer = _rendered(renderer, frame, first["max_output_characters"])
            signal.setitimer(signal.ITIMER_PROF, 0)
            write_frame(sink, answer)
        except SettingError as error:
            write_frame(sink, {INVALID: error.message})
        except MemoryError:
            write_frame(sink, {TOO_MUCH: ""})
            return
        frame = read_frame(source)


def read_frame(source: BinaryIO) -> dict[str, Any] | None:
    """Return the next frame, or None at the end."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    return decode_frame(source.read(length)) | {_LENGTH: length}


def write_frame(sink: BinaryIO, frame: dict[str, Any]) -> None:
    """Write a frame and flush it."""
    data = encode_frame(frame)
    sink.write(HEADER.pack(len(data)))
    sink.write(data)
    sink.flush()


def encode_frame(frame: dict[str, Any]) -> bytes:
    """Return the bytes of a frame."""
    return json.dumps(frame, ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode_frame(data: bytes) -> dict[str, Any]:
    """Parse the bytes of a frame."""
    found: dict[str, Any] = json.loads(data.decode("utf-8", "surrogatepass"))
    return found


def _rendered(renderer: LocalRenderer, frame: dict[str, Any], max_characters: int) -> dict[str, Any]:
    try:
        text = renderer.render(frame["name"], frame["variables"])
    except InvalidRequestError as error:
        return {REFUSAL: error.message}
    allowed = min(max_characters, _FREE_CHARACTERS + _CHARACTERS_PER_BYTE * frame[_LENGTH])
    return {TEXT: text} if len(text) <= allowed else {TOO_MUCH: ""}


if __name__ == "__main__":
    main()
