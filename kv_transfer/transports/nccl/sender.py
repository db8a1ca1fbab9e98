"""The ``nccl`` transport's sender: gathers lent blocks and sends them by a group of two, one group per connection.

After the handshake on the data port (``data_handshake``) the sender sends NcclPoolInfo; then both join a group of two
at its store. Per piece: ReadRequest, DataReply, the blocks side by side by the group if the reply is OK, and a second
DataReply: the lease was valid after the last byte, or the piece is STALE.
"""

import logging
from collections.abc import Sequence
from contextlib import closing

import msgspec

from contract.errors import PeerUnreachableError, TransferError
from engine.connector import KVMemory
from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataReply, DataStatus
from kv_transfer.transports.data_port import Connection, DataPort
from kv_transfer.transports.leases import LeaseBook
from kv_transfer.transports.nccl.group import SENDER, GroupPool, Meeting, PairGroup
from kv_transfer.transports.transport import TransportContext

logger = logging.getLogger(__name__)


class NcclPoolInfo(msgspec.Struct, frozen=True):
    """The sender's pool, and where the group meets.

    store: "host:port". backend: the library that moves the bytes. device: the GPU's identity; empty in host memory.
    """

    status: DataStatus
    message: str = ""
    store: str = ""
    backend: str = ""
    device: str = ""
    block_bytes: int = 0


class NcclSender:
    """Owns the data port and the leases. It waits for no reader: a reader checks after its last byte.

    pool: this worker's, None until ``start``.
    """

    def __init__(self, context: TransportContext) -> None:
        """Open the port."""
        self.pool: GroupPool | None = None
        self._context = context
        self._book = LeaseBook(context.on_idle)
        self._port = DataPort(context, "kv-nccl", self._serve, transport="nccl")
        self.address = self._port.address

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        self._memory = memory
        self.pool = GroupPool(memory)
        if self.pool.backend != "nccl":
            logger.info("transport nccl moves bytes by gloo here: the KV pool is in host memory")

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> None:
        """Append blocks to the lease."""
        self._book.extend(name, self._memory, block_ids)

    def release(self, name: LeaseName) -> None:
        """End the lease: the reader of a piece that is gathered now, or later, gets STALE."""
        self._book.revoke(name)

    def close(self) -> None:
        """End every lease and connection. Idempotent."""
        self._book.revoke_all()
        self._port.close()

    def _serve(self, connection: Connection) -> None:
        pool = self.pool
        timeout_seconds = self._context.read_timeout_seconds
        if pool is None:
            denied = NcclPoolInfo(DataStatus.DENIED, "the pool is not allocated yet")
            write_frame(connection.sock, denied, MAX_DATA_FRAME_BYTES)
            raise TransferError(denied.message)
        meeting = Meeting(self._context.host, self._context.advertise_host, timeout_seconds)
        info = NcclPoolInfo(
            DataStatus.OK,
            store=meeting.address,
            backend=pool.backend,
            device=pool.device,
            block_bytes=pool.block_bytes,
        )
        write_frame(connection.sock, info, MAX_DATA_FRAME_BYTES)
        host = self._context.advertise_host or self._context.host
        try:
            group = PairGroup(pool.backend, meeting.store, SENDER, host, timeout_seconds)
            with closing(group):
                while True:
                    request = read_frame(connection.sock, ReadRequest, MAX_DATA_FRAME_BYTES)
                    self._answer(connection, request, pool, group)
        except PeerUnreachableError as error:
            raise TransferError(error.message) from error

    def _answer(
        self, connection: Connection, request: ReadRequest, pool: GroupPool, group: PairGroup
    ) -> None:
        """Send one piece under a valid lease, and the second reply after its last byte."""
        try:
            content = pool.gather(self._book.block_ids(request), request.part)
            self._book.check(request.name)
            write_frame(connection.sock, DataReply(DataStatus.OK), MAX_DATA_FRAME_BYTES)
            group.send(content)
            self._book.check(request.name)
        except StaleLeaseError as error:
            write_frame(connection.sock, DataReply(DataStatus.STALE, error.message), MAX_DATA_FRAME_BYTES)
            return
        write_frame(connection.sock, DataReply(DataStatus.OK), MAX_DATA_FRAME_BYTES)
