"""The ``shm`` transport's receiver: maps a peer's pool once, and copies lent blocks out of it, piece by piece.

It asks nobody: where the blocks are came with the words that they are published. A read costs its copies, and a look
before and after each piece at the counter that shows the end of the lease (``block_copy`` tells how a piece is copied).

The mapping is not prefaulted: a populated mapping would allocate every page that the sender has not touched yet, and
fault in gigabytes at the first contact. Only pages of lent blocks are read; each costs its minor fault once per peer
(the kernel maps sixteen at a time), and the mapping is kept as long as the link.
"""

import mmap
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import msgspec
import numpy as np

from contract.errors import TransferError, WorkerLostError
from kv_transfer.framing import HEADER, ShortReadError, check_body, length_in, receive_all, write_frame
from kv_transfer.transport import (
    BlockPart,
    BlockViews,
    Read,
    ReadRequest,
    Source,
    StaleLeaseError,
    block_span,
    blocks_per_piece,
)
from kv_transfer.transports.block_copy import Ids, PoolItems, address_of, copying
from kv_transfer.transports.kept import Kept
from kv_transfer.transports.outcomes import as_outcome
from kv_transfer.transports.shm_leases import SLOT_BYTES
from kv_transfer.transports.shm_wire import (
    MAX_SHM_FRAME_BYTES,
    NUM_DESCRIPTORS,
    NUM_SLOTS,
    ShmWelcome,
    decode_grant,
)
from kv_transfer.transports.tcp_wire import DataHello, DataStatus

_LARGE_BYTES = 2**18
_Seen = set[tuple[int, int]]
"""(slot, generation) of the leases that are read."""


class _MappedPeer:
    """A sender's pool and table as this process sees them, and the socket whose end is the session's."""

    def __init__(self, source: Source, timeout_seconds: float) -> None:
        self._source, self._timeout_seconds = source, timeout_seconds
        self._who = f"worker {source.worker_id}"
        self._is_connected = False
        self._is_interrupted = False
        self._undo = ExitStack()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._undo.callback(self._sock.close)
        self._sock.settimeout(timeout_seconds)

    def interrupt(self) -> None:
        """End what waits for the socket at once, and what copies after its block."""
        self._is_interrupted = True
        self.stop_connecting()

    def stop_connecting(self) -> None:
        """Shut the socket down."""
        with suppress(OSError):  # the peer was faster
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Unmap and close everything."""
        self._undo.close()

    def connect(self) -> None:
        """Show the token, map what comes back, and check that it is what was meant; once.

        Raises WorkerLostError where nobody (who knows us) answers, TransferError for a pool that cannot be mapped.
        """
        if self._is_connected:
            return
        try:
            self._sock.connect(self._source.address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise WorkerLostError(
                f"{self._who} does not answer at {self._source.address} ({error.strerror}): it is gone, or"
                " shares no shm_dir with this worker"
            ) from error
        write_frame(self._sock, DataHello(self._source.token), MAX_SHM_FRAME_BYTES)
        welcome, descriptors = self._hear_welcome()
        try:
            if welcome.status is not DataStatus.OK:
                raise WorkerLostError(f"{self._who} refused to share its pool: {welcome.message}")
            if len(descriptors) != NUM_DESCRIPTORS:
                raise TransferError(f"{self._who} sent {len(descriptors)} descriptors, not {NUM_DESCRIPTORS}")
            self._map(welcome, *descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._is_connected = True

    def read(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Copy by pieces, the generation compared before the first and after each. Raises as ``ReceiverTransport.fetch``."""
        start, end = block_span(self._block_bytes, request.part)
        self._check_sizes(views, end - start)
        block_ids, seen = self._granted(request)
        self._check_alive()
        self._check_valid(seen, request, "before its blocks")
        copy = self._copying(block_ids, views, request.part, read)
        step = blocks_per_piece(end - start)
        for start in range(0, len(views), step):
            end = min(start + step, len(views))
            copy(start, end)
            self._check_alive()
            self._check_valid(seen, request, f"while blocks {start}..{end - 1} of {len(views)}")
            read.landed(end)

    def _check_sizes(self, views: Sequence[memoryview], wanted: int) -> None:
        sizes = {views.view_bytes} if isinstance(views, BlockViews) else {view.nbytes for view in views}
        if sizes - {wanted}:
            raise TransferError(f"a block of {self._who} has {wanted} bytes, not {min(sizes - {wanted})}")

    def _granted(self, request: ReadRequest) -> tuple[Ids, _Seen]:
        """The sender's blocks behind the indices, and the leases that lend them."""
        if not request.grants:
            raise TransferError(f"{self._who} published blocks without a grant for shm")
        grants = [
            decode_grant(given.by_transport.get(self._source.transport, b"")) for given in request.grants
        ]
        base = end = request.grants[0].first_block
        for grant, given in zip(grants, request.grants, strict=True):
            end += len(grant.block_ids)
            if end != given.end_block:
                raise TransferError(f"{self._who} granted other blocks than it published")
        lent = np.concatenate([grant.block_ids for grant in grants])
        places = request.pick(range(len(lent)), base)
        inside = slice(places.start, places.stop) if isinstance(places, range) else list(places)
        block_ids = lent[inside].astype(np.int64)
        if (highest := int(block_ids.max())) >= self._num_blocks:
            raise TransferError(f"{self._who} granted block {highest} of a pool of {self._num_blocks}")
        return block_ids, {(grant.slot, grant.generation) for grant in grants}

    def _check_valid(self, seen: _Seen, request: ReadRequest, when: str) -> None:
        for slot, generation in seen:
            if self._table[slot] != generation:
                raise StaleLeaseError(
                    f"the lease of transfer {request.name.transfer_id} (attempt {request.name.attempt}) ended"
                    f" {when} were read from {self._who}; none of them can be used"
                )

    def _copying(
        self, block_ids: Ids, views: Sequence[memoryview], part: BlockPart | None, read: Read
    ) -> Callable[[int, int], None]:
        """What copies the blocks from a first one to before a last one; by many at once where both ends are pools."""
        size, (at, to) = self._block_bytes, block_span(self._block_bytes, part)
        if isinstance(views, BlockViews):
            copy_items = copying(
                PoolItems(self._pool, self._pool_address, size, block_ids, at, to - at),
                PoolItems.of(views),
            )

            def copy_piece(start: int, end: int) -> None:
                read.check()
                copy_items(start, end)

            return copy_piece
        copy = _copy_unlocked if size >= _LARGE_BYTES else _copy_locked

        def copy_each(start: int, end: int) -> None:
            for block_id, view in zip(block_ids[start:end].tolist(), views[start:end], strict=True):
                read.check()
                copy(self._pool[block_id * size + at : block_id * size + to], view)

        return copy_each

    def _check_alive(self) -> None:
        if self._is_interrupted:
            raise TransferError(f"the link to {self._who} is gone")
        if ended := self._end.poll(0):
            has_died = any(descriptor != self._sock.fileno() for descriptor, _ in ended)
            raise WorkerLostError(f"{self._who} died" if has_died else f"{self._who} closed its shm socket")

    def _hear_welcome(self) -> tuple[ShmWelcome, list[int]]:
        """The words, and the descriptors that came with their first byte."""
        header, descriptors, _, _ = socket.recv_fds(
            self._sock, HEADER.size, NUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            if len(header) != HEADER.size:
                raise ShortReadError(len(header), HEADER.size)
            body = bytearray(length_in(header, MAX_SHM_FRAME_BYTES))
            receive_all(self._sock, [memoryview(body)])
            check_body(header, body)
            return msgspec.msgpack.decode(body, type=ShmWelcome), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _map(self, welcome: ShmWelcome, pool: int, table: int, pidfd: int) -> None:
        self._num_blocks, self._block_bytes = welcome.num_blocks, welcome.block_bytes
        self._pool = self._map_file(pool, welcome.num_blocks * welcome.block_bytes)
        self._pool_address = address_of(self._pool)
        self._table = self._map_file(table, NUM_SLOTS * SLOT_BYTES).cast("Q")
        self._undo.callback(self._table.release)
        if self._table[0] != welcome.nonce:
            raise TransferError(f"the mapping shows other bytes than {self._who} has written")
        kept_pidfd = os.dup(pidfd)
        self._undo.callback(os.close, kept_pidfd)
        self._end = select.poll()
        self._end.register(kept_pidfd, select.POLLIN)
        self._end.register(self._sock, select.POLLIN)  # nothing is said there any more: it can only be closed

    def _map_file(self, descriptor: int, num_bytes: int) -> memoryview:
        try:
            mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except ValueError as error:  # the file is smaller than was said
            raise TransferError(f"the pool of {self._who} cannot be mapped: {error}") from error
        self._undo.callback(mapping.close)
        view = memoryview(mapping)
        self._undo.callback(view.release)
        return view


class ShmReceiver:
    """Owns a mapping per peer. A stale lease leaves it as it is; any other error unmaps it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._peers: Kept[_MappedPeer] = Kept(harmless=StaleLeaseError)

    def probe(self, source: Source, read: Read) -> None:
        """Connect, authenticate, map, and read through the mapping. Raises what ``fetch`` would."""
        with self._using(source, read):
            return

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Copy piece by piece. Stopping ends the read after the blocks between two looks."""
        with self._using(source, read) as peer:
            peer.read(request, views, read)

    def forget(self, source: Source) -> None:
        """Unmap its pool."""
        self._peers.forget(source)

    def close(self) -> None:
        """Unmap every pool."""
        self._peers.close()

    @contextmanager
    def _using(self, source: Source, read: Read) -> Iterator[_MappedPeer]:
        """The mapped peer; whatever goes wrong within is raised as ``fetch`` says."""
        read.check()
        try:
            with self._peers.using(source, lambda: _MappedPeer(source, self._timeout_seconds)) as peer:
                with read.interruptible(peer.stop_connecting):
                    peer.connect()
                yield peer
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, TransferError) as error:
            raise as_outcome(error, source, read, "shm socket") from error


def _copy_locked(block: memoryview, view: memoryview) -> None:
    view[:] = block


def _copy_unlocked(block: memoryview, view: memoryview) -> None:
    np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(block, np.uint8))
