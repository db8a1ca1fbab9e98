"""The ``tcp`` transport's receiver: reads lent blocks straight into their destination, one connection per peer."""

import select
import socket
from collections.abc import Sequence
from contextlib import suppress

from contract.errors import PeerUnreachableError, TransferError
from kv_transfer.links.framing import FrameBuffer, ShortReadError, decode_body
from kv_transfer.protocol.reads import (
    PeerSilentError,
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    StaleLeaseError,
    broken_connection,
)
from kv_transfer.transports.block_vectors import SocketBlocks, socket_blocks
from kv_transfer.transports.block_views import bytes_of_each
from kv_transfer.transports.data_port import dial, unconnected
from kv_transfer.transports.data_stream import DataStream
from kv_transfer.transports.data_wire import ALIGNMENT, OK_FRAME, DataReply, DataStatus
from kv_transfer.transports.kept import Kept

_TOLD_BYTES = 2**20


class _Connection:
    """A data connection that may still have to be made."""

    def __init__(self, source: Source, timeout_seconds: float) -> None:
        self.source = source
        self.timeout_seconds = timeout_seconds
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
        """Connect and prove the session, once. Raises PeerUnreachableError when it is refused."""
        if self.is_connected:
            return
        dial(self.sock, self.source)
        self._stream.wait_at_most(self.timeout_seconds, self.timeout_seconds)
        self.is_connected = True

    def fetch(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Ask once, and take what comes piece by piece."""
        self._stream.say(
            ReadRequest(request.name, request.first_block, request.num_blocks, part=request.part)
        )
        view_bytes = bytes_of_each(views)
        blocks = socket_blocks(views)
        pieces = list(request.pieces(view_bytes))
        answers = bytearray(ALIGNMENT)  # whether the first piece comes
        for start, piece in pieces:
            read.check()
            self._receive(piece, answers, blocks, start, view_bytes, read)
            answers = bytearray(2 * ALIGNMENT)  # the verdict about this piece, and whether the next one comes
        self._hear_verdict(piece)

    def _receive(
        self,
        piece: ReadRequest,
        answers: bytearray,
        blocks: SocketBlocks,
        start: int,
        view_bytes: int,
        read: Read,
    ) -> None:
        """Answers and the piece behind them, into the blocks from ``start`` on; told while its bytes are in the cache."""
        end = start + piece.num_blocks
        at = start
        left_out = len(answers)
        step = max(1, _TOLD_BYTES // view_bytes) if read.is_followed else piece.num_blocks
        try:
            for at in range(start, end, step):
                last = min(at + step, end)
                self._stream.fill_blocks(answers if at == start else bytearray(), blocks, at, last)
                if at == start:
                    _expect_ok(answers, piece)
                    left_out = 0
                read.landed(last)
        except ShortReadError as error:
            if left_out:
                _expect_ok(answers[: error.num_bytes], piece)
            block = piece.first_block + at - start + max(0, error.num_bytes - left_out) // view_bytes
            raise PeerUnreachableError(
                f"short read in block {block} of {_name(piece)}: {error.message}"
            ) from error
        except TimeoutError as error:
            raise PeerSilentError(f"no byte for {self.timeout_seconds} s in {_blocks(piece)}") from error

    def _hear_verdict(self, piece: ReadRequest) -> None:
        try:
            _expect_ok(self._stream.take(ALIGNMENT), piece)
        except ShortReadError as error:
            raise PeerUnreachableError(f"short read behind {_blocks(piece)}: {error.message}") from error


def _expect_ok(answers: bytearray, piece: ReadRequest) -> None:
    """Of the answers that are whole. Anything else is an error that ends the connection too."""
    whole = answers[: len(answers) // ALIGNMENT * ALIGNMENT]
    if whole == OK_FRAME * (len(whole) // ALIGNMENT):
        return
    for body in FrameBuffer(ALIGNMENT).feed(whole):
        reply = decode_body(body, DataReply)
        if reply.status is not DataStatus.OK:
            raise StaleLeaseError(f"{_blocks(piece)} were refused as {reply.status}")
    raise TransferError(f"the peer's answer about {_blocks(piece)} is none")


class TcpReceiver:
    """Owns the data connections to peers. A connection on which anything went wrong is closed, never reused."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._connections: Kept[_Connection] = Kept(has_ended=_Connection.has_ended)

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read piece by piece. Stopping shuts the connection down, so no byte can land afterwards."""
        read.check()
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
            message = f"reading from worker {source.worker_id} failed: {error}"
            raise broken_connection(error, message) from error

    def forget(self, source: Source) -> None:
        """Close its connection."""
        self._connections.forget(source)

    def close(self) -> None:
        """Close every connection."""
        self._connections.close()


def _name(piece: ReadRequest) -> str:
    return f"transfer {piece.name.transfer_id} (attempt {piece.name.attempt})"


def _blocks(piece: ReadRequest) -> str:
    return f"blocks {piece.first_block}..{piece.end_block - 1} of {_name(piece)}"
