"""The ``nccl`` transport: lent blocks are gathered and sent by a group of two, one group per connection.

After the handshake on the data port (``data_handshake``) the sender sends NcclPoolInfo; then both join a group of two
at its store. Per piece: ReadRequest, DataReply, the blocks side by side by the group if the reply is OK, and a second
DataReply: the lease was valid after the last byte, or the piece is STALE.

Bytes arrive in memory of the receiver's own, on its GPU if the pool is there. Its own thread copies them into blocks, and
only if the lease was valid after the last of them: a group that is stuck can never write into a block.
"""

import logging
from collections.abc import Sequence
from contextlib import closing
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType

from contract.decoding import Unsigned
from contract.errors import TransferError
from engine.connector import KVMemory
from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.protocol.reads import Read, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.block_views import block_span, check_group, check_sizes
from kv_transfer.transports.connection_cache import DataPortConnection, PeerReceiver
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataReply, DataStatus
from kv_transfer.transports.data_port import Connection, DataPort
from kv_transfer.transports.leases import LeaseBook, LendingSender
from kv_transfer.transports.nccl.group import RECEIVER, SENDER, GroupPool, PairGroup, join, meet
from kv_transfer.transports.transport import TransportContext, TransportSettings

logger = logging.getLogger(__name__)


class NcclPoolInfo(msgspec.Struct, frozen=True):
    """The sender's pool, and where the group meets.

    store: "host:port". backend: the library that moves the bytes. device: the GPU's identity; empty in host memory.
    others: bytes of a block of each further group of layers; not sent if there are none.
    """

    status: DataStatus
    message: str = ""
    store: str = ""
    backend: str = ""
    device: str = ""
    block_bytes: Unsigned = 0
    others: tuple[Unsigned, ...] | UnsetType = UNSET


class NcclSender(LendingSender):
    """Owns the data port and the leases. It waits for no reader. pool: this worker's, None until ``start``."""

    def __init__(self, context: TransportContext) -> None:
        """Open the port."""
        super().__init__(LeaseBook(context.on_idle))
        self.pool: GroupPool | None = None
        self._settings = context.settings
        self._port = DataPort(context, "kv-nccl", self._serve, transport="nccl")
        self.address = self._port.address

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        super().start(memory)
        self.pool = GroupPool(memory)
        if self.pool.backend != "nccl":
            logger.info("transport nccl moves bytes by gloo here: the KV pool is in host memory")

    def close(self) -> None:
        """End every lease and connection. Idempotent."""
        self.leases.revoke_all()
        self._port.close()

    def _serve(self, connection: Connection) -> None:
        pool = self.pool
        if pool is None:
            denied = NcclPoolInfo(DataStatus.DENIED, "the pool is not allocated yet")
            write_frame(connection.sock, denied, MAX_DATA_FRAME_BYTES)
            raise TransferError(denied.message)
        address, store = meet(self._settings)
        info = NcclPoolInfo(
            DataStatus.OK,
            store=address,
            backend=pool.backend,
            device=pool.device,
            block_bytes=pool.block_bytes,
            others=pool.others or UNSET,
        )
        write_frame(connection.sock, info, MAX_DATA_FRAME_BYTES)
        with closing(PairGroup(pool.backend, store, SENDER, self._settings, pool.place)) as group:
            while True:
                request = read_frame(connection.sock, ReadRequest, MAX_DATA_FRAME_BYTES)
                self._answer(connection, request, pool, group)

    def _answer(
        self, connection: Connection, request: ReadRequest, pool: GroupPool, group: PairGroup
    ) -> None:
        """Send one piece under a valid lease, and the second reply after its last byte."""
        try:
            region, block_ids = self.leases.block_ids(request)
            content = pool.gather(block_ids, request.part, region)
            # No reader holds the lease: it may have ended, and its blocks been used again, while they were gathered.
            self.leases.check(request.name)
            write_frame(connection.sock, DataReply(DataStatus.OK), MAX_DATA_FRAME_BYTES)
            group.send(content)
            self.leases.check(request.name)
        except StaleLeaseError as error:
            write_frame(connection.sock, DataReply(DataStatus.STALE, error.message), MAX_DATA_FRAME_BYTES)
            return
        write_frame(connection.sock, DataReply(DataStatus.OK), MAX_DATA_FRAME_BYTES)


class _Peer(DataPortConnection):
    """The connection to a sender's data port, and the group."""

    def __init__(self, source: Source, sender: NcclSender, settings: TransportSettings) -> None:
        super().__init__(source, settings.read_timeout_seconds)
        self._sender = sender
        self._settings = settings
        self._group: PairGroup | None = None
        self._block_bytes: tuple[int, ...] = ()

    def close(self) -> None:
        """End the connection and the group."""
        super().close()
        if self._group is not None:
            self._group.close()

    def connect(self, read: Read) -> tuple[GroupPool, PairGroup]:
        """Return this worker's pool and the group. At the first call, authenticate and join it. Raises KvbatonError."""
        pool = self._sender.pool
        if pool is None:
            raise TransferError("the pool is not allocated yet")
        group = self._group
        if group is None:
            with read.interruptible(self.interrupt):
                self._dial()
                info = read_frame(self._sock, NcclPoolInfo, MAX_DATA_FRAME_BYTES)
                check_info(info, pool, self._who)
                self._block_bytes = (info.block_bytes, *(() if info.others is UNSET else info.others))
                store = join(info.store, self._settings)
                group = PairGroup(pool.backend, store, RECEIVER, self._settings, pool.place)
                self._group = group
            read.check()
        return pool, group

    def fetch(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read piece by piece. No byte of a stale one reaches the views.

        A stop ends the current one; that can take the group's timeout, if the peer is silent.
        """
        pool, group = self.connect(read)
        check_group(request.group, len(self._block_bytes), self._who)
        first, last = block_span(self._block_bytes[request.group], request.part)
        size = last - first
        check_sizes(views, size, self._who)
        with read.interruptible(self.interrupt):
            for start, piece in request.pieces(size):
                write_frame(self._sock, piece, MAX_DATA_FRAME_BYTES)
                self._expect_ok()
                content = group.receive(piece.num_blocks * size)
                self._expect_ok()
                pool.scatter(content, views[start : start + piece.num_blocks])
        read.check()  # a stop after the last byte has shut the connection down as well

    def _expect_ok(self) -> None:
        reply = read_frame(self._sock, DataReply, MAX_DATA_FRAME_BYTES)
        if reply.status is not DataStatus.OK:
            raise StaleLeaseError(f"{self._who} refused a read as {reply.status}: {reply.message}")


class NcclReceiver(PeerReceiver):
    """Owns the connections to peers. A connection is closed after any error but a stale lease."""

    def __init__(self, sender: NcclSender, settings: TransportSettings) -> None:
        super().__init__(partial(_Peer, sender=sender, settings=settings))


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
