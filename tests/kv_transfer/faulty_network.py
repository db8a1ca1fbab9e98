"""A TCP relay in a thread between two workers: it passes bytes on, cuts, rejects, or swallows everything."""

import selectors
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum

_NO_LINGER = struct.pack("ii", 1, 0)
_CHUNK_BYTES = 65536


class Way(Enum):
    """The relay's treatment of bytes. SWALLOW_BACK: only the dialed side's answers are lost."""

    PASS = "pass"
    SWALLOW = "swallow"
    SWALLOW_BACK = "swallow back"
    REJECT = "reject"


class TcpRelay:
    """Owns a port that leads to ``target``. ``way`` holds for every connection, from the next bytes on."""

    def __init__(self, target: str, host: str = "127.0.0.1", port: int = 0) -> None:
        name, _, number = target.rpartition(":")
        self._target = (name, int(number))
        self.way = Way.PASS
        self.num_accepted = 0
        self._listener = socket.create_server((host, port))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._wake_in, self._wake_out = socket.socketpair()
        self._pairs: dict[socket.socket, tuple[socket.socket, bool]] = {}
        self._is_closing = self._is_cutting = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        """Break every open connection by RST, and reject further ones."""
        self.way = Way.REJECT
        self._is_cutting = True
        self._wake_out.send(b"\0")

    def close(self) -> None:
        """End the relay and all its connections."""
        self._is_closing = True
        self._wake_out.send(b"\0")
        self._thread.join()
        for sock in (self._wake_in, self._wake_out):  # not in the thread, which may end before it is woken
            sock.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_in, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_closing:
                for key, _ in selector.select():
                    sock = key.fileobj
                    assert isinstance(sock, socket.socket)
                    self._serve(selector, sock)
            self._break_all(selector)
        self._listener.close()

    def _serve(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        if sock is self._wake_in:
            sock.recv(1)
            if self._is_cutting:
                self._is_cutting = False
                self._break_all(selector)
        elif sock is self._listener:
            self._accept(selector)
        elif sock in self._pairs:
            self._pass_on(selector, sock)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        ours, _ = self._listener.accept()
        self.num_accepted += 1
        if self.way is Way.REJECT:
            _reset(ours)
            return
        theirs = socket.create_connection(self._target)
        self._pairs[ours], self._pairs[theirs] = (theirs, False), (ours, True)
        for sock in (ours, theirs):
            selector.register(sock, selectors.EVENT_READ)

    def _pass_on(self, selector: selectors.BaseSelector, sock: socket.socket) -> None:
        other, is_answer = self._pairs[sock]
        data = b""
        with suppress(OSError):
            data = sock.recv(_CHUNK_BYTES)
        is_lost = self.way is Way.SWALLOW or (self.way is Way.SWALLOW_BACK and is_answer)
        if is_lost and data:
            return
        if not data:
            if is_lost:  # the end is lost as well: the other side is not notified
                selector.unregister(sock)
                return
            self._break(selector, sock, other)
            return
        with suppress(OSError):
            other.sendall(data)

    def _break(self, selector: selectors.BaseSelector, *socks: socket.socket) -> None:
        for sock in socks:
            if self._pairs.pop(sock, None) is not None:
                with suppress(KeyError):
                    selector.unregister(sock)
                _reset(sock)

    def _break_all(self, selector: selectors.BaseSelector) -> None:
        self._break(selector, *list(self._pairs))


def _reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    sock.close()


@contextmanager
def relay_to(target: str, host: str = "127.0.0.1", port: int = 0) -> Iterator[TcpRelay]:
    """Run a relay within the block."""
    relay = TcpRelay(target, host, port)
    try:
        yield relay
    finally:
        relay.close()


@contextmanager
def no_answer_to_syn() -> Iterator[str]:
    """Yield an address whose packets are dropped: a listener whose queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        host, port = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex((host, port))
        try:
            yield f"{host}:{port}"
        finally:
            for filler in fillers:
                filler.close()


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port without a listener."""
    with socket.create_server((host, 0)) as sock:
        port: int = sock.getsockname()[1]
        return port
