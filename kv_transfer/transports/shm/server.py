"""The ``shm`` transport's socket: one thread that lets readers in, and never waits for any of them."""

import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from contract.errors import KvbatonError, TransferError, UnauthenticatedError
from kv_transfer.links.framing import FrameBuffer, decode_body, encode_frame
from kv_transfer.links.listening import max_unauthenticated
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.data_greeting import UNKNOWN, Lending
from kv_transfer.transports.data_wire import DataChallenge, DataHello, DataProve, DataStatus
from kv_transfer.transports.shm.folder import listen_at
from kv_transfer.transports.shm.wire import MAX_SHM_FRAME_BYTES, ShmWelcome

logger = logging.getLogger(__name__)
_MAX_UNAUTHENTICATED = 64
_PAUSE_SECONDS = 1.0
_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
Welcome = Callable[[], tuple[ShmWelcome, list[int]]]
"""What a reader with a live session is told, and the descriptors that go with it; must not block."""


class _Reader:
    """One connection. ``token`` is empty until the reader has shown one."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.frames = FrameBuffer(MAX_SHM_FRAME_BYTES)
        self.token = ""
        self.lending: Lending | None = None
        self.since = time.monotonic()


class ShmServer:
    """Owns the socket file, the thread and every reader's connection, which is closed when its session is over."""

    def __init__(self, path: Path, context: TransportContext, welcome: Welcome) -> None:
        """An unauthenticated reader has ``read_timeout_seconds`` to prove its session."""
        self._path = path
        self._sessions = context.sessions
        self._welcome = welcome
        self._patience_seconds = context.read_timeout_seconds
        self._on_failed = context.on_thread_failed
        self._readers: dict[_Reader, None] = {}
        self._is_closed = False
        self._max_unauthenticated = max_unauthenticated(_MAX_UNAUTHENTICATED)
        self._resume_at: float | None = None
        self._listener = listen_at(path)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        context.sessions.listen(self._session_ended)
        self._thread = threading.Thread(target=self._run, name="kv-shm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, every connection and the file. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._wake()
        self._thread.join()
        for sock in (self._listener, self._wake_in, self._wake_out):
            sock.close()
        self._selector.close()
        self._path.unlink(missing_ok=True)

    def _session_ended(self, _token: str) -> None:
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # a full pipe wakes too; a closed one has nobody to wake
            self._wake_out.send(b"\0")

    def _run(self) -> None:
        self._selector.register(self._wake_in, selectors.EVENT_READ, self._drain_wakes)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        try:
            while not self._is_closed:
                for key, _ in self._selector.select(self._seconds_to_wait()):
                    key.data()
                self._drop_ended(time.monotonic())
        except Exception as error:  # the boundary of the thread: readers see their connections close
            logger.exception("the shm server has failed")
            self._on_failed(self._thread.name, error)
        finally:
            for reader in list(self._readers):
                self._drop(reader)

    def _drain_wakes(self) -> None:
        with suppress(BlockingIOError):
            while self._wake_in.recv(4096):
                pass

    def _seconds_to_wait(self) -> float | None:
        """Until an unauthenticated reader has had its time, or accepting goes on."""
        ends = [reader.since + self._patience_seconds for reader in self._readers if not reader.token]
        if self._resume_at is not None:
            ends.append(self._resume_at)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _accept(self) -> None:
        try:
            sock = self._listener.accept()[0]
        except OSError as error:
            if error.errno in _NO_RESOURCES:
                logger.warning("shm: no reader is accepted for %s s: %s", _PAUSE_SECONDS, error)
                self._selector.unregister(self._listener)
                self._resume_at = time.monotonic() + _PAUSE_SECONDS
            return
        sock.setblocking(False)
        reader = _Reader(sock)
        self._readers[reader] = None
        self._selector.register(sock, selectors.EVENT_READ, partial(self._serve, reader))

    def _drop_ended(self, now: float) -> None:
        """End readers whose session is over, unauthenticated ones that are late or too many; accept again when due."""
        unauthenticated = [reader for reader in self._readers if not reader.token]
        num_surplus = max(0, len(unauthenticated) - self._max_unauthenticated)
        for position, reader in enumerate(unauthenticated):
            if position < num_surplus or now - reader.since >= self._patience_seconds:
                self._drop(reader)
        for reader in [reader for reader in self._readers if reader.token]:
            if reader.token not in self._sessions:
                self._drop(reader)
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def _serve(self, reader: _Reader) -> None:
        if reader not in self._readers:
            return
        try:
            data = reader.sock.recv(MAX_SHM_FRAME_BYTES)
            if not data:
                self._drop(reader)
                return
            for frame in reader.frames.feed(data):
                self._answer(reader, frame)
        except BlockingIOError as error:
            logger.debug("a reader takes no answers: %s", error)
            self._drop(reader)
        except (OSError, KvbatonError) as error:
            logger.debug("a reader's connection ended: %s", error)
            self._drop(reader)
        except Exception:  # the boundary of one connection: the other readers go on
            logger.exception("serving a reader of shm failed")
            self._drop(reader)

    def _answer(self, reader: _Reader, frame: bytes) -> None:
        if reader.token:
            raise TransferError("a reader that was let in has nothing more to say")
        if reader.lending is None:
            reader.lending = Lending(self._sessions, "shm")
            challenge = reader.lending.challenge(decode_body(frame, DataHello))
            self._say(reader, challenge, [])
            if challenge.status is not DataStatus.OK:
                raise UnauthenticatedError(challenge.message)
            return
        token = reader.lending.check(decode_body(frame, DataProve))
        if token not in self._sessions:
            raise UnauthenticatedError(UNKNOWN)
        welcome, descriptors = self._welcome()
        self._say(reader, welcome, descriptors)
        reader.token = token

    def _say(self, reader: _Reader, message: ShmWelcome | DataChallenge, descriptors: list[int]) -> None:
        data = encode_frame(message, MAX_SHM_FRAME_BYTES)
        send: Callable[[], int] = partial(reader.sock.send, data)
        if descriptors:
            send = partial(socket.send_fds, reader.sock, [data], descriptors)
        if send() != len(data):
            raise TransferError("a reader takes no answers")

    def _drop(self, reader: _Reader) -> None:
        del self._readers[reader]
        self._selector.unregister(reader.sock)
        reader.sock.close()
