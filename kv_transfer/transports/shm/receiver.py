"""The ``shm`` transport's receiver: maps a peer's pool once, and copies lent blocks out of it, piece by piece.

The mapping is not prefaulted: a populated mapping would allocate every page that the sender has not touched yet, and
fault in gigabytes at the first contact. Only pages of lent blocks are read; each costs its minor fault once per peer
(the kernel maps sixteen at a time), and the mapping is kept as long as the link.
"""

import mmap
import os
import select
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
from msgspec import UNSET

from contract.errors import PeerUnreachableError, TransferError, WorkerLostError
from kv_transfer.links.framing import HEADER, ShortReadError, check_body, decode_body, length_in, receive_all
from kv_transfer.native.compiling import CopyBlocks, last_cache_bytes, load_copy_blocks
from kv_transfer.protocol.reads import Read, ReadRequest, Source, blocks_per_piece
from kv_transfer.transports.block_views import BlockViews, address_of, check_group, check_sizes
from kv_transfer.transports.connection_cache import PeerConnection, PeerReceiver
from kv_transfer.transports.data_handshake import MAX_DATA_FRAME_BYTES, DataStatus, prove_session
from kv_transfer.transports.leases import TABLE_BYTES, granted_blocks, lease_ended
from kv_transfer.transports.shm.sender import ID_TYPE, NUM_DESCRIPTORS, ShmPoolInfo
from kv_transfer.transports.transport import ReceiverTraits

# Between flat pools a loop in C of ours (``kv_transfer.native``) copies many blocks, without Python's lock. Where that
# cannot be compiled, and for other memory, Python copies block by block.
_LARGE_BYTES = 2**18
_ID_BYTES = 8
Copy = Callable[[int, int], None]
"""Copies the blocks from a first one to before a last one."""
Copying = Callable[[BlockViews, Sequence[memoryview], Read], Copy]


def copy_pieces(
    copy_blocks: CopyBlocks | None,
    cache_bytes: int,
    blocks: BlockViews,
    views: Sequence[memoryview],
    read: Read,
) -> Copy:
    """Return a copy of ``blocks`` to ``views``: by the loop in C, if any; past a cache of ``cache_bytes``.

    The copy raises ReadStoppedError after ``read.stop()``.
    """
    if copy_blocks is None or not isinstance(views, BlockViews):
        return copy_each(blocks, views, read)
    # The caches should hold source and target until the bytes are read again, which is after a piece if it is verified.
    per_piece = blocks_per_piece(blocks.view_bytes)
    num_at_once = min(len(blocks), per_piece) if read.is_followed else len(blocks)
    past_caches = 2 * num_at_once * blocks.view_bytes > cache_bytes
    return copy_natively(copy_blocks, blocks, views, read, past_caches=past_caches)


def copy_natively(
    copy_blocks: CopyBlocks, source: BlockViews, target: BlockViews, read: Read, *, past_caches: bool
) -> Copy:
    """Return a copy of ``source`` to ``target``, whose blocks and views have the same sizes.

    past_caches: write past the processor's caches: the bytes are not read again soon, or do not fit. The copy neither
    keeps a pool alive nor exports its memory.
    """
    step = source.block_bytes
    size = source.view_bytes
    out_of = source.first_address
    into = target.first_address
    ids = np.ascontiguousarray(source.ids), np.ascontiguousarray(target.ids)
    out_of_ids, into_ids = (each.__array_interface__["data"][0] for each in ids)

    def copy(start: int, end: int, _kept: object = ids) -> None:
        read.check()
        at = start * _ID_BYTES
        copy_blocks(into, into_ids + at, out_of, out_of_ids + at, end - start, step, size, past_caches)

    return copy


def copy_each(blocks: BlockViews, views: Sequence[memoryview], read: Read) -> Copy:
    """Return a copy of ``blocks`` to ``views``, block by block; large ones without Python's lock."""
    is_large = blocks.view_bytes >= _LARGE_BYTES

    def copy(start: int, end: int) -> None:
        for number in range(start, end):
            read.check()
            # No name keeps a view of the pool in an error's frames.
            if is_large:
                np.copyto(np.frombuffer(views[number], np.uint8), np.frombuffer(blocks[number], np.uint8))
            else:
                views[number][:] = blocks[number]

    return copy


class _MappedPool:
    """A sender's pool and table of generations, mapped read-only until ``undo``. who: the sender, in error texts."""

    def __init__(self, who: str, info: ShmPoolInfo, pool: int, table: int, undo: ExitStack) -> None:
        """Map the descriptors' files. Raises TransferError if they do not fit ``info``."""
        self._who = who
        self._undo = undo
        others = () if info.others is UNSET else info.others
        regions = ((0, info.num_blocks, info.block_bytes), *others)
        ends = [start + num_blocks * block_bytes for start, num_blocks, block_bytes in regions]
        whole = self._map(pool, max(ends))
        self._regions = []
        for (start, _, block_bytes), end in zip(regions, ends, strict=True):
            region = whole[start:end]
            undo.callback(region.release)
            self._regions.append((region, block_bytes, address_of(region)))
        self._generations = self._map(table, TABLE_BYTES).cast("Q")
        undo.callback(self._generations.release)
        if self._generations[0] != info.nonce:
            raise TransferError(f"the mapping shows other bytes than {who} has written")

    def granted(self, request: ReadRequest, transport: str) -> tuple[BlockViews, set[tuple[int, int]]]:
        """Return the requested blocks, and (slot, generation) of the leases that lend them."""
        block_ids, leases = granted_blocks(request, transport, self._who, ID_TYPE)
        check_group(request.group, len(self._regions), self._who)
        region, block_bytes, address = self._regions[request.group]
        try:
            blocks = BlockViews(region, block_bytes, block_ids, request.part, address)
        except IndexError as error:
            raise TransferError(f"{self._who} granted {error}") from error
        return blocks, leases

    def has_ended(self, leases: set[tuple[int, int]]) -> bool:
        """Test if one of the leases is over."""
        return any(self._generations[slot] != generation for slot, generation in leases)

    def _map(self, descriptor: int, num_bytes: int) -> memoryview:
        try:
            mapping = mmap.mmap(descriptor, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (ValueError, OverflowError) as error:  # the file is smaller than its description
            raise TransferError(f"the pool of {self._who} cannot be mapped: {error}") from error
        self._undo.callback(mapping.close)
        view = memoryview(mapping)
        self._undo.callback(view.release)
        return view


class _Peer(PeerConnection):
    """The connection to a sender, which ends with the session, and its mapped ``pool`` once connected."""

    def __init__(self, source: Source, timeout_seconds: float, copying: Copying) -> None:
        super().__init__(source, socket.AF_UNIX, timeout_seconds)
        self._copying = copying
        self.pool: _MappedPool | None = None
        self._end = select.poll()
        self._undo = ExitStack()

    def close(self) -> None:
        """Unmap and close everything."""
        self._undo.close()
        super().close()

    def connect(self, read: Read) -> _MappedPool:
        """Return the mapped pool. At the first call, prove the session and map what the sender sends."""
        if self.pool is None:
            with read.interruptible(self.interrupt):
                self.pool = self._map_pool()
        return self.pool

    def fetch(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Copy piece by piece; compare the generation before the first and after each. A stop ends it after a piece."""
        pool = self.connect(read)
        blocks, leases = pool.granted(request, self._source.transport)
        check_sizes(views, blocks.view_bytes, self._who)
        # Once per read: a sender that dies later has not changed what it lent, and its link reports it.
        self._check_link()
        if ended := self._end.poll(0):
            if any(descriptor != self._sock.fileno() for descriptor, _ in ended):
                raise WorkerLostError(f"{self._who} died")
            raise PeerUnreachableError(f"{self._who} closed its shm socket")
        if pool.has_ended(leases):
            raise lease_ended(request, self._who, "before its blocks")
        copy = self._copying(blocks, views, read)
        count = len(views)
        step = blocks_per_piece(blocks.view_bytes)
        for start in range(0, count, step):
            end = min(start + step, count)
            copy(start, end)
            self._check_link()
            if pool.has_ended(leases):
                raise lease_ended(request, self._who, f"while blocks {start}..{end - 1} of {count}")
            read.report_landed(end)

    def _map_pool(self) -> _MappedPool:
        try:
            self._sock.connect(self._source.address)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise PeerUnreachableError(
                f"{self._who} does not answer at {self._source.address} ({error.strerror}): it is gone, or"
                " its shm_dir is not visible to this worker (containers share one by a volume)"
            ) from error
        prove_session(self._sock, self._source)
        with _receive_info(self._sock) as (info, descriptors):
            if info.status is not DataStatus.OK:
                raise PeerUnreachableError(f"{self._who} refused to share its pool: {info.message}")
            if len(descriptors) != NUM_DESCRIPTORS:
                raise TransferError(f"{self._who} sent {len(descriptors)} descriptors, not {NUM_DESCRIPTORS}")
            pool_file, table_file, pidfd = descriptors
            pool = _MappedPool(self._who, info, pool_file, table_file, self._undo)
            # The received descriptors are closed at the end of this block.
            kept_pidfd = os.dup(pidfd)
            self._undo.callback(os.close, kept_pidfd)
        self._end.register(kept_pidfd, select.POLLIN)
        self._end.register(self._sock, select.POLLIN)  # no more is sent there: it can only be closed
        return pool


class ShmReceiver(PeerReceiver):
    """Owns a mapping per peer. A stale lease leaves it as it is; any other error unmaps it."""

    def __init__(self, timeout_seconds: float) -> None:
        copying = partial(copy_pieces, load_copy_blocks(), last_cache_bytes())
        super().__init__(partial(_Peer, timeout_seconds=timeout_seconds, copying=copying), kind="shm socket")
        self.traits = ReceiverTraits(is_at_hand=self.is_at_hand)

    def is_at_hand(self, source: Source) -> bool:
        """See ReceiverTraits: the source's pool is mapped."""
        connection = self._unused(source)
        return isinstance(connection, _Peer) and connection.pool is not None


@contextmanager
def _receive_info(sock: socket.socket) -> Iterator[tuple[ShmPoolInfo, list[int]]]:
    """Receive and yield the message, and the descriptors that came with its first byte, which are closed afterwards."""
    header, descriptors, _, _ = socket.recv_fds(sock, HEADER.size, NUM_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(header) != HEADER.size:
            raise ShortReadError(len(header), HEADER.size)
        body = bytearray(length_in(header, MAX_DATA_FRAME_BYTES))
        receive_all(sock, [memoryview(body)])
        check_body(header, body)
        yield decode_body(body, ShmPoolInfo), descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
