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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import numpy as np

from contract.errors import PeerUnreachableError, TransferError, WorkerLostError
from kv_transfer.links.framing import (
    HEADER,
    ShortReadError,
    check_body,
    decode_body,
    length_in,
    read_frame,
    receive_all,
    write_frame,
)
from kv_transfer.native.compiling import CopyBlocks, last_cache_bytes, load_copy_blocks
from kv_transfer.protocol.reads import Read, ReadRequest, Source, StaleLeaseError, blocks_per_piece
from kv_transfer.transports.block_grants import granted_blocks
from kv_transfer.transports.block_views import BlockViews, address_of, block_span, check_sizes
from kv_transfer.transports.data_greeting import Reading
from kv_transfer.transports.data_wire import DataChallenge, DataStatus
from kv_transfer.transports.generations import NUM_SLOTS, SLOT_BYTES
from kv_transfer.transports.kept import Kept
from kv_transfer.transports.outcomes import as_outcome
from kv_transfer.transports.shm.block_copy import BlockCopier
from kv_transfer.transports.shm.wire import ID_TYPE, MAX_SHM_FRAME_BYTES, NUM_DESCRIPTORS, ShmWelcome

_LARGE_BYTES = 2**18
_Seen = set[tuple[int, int]]
"""(slot, generation) of the leases that are read."""


class _MappedPeer:
    """A sender's pool and table as this process sees them, and the socket whose end is the session's."""

    def __init__(
        self, source: Source, timeout_seconds: float, copy_blocks: CopyBlocks | None, cache_bytes: int
    ) -> None:
        self._source = source
        self._timeout_seconds = timeout_seconds
        self._who = f"worker {source.worker_id}"
        self.is_connected = False
        self._is_interrupted = False
        self._copier = BlockCopier(copy_blocks)
        self._holds_lock = copy_blocks is None
        self._cache_bytes = cache_bytes
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
        """Prove the session to each other, map what comes back, and check that it is what was meant; called once.

        Raises PeerUnreachableError where nobody (who knows us) answers, TransferError for a pool that cannot be mapped.
        """
        try:
            self._sock.connect(self._source.address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise PeerUnreachableError(
                f"{self._who} does not answer at {self._source.address} ({error.strerror}): it is gone, or"
                " its shm_dir is not visible to this worker (containers share one by a volume)"
            ) from error
        reading = Reading(self._source)
        write_frame(self._sock, reading.hello, MAX_SHM_FRAME_BYTES)
        challenge = read_frame(self._sock, DataChallenge, MAX_SHM_FRAME_BYTES)
        write_frame(self._sock, reading.prove(challenge), MAX_SHM_FRAME_BYTES)
        welcome, descriptors = self._hear_welcome()
        try:
            if welcome.status is not DataStatus.OK:
                raise PeerUnreachableError(f"{self._who} refused to share its pool: {welcome.message}")
            if len(descriptors) != NUM_DESCRIPTORS:
                raise TransferError(f"{self._who} sent {len(descriptors)} descriptors, not {NUM_DESCRIPTORS}")
            self._map(welcome, *descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.is_connected = True

    def read(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Copy by pieces, the generation compared before the first and after each. Raises as ``ReceiverTransport.fetch``."""
        at, to = block_span(self._block_bytes, request.part)
        check_sizes(views, to - at, self._who)
        blocks, seen = self._granted(request)
        self._check_alive()
        if self._is_over(seen):
            raise self._stale(request, "before its blocks")
        copy = self._copying(blocks, views, read)
        count = len(views)
        step = blocks_per_piece(to - at)
        for start in range(0, count, step):
            end = min(start + step, count)
            copy(start, end)
            self._check_linked()
            if self._is_over(seen):
                raise self._stale(request, f"while blocks {start}..{end - 1} of {count}")
            read.landed(end)

    def _granted(self, request: ReadRequest) -> tuple[BlockViews, _Seen]:
        """The sender's blocks that are wanted, and the leases that lend them."""
        block_ids, seen = granted_blocks(request, self._source.transport, self._who, ID_TYPE)
        try:
            return BlockViews(
                self._pool, self._block_bytes, block_ids, request.part, self._pool_address
            ), seen
        except IndexError as error:
            raise TransferError(f"{self._who} granted {error}") from error

    def _is_over(self, seen: _Seen) -> bool:
        return any(self._table[slot] != generation for slot, generation in seen)

    def _stale(self, request: ReadRequest, when: str) -> StaleLeaseError:
        return StaleLeaseError(
            f"the lease of transfer {request.name.transfer_id} (attempt {request.name.attempt}) ended"
            f" {when} were read from {self._who}; none of them can be used"
        )

    def _copying(
        self, blocks: BlockViews, views: Sequence[memoryview], read: Read
    ) -> Callable[[int, int], None]:
        """What copies the blocks from a first one to before a last one; by one call where both ends are pools."""
        is_long = self._holds_lock and blocks.view_bytes >= _LARGE_BYTES
        if isinstance(views, BlockViews) and not is_long:
            copy_all = self._copier.copying(
                blocks, views, past_caches=self._is_too_much(blocks.view_bytes, len(blocks), read)
            )

            def copy_piece(start: int, end: int) -> None:
                read.check()
                copy_all(start, end)

            return copy_piece
        copy = _copy_unlocked if blocks.view_bytes >= _LARGE_BYTES else _copy_locked

        def copy_each(start: int, end: int) -> None:
            for number in range(start, end):
                read.check()
                copy(blocks[number], views[number])  # no name keeps a view of the pool in an error's frames

        return copy_each

    def _is_too_much(self, view_bytes: int, num_views: int, read: Read) -> bool:
        """For the caches: what is copied until somebody reads it again, and what it is copied from."""
        num_at_once = min(num_views, blocks_per_piece(view_bytes)) if read.is_followed else num_views
        return 2 * num_at_once * view_bytes > self._cache_bytes

    def _check_linked(self) -> None:
        if self._is_interrupted:
            raise TransferError(f"the link to {self._who} is gone")

    def _check_alive(self) -> None:
        """Once for a read: what has died since cannot have changed what it lent, and its link will say so."""
        self._check_linked()
        if ended := self._end.poll(0):
            has_died = any(descriptor != self._sock.fileno() for descriptor, _ in ended)
            if has_died:
                raise WorkerLostError(f"{self._who} died")
            raise PeerUnreachableError(f"{self._who} closed its shm socket")

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
            return decode_body(body, ShmWelcome), descriptors
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def _map(self, welcome: ShmWelcome, pool: int, table: int, pidfd: int) -> None:
        self._block_bytes = welcome.block_bytes
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
        except (ValueError, OverflowError) as error:  # the file is smaller than was said
            raise TransferError(f"the pool of {self._who} cannot be mapped: {error}") from error
        self._undo.callback(mapping.close)
        view = memoryview(mapping)
        self._undo.callback(view.release)
        return view


class ShmReceiver:
    """Owns a mapping per peer. A stale lease leaves it as it is; any other error unmaps it."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._copy_blocks, self._cache_bytes = load_copy_blocks(), last_cache_bytes()
        self._peers: Kept[_MappedPeer] = Kept(harmless=StaleLeaseError)

    def probe(self, source: Source, read: Read) -> None:
        """Connect, authenticate, map, and read through the mapping. Raises what ``fetch`` would."""
        self._use(source, read, lambda _peer: None)

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Copy piece by piece. Stopping ends the read after the blocks between two looks."""
        self._use(source, read, lambda peer: peer.read(request, views, read))

    def forget(self, source: Source) -> None:
        """Unmap its pool."""
        self._peers.forget(source)

    def close(self) -> None:
        """Unmap every pool."""
        self._peers.close()

    def _new_peer(self, source: Source) -> _MappedPeer:
        return _MappedPeer(source, self._timeout_seconds, self._copy_blocks, self._cache_bytes)

    def _use(self, source: Source, read: Read, work: Callable[[_MappedPeer], None]) -> None:
        """Work with the mapped peer; whatever goes wrong is raised as ``fetch`` says."""
        read.check()
        try:
            with self._peers.using(source, lambda: self._new_peer(source)) as peer:
                if not peer.is_connected:
                    with read.interruptible(peer.stop_connecting):
                        peer.connect()
                work(peer)
        except (OSError, TransferError) as error:
            raise as_outcome(error, source, read, "shm socket") from error


def _copy_locked(block: memoryview, view: memoryview) -> None:
    view[:] = block


def _copy_unlocked(block: memoryview, view: memoryview) -> None:
    np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(block, np.uint8))
