"""The ``shm`` transport's sender: hands out read-only views of the pool, and ends leases by a table of generations.

It copies nothing. A reader that is stopped cannot hold a lease: the sender never waits for it.

Both ends prove their session on a Unix socket (``data_handshake``). The sender then sends ShmPoolInfo; with an OK come
three descriptors by SCM_RIGHTS: the pool and the table of generations, both read-only, and a pidfd of the sender's
process. No more is sent: the connection stays open as long as the session, and its end is the end of all reads. The
receiver finds the lent blocks by a BlockGrant per published range, copies them, and compares the generation before
and afterwards.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Annotated

import msgspec
import numpy as np

from contract.errors import SettingError, TransferError
from engine.connector import KVMemory
from kv_transfer.links.framing import encode_frame
from kv_transfer.protocol.reads import LeaseName
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataStatus
from kv_transfer.transports.data_port import Connection, DataPort
from kv_transfer.transports.generations import GenerationTable, encode_grant, reopen_read_only, seal
from kv_transfer.transports.shm.folder import listen_at, remove_fresh_folder, socket_path, why_unsupported
from kv_transfer.transports.transport import TransportContext

NUM_DESCRIPTORS = 3
ID_TYPE = np.dtype(np.int64)
"""The copy takes 64-bit block ids as they are."""


class ShmPoolInfo(msgspec.Struct, frozen=True):
    """The sender's only message: the pool's shape, or why it is not shared. nonce: the value of slot 0 of the table."""

    status: DataStatus
    message: str = ""
    nonce: int = 0
    num_blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    block_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0


class ShmSender:
    """Owns the socket, the table of generations, a read-only descriptor of the pool, and a pidfd of this process.

    Raises SettingError if the system or the folder does not allow it.
    """

    def __init__(self, context: TransportContext) -> None:
        why_not = why_unsupported()
        if why_not is not None:
            raise SettingError(
                f"transport shm is not possible here: {why_not}; choose auto or tcp", param="transport"
            )
        self._on_idle = context.on_idle
        path = socket_path(context.shm_dir, context.boot_id)
        self.address = str(path)
        self._descriptors: list[int] = []
        self.why_not_offered: str | None = None
        self._refuse("the pool is not allocated yet")
        with ExitStack() as undo:
            if context.shm_dir is None:
                undo.callback(remove_fresh_folder, path.parent)
            self._table = GenerationTable()
            undo.callback(self._table.close)
            undo.callback(self._table.end_all)
            self._pidfd = os.pidfd_open(os.getpid())
            undo.callback(os.close, self._pidfd)
            listener = listen_at(path)
            undo.callback(partial(path.unlink, missing_ok=True))
            self._port = DataPort(context, "kv-shm", self._serve, transport="shm", listener=listener)
            self._undo = undo.pop_all()

    def start(self, memory: KVMemory) -> None:
        """Seal the pool's file and open it read-only. ``why_not_offered`` has the outcome."""
        if memory.memfd is None:
            self._refuse("the KV pool is not in memory that another process can map")
            return
        try:
            seal(memory.memfd)
            pool = reopen_read_only(memory.memfd)
        except OSError as error:
            self._refuse(f"the KV pool cannot be shared read-only: {error}")
            return
        self._undo.callback(os.close, pool)
        self._descriptors = [pool, self._table.descriptor, self._pidfd]
        self._info = ShmPoolInfo(
            DataStatus.OK,
            nonce=self._table.nonce,
            num_blocks=memory.num_blocks,
            block_bytes=memory.layout.block_bytes,
        )
        self.why_not_offered = None

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> bytes | None:
        """Return the grant of these blocks. Raises TransferError for too many leases."""
        if self.why_not_offered is not None:
            return None
        return encode_grant(*self._table.open(name), block_ids, ID_TYPE)

    def release(self, name: LeaseName) -> None:
        """End the lease: reads of it fail from now on, running ones too."""
        self._table.end(name)
        self._on_idle(name)

    def close(self) -> None:
        """End every lease and connection, and remove the socket's file. Idempotent."""
        self._port.close()
        self._undo.close()

    def _refuse(self, why: str) -> None:
        self.why_not_offered = why
        self._info = ShmPoolInfo(DataStatus.DENIED, why)

    def _serve(self, connection: Connection) -> None:
        """Send the pool's description, then wait for the end of the connection."""
        info = self._info  # once, before the descriptors: ``start`` sets them first
        data = encode_frame(info, MAX_DATA_FRAME_BYTES)
        descriptors = self._descriptors if info.status is DataStatus.OK else []
        if socket.send_fds(connection.sock, [data], descriptors) != len(data):
            raise TransferError("the reader does not take the description of the pool")
        if connection.sock.recv(1):
            raise TransferError("the reader sent data after its handshake")
