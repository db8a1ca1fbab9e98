"""The ``tcp`` transport's receiver: reads lent blocks straight into their destination, one connection per peer."""

import select
import socket
from collections.abc import Sequence
from contextlib import suppress

from contract.errors import TransferError
from kv_transfer.framing import ShortReadError
from kv_transfer.transport import BlockViews, Read, ReadRequest, ReadStoppedError, Source, StaleLeaseError
from kv_transfer.transports.data_port import dial, unconnected
from kv_transfer.transports.kept import Kept
from kv_transfer.transports.tcp_stream import DataStream
from kv_transfer.transports.tcp_wire import DataReply, DataStatus

_PIECES_AHEAD = 8
"""How many pieces of a read are asked for before the first of them has arrived; two at least."""


class _Connection:
    """A data connection that may still have to be made."""

    def __init__(self, source: Source, timeout_seconds: float) -> None:
        self.source, self.timeout_seconds = source, timeout_seconds
        self.is_connected = False
        self.sock = unconnected(source, timeout_seconds)
        self._stream = DataStream(self.sock)

    def interrupt(self) -> None:
        """Shut the socket down, so that no byte can land afterwards."""
        with suppress(OSError):  # the peer was faster
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()

    def connect(self) -> None:
        """Connect and show the session's token, once. Raises WorkerLostError when it is refused."""
        if self.is_connected:
            return
        dial(self.sock, self.source)
        self._stream.wait_at_most(self.timeout_seconds, self.timeout_seconds)
        self.is_connected = True

    def fetch(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read piece by piece, some of them asked for ahead, so that the sender always has one to send."""
        pieces = list(request.pieces(views[0].nbytes))
        self._stream.say_all(piece for _, piece in pieces[:_PIECES_AHEAD])
        self._expect_ok([pieces[0][1]])
        for number, (start, piece) in enumerate(pieces):
            read.check()
            end = start + len(piece.indices)
            self._receive(piece, _made(views[start:end]))
            # Whether the lease was valid behind the last byte, and whether the next piece comes.
            self._expect_ok([piece, *(later for _, later in pieces[number + 1 : number + 2])])
            read.landed(end)
            for _, later in pieces[number + _PIECES_AHEAD : number + _PIECES_AHEAD + 1]:
                self._stream.say(later)

    def _receive(self, piece: ReadRequest, views: Sequence[memoryview]) -> None:
        """The bytes of the oldest piece that was asked for."""
        try:
            self._stream.fill(views)
        except ShortReadError as error:
            block = piece.indices[error.num_bytes // views[0].nbytes]
            raise TransferError(f"short read in block {block} of {_name(piece)}: {error.message}") from error
        except TimeoutError as error:
            raise TransferError(
                f"no byte for {self.timeout_seconds} s in blocks {piece.indices[0]}..{piece.indices[-1]}"
                f" of {_name(piece)}"
            ) from error

    def _expect_ok(self, pieces: list[ReadRequest]) -> None:
        """Hear an answer about each of them; a stale one is an error that ends the connection too."""
        answers = self._stream.hear_answers(DataReply, len(pieces))
        for piece in pieces:
            where = f"blocks {piece.indices[0]}..{piece.indices[-1]} of {_name(piece)}"
            try:
                reply = next(answers)
            except ShortReadError as error:
                raise TransferError(f"short read before {where}: {error.message}") from error
            if reply.status is not DataStatus.OK:
                raise StaleLeaseError(f"{where} were refused as {reply.status}: {reply.message}")


class TcpReceiver:
    """Owns the data connections to peers. A connection on which anything went wrong is closed, never reused."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._connections: Kept[_Connection] = Kept()

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read piece by piece. Stopping shuts the connection down, so no byte can land afterwards."""
        read.check()
        self._connections.forget_where(_ended)
        try:
            with self._connections.using(source, lambda: _Connection(source, self._timeout_seconds)) as found:
                with read.interruptible(found.interrupt):
                    found.connect()
                    found.fetch(request, views, read)
                read.check()  # a stop behind the last byte has shut the connection down as well
        except (OSError, TransferError) as error:
            if read.is_stopped:
                raise ReadStoppedError("the read was stopped") from error
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"reading from worker {source.worker_id} failed: {error}") from error

    def forget(self, source: Source) -> None:
        """Close its connection."""
        self._connections.forget(source)

    def close(self) -> None:
        """Close every connection."""
        self._connections.close()


def _ended(connections: list[_Connection]) -> list[_Connection]:
    """What peers have closed: an idle connection becomes readable by its end only."""
    poll = select.poll()  # not select.select: it takes no descriptor above 1023
    for connection in connections:
        poll.register(connection.sock, select.POLLIN)
    ended = {descriptor for descriptor, _ in poll.poll(0)}
    return [connection for connection in connections if connection.sock.fileno() in ended]


def _made(views: Sequence[memoryview]) -> list[memoryview]:
    """As late as this: while the piece is on its way."""
    return views.as_list() if isinstance(views, BlockViews) else list(views)


def _name(piece: ReadRequest) -> str:
    return f"transfer {piece.name.transfer_id} (attempt {piece.name.attempt})"
