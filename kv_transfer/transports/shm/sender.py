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
import stat
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from contract.decoding import Count, Unsigned
from contract.errors import SettingError, TransferError
from contract.processes import RunFolder
from engine.connector import KVMemory
from kv_transfer.links.framing import encode_frame
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataStatus
from kv_transfer.transports.data_port import Connection, DataPort
from kv_transfer.transports.leases import GenerationTable, Sender, reopen_read_only, seal
from kv_transfer.transports.transport import TransportContext

NUM_DESCRIPTORS = 3
# The copy takes 64-bit block ids as they are.
ID_TYPE = np.dtype(np.int64)


class ShmPoolInfo(msgspec.Struct, frozen=True):
    """The sender's only message: the pool's shape, or why it is not shared. nonce: the value of slot 0 of the table.

    others: (first byte in the file, blocks, bytes of a block) of the further groups of layers; not sent if there are none.
    """

    status: DataStatus
    message: str = ""
    nonce: Unsigned = 0
    num_blocks: Count = 0
    block_bytes: Unsigned = 0
    others: tuple[tuple[Unsigned, Count, Unsigned], ...] | UnsetType = UNSET


class ShmSender(Sender):
    """Owns the socket, the leases' table, and what readers map. Raises SettingError if that is not possible."""

    leases: GenerationTable

    def __init__(self, context: TransportContext) -> None:
        check_supported()
        settings = context.settings
        self._refuse("the pool is not allocated yet")
        with ExitStack() as undo:
            folder = settings.shm_dir or undo.enter_context(_fresh_folder()).path
            path = socket_path(folder, settings.boot_id)
            self.address = str(path)
            super().__init__(GenerationTable(context.on_idle, ID_TYPE))
            undo.callback(self.leases.close)
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
        regions = memory.regions[1:]
        others = tuple((each.start, each.num_blocks, each.layout.block_bytes) for each in regions)
        info = ShmPoolInfo(
            DataStatus.OK,
            nonce=self.leases.nonce,
            num_blocks=memory.num_blocks,
            block_bytes=memory.layout.block_bytes,
            others=others or UNSET,
        )
        self._shared = (info, [pool, self.leases.descriptor, self._pidfd])
        self.why_not_offered = None

    def close(self) -> None:
        """End every lease and connection, and remove the socket's file. Idempotent."""
        self._port.close()
        self._undo.close()

    def _refuse(self, why: str) -> None:
        self.why_not_offered = why
        self._shared = (ShmPoolInfo(DataStatus.DENIED, why), [])

    def _serve(self, connection: Connection) -> None:
        """Send the pool's description, then wait for the end of the connection."""
        info, descriptors = self._shared
        data = encode_frame(info, MAX_DATA_FRAME_BYTES)
        if socket.send_fds(connection.sock, [data], descriptors) != len(data):
            raise TransferError("the reader does not take the description of the pool")
        if connection.sock.recv(1):
            raise TransferError("the reader sent data after its handshake")


_MAX_PATH_BYTES = 107


def check_supported(platform: str = sys.platform) -> None:
    """Raise SettingError if this system lacks something."""
    if platform != "linux":
        raise _impossible(f"it needs Linux, and this is {platform}")
    try:
        os.close(os.memfd_create("kvbaton-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError) as error:
        raise _impossible(f"this system has no memfd: {error}") from error
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise _impossible(f"this system has no pidfd: {error}") from error


def _impossible(why: str) -> SettingError:
    return SettingError(f"transport shm is not possible here: {why}; choose auto or tcp", param="transport")


def socket_path(folder: Path, boot_id: str) -> Path:
    """Return the path of this worker's socket in ``folder``, which is made (0700) if it is missing.

    Sockets of dead workers are removed there. Raises SettingError for a path that is not a folder, that others may write to,
    or that is too long.
    """
    path = folder.absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_folder(path)
    except OSError as error:
        raise _unusable(path, str(error)) from error
    found = path / f"{boot_id}.sock"
    if len(os.fsencode(found)) > _MAX_PATH_BYTES:
        raise _unusable(path, f"a socket's path may have {_MAX_PATH_BYTES} bytes; {found} is longer")
    _sweep(path)
    return found


def _fresh_folder() -> RunFolder:
    """Make a folder (0700) with an unpredictable name; peers learn the path on their control link."""
    try:
        return RunFolder("shm")
    except OSError as error:
        raise _unusable(Path(tempfile.gettempdir()), str(error)) from error


def _check_folder(path: Path) -> None:
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode):
        raise _unusable(path, "it is not a folder")
    if info.st_uid not in (os.getuid(), 0):
        raise _unusable(path, f"it belongs to user {info.st_uid}")
    # Containers share a mounted folder, often with permissions that they cannot change.
    if info.st_mode & 0o022 and not path.is_mount():
        raise _unusable(path, f"others may write to it (mode {stat.S_IMODE(info.st_mode):04o}); make it 0700")


def _unusable(path: Path, why: str) -> SettingError:
    return SettingError(
        f"shm_dir {path} cannot be used: {why}; set another, or choose transport auto or tcp", param="shm_dir"
    )


def _sweep(folder: Path) -> None:
    """Remove sockets without a listener. A living worker's file appears only when it listens."""
    for path in folder.glob("*.sock"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                sock.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


def listen_at(path: Path) -> socket.socket:
    """Return a listening Unix socket, reachable by this user only. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    unready = path.with_suffix(".new")
    try:
        listener.bind(str(unready))
        unready.chmod(0o600)
        listener.listen(128)
        # A socket at its final path has a listener: those without are removed by other workers.
        unready.rename(path)
    except BaseException:
        listener.close()
        unready.unlink(missing_ok=True)
        raise
    return listener
