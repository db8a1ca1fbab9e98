"""The ``nccl`` transport's receiver: asks for pieces, receives them by a group of two, and copies them into its blocks.

Bytes arrive in memory of the receiver's own. Its own thread copies them into blocks, and only if the lease was valid after
the last of them: a group that is stuck can never write into a block.
"""

from collections.abc import Sequence

from contract.errors import TransferError
from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.protocol.reads import Read, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.block_views import block_span
from kv_transfer.transports.connection_cache import ConnectionCache, dial, unconnected
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataReply, DataStatus
from kv_transfer.transports.data_port import shut_down
from kv_transfer.transports.nccl.group import RECEIVER, GroupPool, PairGroup, join
from kv_transfer.transports.nccl.sender import NcclPoolInfo, NcclSender


class _Peer:
    """The connection to a sender's data port, and the group."""

    def __init__(self, source: Source, host: str, timeout_seconds: float) -> None:
        self._source = source
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._who = f"worker {source.worker_id}"
        self._group: PairGroup | None = None
        self._block_bytes = 0
        self._sock = unconnected(source, timeout_seconds)

    def interrupt(self) -> None:
        """End a wait for the peer's messages, which ends the group too."""
        shut_down(self._sock)

    def close(self) -> None:
        """End the connection and the group."""
        self._sock.close()
        if self._group is not None:
            self._group.close()

    def connect(self, pool: GroupPool) -> PairGroup:
        """Return the group. At the first call, dial and join it. Raises KvbatonError."""
        if self._group is not None:
            return self._group
        dial(self._sock, self._source)
        info = read_frame(self._sock, NcclPoolInfo, MAX_DATA_FRAME_BYTES)
        check_info(info, pool, self._who)
        self._block_bytes = info.block_bytes
        store = join(info.store, self._timeout_seconds)
        self._group = PairGroup(pool.backend, store, RECEIVER, self._host, self._timeout_seconds)
        return self._group

    def fetch_piece(
        self, pool: GroupPool, group: PairGroup, piece: ReadRequest, views: Sequence[memoryview]
    ) -> None:
        """Read one piece. No byte of a stale one reaches the views."""
        size = views[0].nbytes
        (start, end) = block_span(self._block_bytes, piece.part)
        if size != end - start:
            raise TransferError(f"a block of {self._who} has {end - start} bytes, not {size}")
        write_frame(self._sock, piece, MAX_DATA_FRAME_BYTES)
        self._expect_ok(piece)
        content = pool.empty(piece.num_blocks * size)
        group.receive(content)
        self._expect_ok(piece)
        pool.scatter(content, views)

    def _expect_ok(self, piece: ReadRequest) -> None:
        reply = read_frame(self._sock, DataReply, MAX_DATA_FRAME_BYTES)
        if reply.status is not DataStatus.OK:
            raise StaleLeaseError(f"{self._who} refused a read as {reply.status}: {reply.message}")


class NcclReceiver:
    """Owns the connections to peers. A connection is closed after any error but a stale lease."""

    def __init__(self, sender: NcclSender, host: str, timeout_seconds: float) -> None:
        self._sender = sender
        self._host = host
        self._timeout_seconds = timeout_seconds
        self._peers = ConnectionCache(self._new_peer, harmless=StaleLeaseError)

    def probe(self, source: Source, read: Read) -> None:
        """Connect, authenticate and join. Raises what ``fetch`` would."""
        with self._peers.using(source, read) as peer:
            with read.interruptible(peer.interrupt):
                peer.connect(self._pool())
            read.check()

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read piece by piece. A stop ends the current one; that can take the group's timeout, if the peer is silent."""
        pool = self._pool()
        with self._peers.using(source, read) as peer:
            with read.interruptible(peer.interrupt):
                group = peer.connect(pool)
                for start, piece in request.pieces(views[0].nbytes):
                    peer.fetch_piece(pool, group, piece, views[start : start + piece.num_blocks])
            read.check()  # a stop after the last byte has shut the connection down as well

    def forget(self, source: Source) -> None:
        """End its connection and group."""
        self._peers.forget(source)

    def close(self) -> None:
        """End every connection and group."""
        self._peers.close()

    def _pool(self) -> GroupPool:
        if self._sender.pool is None:
            raise TransferError("the pool is not allocated yet")
        return self._sender.pool

    def _new_peer(self, source: Source) -> _Peer:
        return _Peer(source, self._host, self._timeout_seconds)


def check_info(info: NcclPoolInfo, pool: GroupPool, who: str) -> None:
    """Raise TransferError if no group can connect the two pools."""
    if info.status is not DataStatus.OK:
        raise TransferError(f"{who} lends nothing over nccl: {info.message}")
    if info.backend != pool.backend:
        raise TransferError(f"{who} moves bytes by {info.backend}, this worker by {pool.backend}")
    if info.device and info.device == pool.device:
        raise TransferError(
            f"{who} is on the same GPU ({pool.device}), and NCCL takes no two ranks there; choose nixl or shm"
        )
