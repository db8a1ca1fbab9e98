"""The ``nixl`` transport's sender: tells peers how to read the pool, and ends leases by counting generations up.

It moves nothing, and is asked for nothing but to drive the library on, where a reader's lane needs that.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from socket import SHUT_WR

from contract.errors import KvbatonError
from engine.connector import KVMemory
from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.transports.block_grants import encode_grant
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.data_port import Connection, DataPort
from kv_transfer.transports.data_wire import DataStatus
from kv_transfer.transports.generations import NUM_SLOTS, SLOT_BYTES, GenerationTable, SharedLeases
from kv_transfer.transports.nixl.memory import ID_TYPE, Region, region_of
from kv_transfer.transports.nixl.nixl_thread import NixlThread
from kv_transfer.transports.nixl.wire import MAX_NIXL_FRAME_BYTES, Help, NixlAsk, NixlResting, NixlWelcome
from kv_transfer.transports.settings import has_rdma_device

_UNHEARD_SECONDS = 60.0
"""A peer whose connection has ended is helped for so long: a read of its may be open, and it cannot ask any more."""


class NixlSender:
    """Owns the data port, the leases and their table; ends ``nixl_thread``, the agent that it shares with the receiver.

    why_not_offered: None when peers may read over ``nixl``; ``auto`` offers it only where ``tcp`` is not faster. welcome:
    what a reader is told.
    """

    def __init__(self, context: TransportContext, nixl_thread: NixlThread) -> None:
        """Open the port."""
        self.why_not_offered: str | None = "the pool is not allocated yet"
        self._nixl_thread = nixl_thread
        self._is_auto = context.is_auto
        self._sessions = context.sessions
        self._table = GenerationTable()
        self._leases = SharedLeases(self._table, context.on_idle)
        self.welcome = NixlWelcome(DataStatus.DENIED, self.why_not_offered)
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()
        self._is_closed = False
        self._port = DataPort(context, "kv-nixl", self._talk, transport="nixl")
        self.address = self._port.address
        context.sessions.listen(self._end_session)

    def start(self, memory: KVMemory) -> None:
        """Register the pool, for peers and for this worker's own reads; ``why_not_offered`` says the outcome."""
        table = Region(self._table.address, SLOT_BYTES, NUM_SLOTS)
        try:
            pool = region_of(memory)
            agent = self._nixl_thread.register(pool, table)
        except KvbatonError as error:
            self.why_not_offered = f"the KV pool cannot be registered: {error.message}"
            return
        self.welcome = NixlWelcome(
            DataStatus.OK,
            agent=agent,
            address=pool.address,
            block_bytes=pool.block_bytes,
            num_blocks=pool.num_blocks,
            is_device=pool.is_device,
            device_id=pool.device_id,
            table_address=table.address,
            nonce=self._table.nonce,
        )
        self.why_not_offered = _why_slower(pool) if self._is_auto else None

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> bytes | None:
        """Say where the blocks are, and how the lease's end can be seen. Raises TransferError for too many leases."""
        if self.welcome.status is not DataStatus.OK:
            return None
        return encode_grant(*self._leases.open(name), block_ids, ID_TYPE)

    def release(self, name: LeaseName) -> None:
        """End the lease: what is read of it from now on, or is being read, fails at its reader."""
        self._leases.revoke(name)

    def close(self) -> None:
        """End every lease, the port, and the agent. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._leases.revoke_all()
        self._port.close()
        self._nixl_thread.close()
        self._table.close()

    def _talk(self, connection: Connection) -> None:
        """Welcome a reader, and help it as it asks."""
        with connection.kept_open(), self._attended(connection):
            write_frame(connection.sock, self.welcome, MAX_NIXL_FRAME_BYTES)
            if self.welcome.status is not DataStatus.OK:
                return
            wanted = Help.BEGIN
            while True:
                wanted = self._help_until_next_word(connection) if wanted is Help.BEGIN else _hear(connection)
                if wanted is Help.PAUSE:
                    self._nixl_thread.settle()
                    write_frame(connection.sock, NixlResting(), MAX_NIXL_FRAME_BYTES)

    @contextmanager
    def _attended(self, connection: Connection) -> Iterator[None]:
        """Within, the end of the session ends this half of the connection only.

        The reader sees it, and may still ask for help: else a read that is open might never become terminal.
        """
        with self._lock:
            self._connections.add(connection)
        try:
            if connection.token not in self._sessions:
                self._end_session(connection.token)
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)
            self._nixl_thread.serve_on(_UNHEARD_SECONDS)

    def _end_session(self, token: str) -> None:
        with self._lock:
            for connection in self._connections:
                if connection.token == token:
                    with suppress(OSError):  # its reader was faster
                        connection.sock.shutdown(SHUT_WR)

    def _help_until_next_word(self, connection: Connection) -> Help:
        self._nixl_thread.begin_serving()
        try:
            return _hear(connection)
        finally:
            self._nixl_thread.end_serving()


def _hear(connection: Connection) -> Help:
    """The reader's next word."""
    return read_frame(connection.sock, NixlAsk, MAX_NIXL_FRAME_BYTES).help


def _why_slower(pool: Region) -> str | None:
    """Over plain TCP between host memories the library is slower than ``tcp``."""
    if pool.is_device or has_rdma_device():
        return None
    return "the KV pool is in host memory and there is no RDMA card, so tcp is faster"
