"""Renders chat templates in a separate process, which may be killed."""

import contextlib
import os
import select
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping
from typing import IO, Any

import psutil

from contract.errors import InternalError, SettingError
from text.templates.child import HEADER, INVALID, REFUSAL, TEXT, decode_frame, encode_frame
from text.templates.sandbox import TemplateLimitError, TemplateRefusalError
from text.templates.settings import RenderLimits, child_command, render_environment

_LOOK_SECONDS = 1.0
"""Interval of checks of a process that does not answer."""


class _StoppedError(TemplateLimitError):
    """The process was stopped by a signal."""


class ProcessRenderer:
    """Owns the process, which is started when needed, and again after it was killed. Thread-safe.

    Raises SettingError if a template cannot be compiled within the limits.
    """

    def __init__(self, sources: Mapping[str, str], limits: RenderLimits | None = None) -> None:
        self._sources = dict(sources)
        self._limits = limits or RenderLimits()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        with self._lock:
            self._start()

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Return the text. Raises InvalidRequestError with the template's own message, or TemplateLimitError."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                answer = self._ask({"name": name, "variables": variables})
            except _StoppedError:  # by another program: the conversation is not at fault
                self._start()
                answer = self._ask({"name": name, "variables": variables})
        if TEXT in answer:
            return str(answer[TEXT])
        if REFUSAL in answer:
            raise TemplateRefusalError(answer[REFUSAL], param="messages")
        raise self._limit_error()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        self._stop()
        process = subprocess.Popen(
            child_command("text.templates.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            process_group=0,
            env=render_environment(),
        )
        if process.stdin is not None:
            # A process that is stopped reads nothing: a write must not wait for it.
            os.set_blocking(process.stdin.fileno(), False)
        self._process = process
        self._finalizer = weakref.finalize(self, _end, process)
        limits = self._limits
        try:
            answer = self._ask(
                {
                    "sources": self._sources,
                    "cpu_seconds": limits.cpu_seconds,
                    "max_memory_bytes": limits.max_memory_bytes,
                    "max_output_characters": limits.max_output_characters,
                }
            )
        except TemplateLimitError as error:
            raise SettingError(
                f"the chat template cannot be compiled within {self._shown()}", param="model"
            ) from error
        if TEXT not in answer:
            self._stop()
            raise SettingError(
                answer.get(INVALID) or f"the chat template takes more than {self._shown()}", param="model"
            )

    def _stop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._process = self._finalizer = None

    def _ask(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Send a frame and return the answer. Raises TemplateLimitError if the process ended, or had to be killed.

        Raises _StoppedError if it was stopped by a signal; it could never answer, and is killed.
        """
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise InternalError("the process that renders chat templates is not running")
        data = encode_frame(frame)
        deadline = time.monotonic() + self._limits.wall_seconds
        with contextlib.suppress(BrokenPipeError):
            is_written = _write(process, HEADER.pack(len(data)) + data, deadline)
            if is_written and (header := _read(process, HEADER.size, deadline)):
                (length,) = HEADER.unpack(header)
                if answer := _read(process, length, deadline):
                    return decode_frame(answer)
        error = self._limit_error()
        if _is_stopped(process):
            error = _StoppedError(error.message)
        self._stop()
        raise error

    def _limit_error(self) -> TemplateLimitError:
        return TemplateLimitError(
            f"the model's chat template takes more than {self._shown()} for these messages", param="messages"
        )

    def _shown(self) -> str:
        limits = self._limits
        return (
            f"{limits.cpu_seconds:g} s of CPU time, {limits.max_memory_bytes >> 20} MiB of memory, or"
            f" {limits.max_output_characters} characters"
        )


def _write(process: "subprocess.Popen[bytes]", data: bytes, deadline: float) -> bool:
    """Write all data; return False if the process is stopped, or the deadline passes first."""
    sink = process.stdin
    view = memoryview(data)
    while sink is not None and view:
        if not _is_ready(process, sink, select.POLLOUT, deadline):
            return False
        view = view[sink.write(view) or 0 :]
    return True


def _read(process: "subprocess.Popen[bytes]", size: int, deadline: float) -> bytes:
    """Return exactly ``size`` bytes, or none if the output ends, the process is stopped, or the deadline passes first."""
    source = process.stdout
    pieces = bytearray()
    if source is None:
        return b""
    while len(pieces) < size:
        is_ready = _is_ready(process, source, select.POLLIN, deadline)
        piece = source.read(size - len(pieces)) if is_ready else b""
        if not piece:
            return b""
        pieces += piece
    return bytes(pieces)


def _is_ready(process: "subprocess.Popen[bytes]", pipe: IO[bytes], events: int, deadline: float) -> bool:
    """Wait for a pipe of the process; return False if the process is stopped, or the deadline passes first."""
    poll = select.poll()
    poll.register(pipe, events)
    while not poll.poll(max(0.0, min(deadline - time.monotonic(), _LOOK_SECONDS)) * 1000):
        if time.monotonic() >= deadline or _is_stopped(process):
            return False
    return True


def _is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    """Return True if a signal has stopped the process, which then waits for another signal."""
    try:
        return bool(psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
