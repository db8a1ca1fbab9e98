"""The ``shm`` transport's sender: hands out read-only views of the pool, and ends leases by counting generations up.

It copies nothing. A reader that is stopped cannot hold a lease: the sender never waits for it.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack

from contract.errors import SettingError
from engine.connector import KVMemory
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.transports.block_grants import encode_grant
from kv_transfer.transports.context import TransportContext
from kv_transfer.transports.data_wire import DataStatus
from kv_transfer.transports.generations import GenerationTable, SharedLeases
from kv_transfer.transports.sealed_files import reopen_read_only, seal
from kv_transfer.transports.shm.folder import remove_fresh_folder, socket_path, why_unsupported
from kv_transfer.transports.shm.server import ShmServer
from kv_transfer.transports.shm.wire import ID_TYPE, ShmWelcome


class ShmSender:
    """Owns the table of generations, a read-only descriptor of the pool, and a pidfd of this process.

    Raises SettingError where the system or the folder does not allow it.
    """

    def __init__(self, context: TransportContext) -> None:
        why_not = why_unsupported()
        if why_not is not None:
            raise SettingError(
                f"transport shm is not possible here: {why_not}; choose auto or tcp", param="transport"
            )
        path = socket_path(context.shm_dir, context.boot_id)
        self.address = str(path)
        self.why_not_offered: str | None = "the pool is not allocated yet"
        self._pool: int | None = None
        self._num_blocks = self._block_bytes = 0
        with ExitStack() as undo:
            if context.shm_dir is None:
                undo.callback(remove_fresh_folder, path.parent)
            self._table = GenerationTable()
            undo.callback(self._table.close)
            self._pidfd = os.pidfd_open(os.getpid())
            undo.callback(os.close, self._pidfd)
            self._leases = SharedLeases(self._table, context.on_idle)
            self._server = ShmServer(path, context, self._welcome)
            self._undo = undo.pop_all()

    def start(self, memory: KVMemory) -> None:
        """Seal the pool's file and get a descriptor of it that cannot write; ``why_not_offered`` says the outcome."""
        if memory.memfd is None:
            self.why_not_offered = "the KV pool is not in memory that another process can map"
            return
        try:
            seal(memory.memfd)
            self._pool = reopen_read_only(memory.memfd)
        except OSError as error:
            self.why_not_offered = f"the KV pool cannot be shared read-only: {error}"
            return
        self._undo.callback(os.close, self._pool)
        self._num_blocks = memory.num_blocks
        self._block_bytes = memory.layout.block_bytes
        self.why_not_offered = None

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> bytes | None:
        """Say where the blocks are, and how the lease's end can be seen. Raises TransferError for too many leases."""
        if self._pool is None:
            return None
        return encode_grant(*self._leases.open(name), block_ids, ID_TYPE)

    def release(self, name: LeaseName) -> None:
        """End the lease: what is read of it from now on, or is being read, fails at its reader."""
        self._leases.revoke(name)

    def close(self) -> None:
        """End every lease and connection, and remove the socket's file. Idempotent."""
        self._server.close()
        with self._undo:
            self._leases.revoke_all()
        self._undo = ExitStack()

    def _welcome(self) -> tuple[ShmWelcome, list[int]]:
        if self._pool is None:
            return ShmWelcome(DataStatus.DENIED, self.why_not_offered or ""), []
        welcome = ShmWelcome(
            DataStatus.OK,
            nonce=self._table.nonce,
            num_blocks=self._num_blocks,
            block_bytes=self._block_bytes,
        )
        return welcome, [self._pool, self._table.descriptor, self._pidfd]
