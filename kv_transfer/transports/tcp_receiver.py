"""The ``tcp`` transport's receiver: reads lent blocks straight into their destination, one connection per peer."""

import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from contract.errors import TransferError, WorkerLostError
from kv_transfer.framing import ShortReadError, parse_address, read_frame, receive_all, write_frame
from kv_transfer.transport import Read, ReadRequest, ReadStoppedError, Source, StaleLeaseError
from kv_transfer.transports.tcp_wire import MAX_DATA_FRAME_BYTES, DataHello, DataReply, DataStatus


class TcpReceiver:
    """Owns the data connections to peers. A connection on which anything went wrong is closed, never reused."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._connections: dict[Source, socket.socket] = {}

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read piece by piece. Stopping shuts the connection down, so no byte can land afterwards."""
        read.check()
        try:
            sock, is_new = self._socket(source)
            with read.interruptible(partial(_shut_down, sock)):
                if is_new:
                    self._connect(sock, source)
                for start, piece in request.pieces(views[0].nbytes):
                    self._fetch_piece(sock, piece, views[start : start + len(piece.indices)])
            read.check()  # a stop behind the last byte has shut the connection down as well
        except (OSError, TransferError) as error:
            self._drop(source)
            if read.is_stopped:
                raise ReadStoppedError("the read was stopped") from error
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"reading from worker {source.worker_id} failed: {error}") from error

    def close(self) -> None:
        """Close every connection."""
        for source in list(self._connections):
            self._drop(source)

    def _fetch_piece(self, sock: socket.socket, piece: ReadRequest, views: Sequence[memoryview]) -> None:
        write_frame(sock, piece, MAX_DATA_FRAME_BYTES)
        _expect_ok(sock, piece)
        try:
            receive_all(sock, views)
        except ShortReadError as error:
            block = piece.indices[error.num_bytes // views[0].nbytes]
            raise TransferError(f"short read in block {block} of {_name(piece)}: {error.message}") from error
        except TimeoutError as error:
            raise TransferError(
                f"no byte for {self._timeout_seconds} s in blocks {piece.indices[0]}..{piece.indices[-1]}"
                f" of {_name(piece)}"
            ) from error
        _expect_ok(sock, piece)

    def _socket(self, source: Source) -> tuple[socket.socket, bool]:
        """(socket, False) of a connection that stands, or (socket, True) that is still to be connected."""
        sock = self._connections.get(source)
        if sock is not None:
            return sock, False
        self._prune()
        family = socket.AF_INET6 if ":" in parse_address(source.address)[0] else socket.AF_INET
        sock = self._connections[source] = socket.socket(family, socket.SOCK_STREAM)
        sock.settimeout(self._timeout_seconds)
        return sock, True

    def _connect(self, sock: socket.socket, source: Source) -> None:
        sock.connect(parse_address(source.address))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        write_frame(sock, DataHello(source.token), MAX_DATA_FRAME_BYTES)
        reply = read_frame(sock, DataReply, MAX_DATA_FRAME_BYTES)
        if reply.status is not DataStatus.OK:
            raise WorkerLostError(f"worker {source.worker_id} refused a data connection: {reply.message}")

    def _prune(self) -> None:
        """Close what peers have closed: an idle connection becomes readable by its end only."""
        poll = select.poll()  # not select.select: it takes no descriptor above 1023
        for sock in self._connections.values():
            poll.register(sock, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        for source in [source for source, sock in self._connections.items() if sock.fileno() in ended]:
            self._drop(source)

    def _drop(self, source: Source) -> None:
        sock = self._connections.pop(source, None)
        if sock is not None:
            sock.close()


def _shut_down(sock: socket.socket) -> None:
    with suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)


def _expect_ok(sock: socket.socket, piece: ReadRequest) -> None:
    where = f"blocks {piece.indices[0]}..{piece.indices[-1]} of {_name(piece)}"
    try:
        reply = read_frame(sock, DataReply, MAX_DATA_FRAME_BYTES)
    except ShortReadError as error:
        raise TransferError(f"short read before {where}: {error.message}") from error
    if reply.status is not DataStatus.OK:
        raise StaleLeaseError(f"{where} were refused as {reply.status}: {reply.message}")


def _name(piece: ReadRequest) -> str:
    return f"transfer {piece.name.transfer_id} (attempt {piece.name.attempt})"
