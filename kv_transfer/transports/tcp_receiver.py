"""The ``tcp`` transport's receiver: reads lent blocks straight into their destination, one connection per peer."""

import select
import socket
from collections.abc import Sequence
from contextlib import suppress

from contract.errors import TransferError
from kv_transfer.framing import ShortReadError
from kv_transfer.transport import Read, ReadRequest, ReadStoppedError, Source, StaleLeaseError
from kv_transfer.transports.block_vectors import SocketBlocks, socket_blocks
from kv_transfer.transports.data_port import dial, unconnected
from kv_transfer.transports.kept import Kept
from kv_transfer.transports.tcp_stream import DataStream
from kv_transfer.transports.tcp_wire import OK, OK_FRAME, DataStatus

_TOLD_BYTES = 2**20


class _Connection:
    """A data connection that may still have to be made."""

    def __init__(self, source: Source, timeout_seconds: float) -> None:
        self.source, self.timeout_seconds = source, timeout_seconds
        self.is_connected = False
        self.sock = unconnected(source, timeout_seconds)
        self._poll = select.poll()  # not select.select: it takes no descriptor above 1023
        self._poll.register(self.sock, select.POLLIN)
        self._stream = DataStream(self.sock)

    def has_ended(self) -> bool:
        """The peer has closed it: an idle connection becomes readable by its end only."""
        return bool(self._poll.poll(0))

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
        """Ask once, and take what comes piece by piece."""
        pieces = list(request.pieces(views[0].nbytes))
        self._stream.say(
            ReadRequest(request.name, request.first_block, request.num_blocks, part=request.part)
        )
        blocks = socket_blocks(views)
        self._expect_ok([pieces[0][1]])
        for number, (start, piece) in enumerate(pieces):
            read.check()
            self._receive(piece, blocks, start, views[0].nbytes, read)
            # Whether the lease was valid behind the last byte, and whether the next piece comes.
            self._expect_ok([piece, *(later for _, later in pieces[number + 1 : number + 2])])

    def _receive(
        self, piece: ReadRequest, blocks: SocketBlocks, start: int, view_bytes: int, read: Read
    ) -> None:
        """The bytes of the next piece, into the blocks from ``start`` on; told while they are in the processor's cache."""
        end, step, first = start + piece.num_blocks, max(1, _TOLD_BYTES // view_bytes), start
        try:
            for first in range(start, end, step):
                last = min(first + step, end)
                self._stream.fill_blocks(blocks, first, last)
                read.landed(last)
        except ShortReadError as error:
            block = piece.first_block + first - start + error.num_bytes // view_bytes
            raise TransferError(f"short read in block {block} of {_name(piece)}: {error.message}") from error
        except TimeoutError as error:
            raise TransferError(
                f"no byte for {self.timeout_seconds} s in blocks {piece.first_block}..{piece.end_block - 1}"
                f" of {_name(piece)}"
            ) from error

    def _expect_ok(self, pieces: list[ReadRequest]) -> None:
        """Hear an answer about each of them; a stale one is an error that ends the connection too."""
        answers = self._stream.hear_answers(OK, OK_FRAME, len(pieces))
        for piece in pieces:
            where = f"blocks {piece.first_block}..{piece.end_block - 1} of {_name(piece)}"
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
        self._connections.forget_where(_Connection.has_ended)
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


def _name(piece: ReadRequest) -> str:
    return f"transfer {piece.name.transfer_id} (attempt {piece.name.attempt})"
