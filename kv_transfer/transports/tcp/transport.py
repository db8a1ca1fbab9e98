"""The ``tcp`` transport: peers read lent blocks over a data port, straight into their destination.

Per read the receiver sends ReadRequest. For each of its pieces (``ReadRequest.pieces``, which both sides cut alike)
the sender sends an answer, the blocks in order if it is OK, and a second answer: the lease was valid after the last
byte. After an answer that is STALE the sender closes the connection. Closing the connection makes a read terminal on
the receiver's side.

An answer is a DataReply without a message, in a frame of ALIGNMENT bytes. So a receiver takes answers and blocks by
one call, and blocks lie in the stream as in memory: the kernel copies them a tenth faster than at odd offsets
(x86-64).

Requests may be sent ahead of their reads. A group of short reads takes longer by the turns of the two ends than by its
bytes: each request waits until threads of both workers, and the network between them, have had their turn. The sender
answers the requests of a connection in order, so the receiver sends those that it will read next together with the first
one. On an idle connection they are sent before the thread that reads has been woken. Their blocks lie in the sockets'
buffers until the read that has the memory for them receives them. If that read does not come, or another one comes before
it, the connection is replaced.
"""

import mmap
import select
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from contract.errors import InternalError, PeerUnreachableError, TransferError
from engine.connector import KVMemory
from kv_transfer.links.framing import FrameBuffer, ShortReadError, decode_body, encode_frame, receive_all
from kv_transfer.protocol.reads import (
    PROBE_LEASE,
    PeerSilentError,
    Read,
    ReadRequest,
    Source,
    StaleLeaseError,
    num_probe_blocks,
)
from kv_transfer.transports.connection_cache import DataPortConnection, PeerConnection, PeerReceiver, rate_of
from kv_transfer.transports.data_handshake import (
    ALIGNMENT,
    MAX_DATA_FRAME_BYTES,
    DataReply,
    DataStatus,
    reply_frame,
)
from kv_transfer.transports.data_port import Connection, DataPort, limit_waits, shutdown
from kv_transfer.transports.leases import LeaseBook, LendingSender
from kv_transfer.transports.tcp.socket_blocks import SocketBlocks, socket_blocks
from kv_transfer.transports.transport import ReceiverTraits, TransportContext

OK_FRAME = reply_frame(DataStatus.OK)
STALE_FRAME = reply_frame(DataStatus.STALE)
"""The answers among blocks: ALIGNMENT bytes each."""
# Of requests that the sender may not have read yet. It reads none while it sends blocks, so these must fit into the
# buffers of the sockets: else both ends would wait for each other.
MAX_ASKED_BYTES = 8192


class Asked:
    """The requests that were sent on a connection and whose blocks were not received yet, in order. Not thread-safe."""

    def __init__(self) -> None:
        self._sent: deque[tuple[ReadRequest, int]] = deque()
        """Requests, and the bytes of their frames."""

    @property
    def is_empty(self) -> bool:
        """True if no other blocks are on their way."""
        return not self._sent

    def is_first(self, request: ReadRequest | None) -> bool:
        """Return True if the blocks of this request are the next ones on the connection."""
        return request is not None and bool(self._sent) and self._sent[0][0] == _as_sent(request)

    def frames_for(self, request: ReadRequest, following: Sequence[ReadRequest]) -> bytes:
        """Return what is to be sent before the blocks of ``request`` are received; ``following``: see ReceiverTraits.

        Raises InternalError if other blocks come before them.
        """
        if not (self.is_empty or self.is_first(request)):
            raise InternalError(f"blocks of another read come before those of {request.name}")
        frames = self.add([request, *following])
        self._sent.popleft()
        return frames

    def add(self, requests: Sequence[ReadRequest]) -> bytes:
        """Return what is to be sent to ask for these requests, the source's next ones, as far as they were not sent.

        Nothing if others were sent before them.
        """
        wanted = [_as_sent(each) for each in requests]
        frames = bytearray()
        if [sent for sent, _ in self._sent] == wanted[: len(self._sent)]:
            for each in wanted[len(self._sent) :]:
                frame = encode_frame(each, MAX_DATA_FRAME_BYTES)
                num_bytes = sum(num_bytes for _, num_bytes in self._sent)
                if num_bytes and num_bytes + len(frame) > MAX_ASKED_BYTES:
                    break
                self._sent.append((each, len(frame)))
                frames += frame
        return bytes(frames)


def _as_sent(request: ReadRequest) -> ReadRequest:
    """Return the request without the grants, which the sender does not need."""
    first = request.first_block
    return ReadRequest(request.name, first, request.num_blocks, part=request.part, group=request.group)


class TcpSender(LendingSender):
    """Owns the data port and the leases that are read over it."""

    def __init__(self, context: TransportContext) -> None:
        """Open the port."""
        super().__init__(LeaseBook(context.on_idle))
        self._port = DataPort(context, "kv-data", self._serve, transport="tcp")
        self.address = self._port.address

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool, and its null block to probes."""
        super().start(memory)
        self.leases.extend(PROBE_LEASE, [0] * num_probe_blocks(memory.layout.block_bytes))

    def close(self) -> None:
        """Shut every connection down and join every thread."""
        self._port.close()

    def _serve(self, connection: Connection) -> None:
        for request in requests_from(connection.sock):
            self._answer(connection, request)

    def _answer(self, connection: Connection, request: ReadRequest) -> None:
        """Answer a request. Raises StaleLeaseError after a STALE answer, which ends the connection.

        The end of the lease shuts the connection down, but not after the last block: the peer may release the lease as soon
        as it has the last answer, and use the connection again.
        """
        answers = OK_FRAME
        try:
            with self.leases.reading(request, partial(shutdown, connection.sock)) as views:
                blocks = socket_blocks(views)
                for start, piece in request.pieces(blocks.view_bytes):
                    self.leases.check(request.name)
                    blocks.send(connection.sock, answers, start, start + piece.num_blocks)
                    answers = 2 * OK_FRAME  # the second one of this piece, and the first one of the next
            answers = OK_FRAME
            self.leases.check(request.name)
            connection.sock.sendall(answers)
        except StaleLeaseError:
            connection.sock.sendall(STALE_FRAME * (len(answers) // len(OK_FRAME)))
            raise


def requests_from(sock: socket.socket) -> Iterator[ReadRequest]:
    """Yield the requests of a connection, which carries nothing else. Raises ShortReadError at its end, TransferError."""
    frames = FrameBuffer(MAX_DATA_FRAME_BYTES)
    while data := sock.recv(MAX_DATA_FRAME_BYTES):
        for body in frames.feed(data):
            yield decode_body(body, ReadRequest)
    raise ShortReadError(0, 1)


# A read that is followed reports its progress after so many bytes, which are still in a cache then.
_REPORT_BYTES = 2**20


class _Connection(DataPortConnection):
    def __init__(self, source: Source, timeout_seconds: float) -> None:
        super().__init__(source, timeout_seconds)
        self._is_connected = False
        self._requests = Asked()
        self._poll = select.poll()  # not select.select: it takes no descriptor above 1023
        self._poll.register(self._sock, select.POLLIN)

    def must_be_replaced(self, request: ReadRequest | None) -> bool:
        """Test if other blocks are on their way, or if the peer has closed it: an idle one becomes readable by its end."""
        if self._requests.is_empty:
            return bool(self._poll.poll(0))
        return not self._requests.is_first(request)

    def connect(self, read: Read) -> None:
        """Connect and prove the session, once. Raises PeerUnreachableError when it is refused."""
        if not self._is_connected:
            self._dial()
            limit_waits(self._sock, self._timeout_seconds, self._timeout_seconds)
            self._is_connected = True

    def probe(self, read: Read) -> float | None:
        """Read the null block into host memory. Raises StaleLeaseError if the peer does not lend it."""
        size = self._source.block_bytes
        if not size:
            return super().probe(read)
        count = num_probe_blocks(size)
        content = memoryview(mmap.mmap(-1, count * size))
        views = [content[start : start + size] for start in range(0, count * size, size)]
        request = ReadRequest(PROBE_LEASE, 0, count)
        return rate_of(lambda: self.fetch(request, views, read), count * size)

    def ask(self, requests: Sequence[ReadRequest]) -> bool:
        """Send requests without waiting. Returns False if only a part of them could be sent: then nothing else may be."""
        if not self._is_connected or (self._requests.is_empty and self._poll.poll(0)):
            return True
        frames = self._requests.add(requests)
        try:
            return not frames or self._sock.send(frames, socket.MSG_DONTWAIT) == len(frames)
        except OSError:
            return False

    def fetch(
        self,
        request: ReadRequest,
        views: Sequence[memoryview],
        read: Read,
        following: Sequence[ReadRequest] = (),
    ) -> None:
        """Send a request, and those that follow, and receive its pieces.

        Stopping shuts the connection down: no byte can land afterwards.
        """
        try:
            with read.interruptible(self.interrupt):
                self.connect(read)
                if frames := self._requests.frames_for(request, following):
                    self._sock.sendall(frames)
                self._receive_all(request, views, read)
        except BlockingIOError as error:  # the kernel's word for a wait that was too long (``limit_waits``)
            raise TimeoutError("timed out") from error
        read.check()  # a stop after the last byte has shut the connection down as well

    def _receive_all(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        blocks = socket_blocks(views)
        answers = bytearray(ALIGNMENT)  # the first one of the first piece
        for start, piece in request.pieces(blocks.view_bytes):
            read.check()
            self._receive(piece, answers, blocks, start, read)
            answers = bytearray(2 * ALIGNMENT)  # the second one of this piece, and the first one of the next
        answer = bytearray(ALIGNMENT)
        try:
            receive_all(self._sock, [memoryview(answer)], socket.MSG_WAITALL)
        except ShortReadError as error:
            raise PeerUnreachableError(f"short read after {_blocks(piece)}: {error.message}") from error
        _expect_ok(answer, piece)

    def _receive(
        self, piece: ReadRequest, answers: bytearray, blocks: SocketBlocks, start: int, read: Read
    ) -> None:
        """Receive answers and a piece, into the blocks from ``start`` on, and report it while its bytes are in the cache."""
        end = start + piece.num_blocks
        at = start
        left_out = len(answers)
        step = max(1, _REPORT_BYTES // blocks.view_bytes) if read.is_followed else piece.num_blocks
        try:
            for at in range(start, end, step):
                last = min(at + step, end)
                blocks.receive(self._sock, answers if at == start else bytearray(), at, last)
                if at == start:
                    _expect_ok(answers, piece)
                    left_out = 0
                read.report_landed(last)
        except ShortReadError as error:
            if left_out:
                _expect_ok(answers[: error.num_bytes], piece)
            block = piece.first_block + at - start + max(0, error.num_bytes - left_out) // blocks.view_bytes
            raise PeerUnreachableError(
                f"short read in block {block} of {piece.name}: {error.message}"
            ) from error
        except BlockingIOError as error:
            raise PeerSilentError(f"no byte for {self._timeout_seconds} s in {_blocks(piece)}") from error


def _expect_ok(answers: bytearray, piece: ReadRequest) -> None:
    """Check the answers that are whole. Raises StaleLeaseError, or TransferError for a malformed one."""
    whole = answers[: len(answers) // ALIGNMENT * ALIGNMENT]
    if whole == OK_FRAME * (len(whole) // ALIGNMENT):
        return
    for body in FrameBuffer(ALIGNMENT).feed(whole):
        reply = decode_body(body, DataReply)
        if reply.status is not DataStatus.OK:
            raise StaleLeaseError(f"{_blocks(piece)} were refused as {reply.status}")
    raise TransferError(f"the peer sent a malformed answer about {_blocks(piece)}")


class TcpReceiver(PeerReceiver):
    """Owns the data connections to peers. A connection on which anything went wrong is closed, never reused."""

    def __init__(self, timeout_seconds: float) -> None:
        super().__init__(partial(_Connection, timeout_seconds=timeout_seconds), keeps_stale=False)
        self.traits = ReceiverTraits(fetch_first=self.fetch_first, ask=self.ask)

    def ask(self, source: Source, requests: Sequence[ReadRequest]) -> None:
        """See ReceiverTraits."""
        connection = self._reserve_unused(source)
        if isinstance(connection, _Connection):
            self._put_back(source, connection, is_good=connection.ask(requests))

    def fetch_first(
        self,
        source: Source,
        request: ReadRequest,
        views: Sequence[memoryview],
        read: Read,
        following: Sequence[ReadRequest],
    ) -> None:
        """See ReceiverTraits."""

        def work(connection: PeerConnection) -> None:
            assert isinstance(connection, _Connection), "this receiver makes no others"
            connection.fetch(request, views, read, following)

        self._use(source, read, work, request)


def _blocks(piece: ReadRequest) -> str:
    return f"blocks {piece.first_block}..{piece.end_block - 1} of {piece.name}"
