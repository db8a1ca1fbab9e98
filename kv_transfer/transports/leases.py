"""The senders of a worker, and their record of who may read what: open sessions, and leases of two kinds.

A sender that answers requests counts its readers in a LeaseBook. One that is read without a request has a
GenerationTable, in which a reader in another process sees the end of a lease: the lease's counter is incremented when
it ends, before its blocks may be used for anything else. So an unchanged generation after the last byte proves that
every byte was read under the lease. A reader looks at the table by itself, mapped (``shm``) or by a read of its own
(``nixl``); the sender does not notice it and never waits for it. It finds the blocks by a BlockGrant per published
range, which arrives on the control link. There is one counter per lease, not per block: two leases may lend the same
block, and the end of one must not fail the readers of the other.
"""

import fcntl
import mmap
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from contract.decoding import Unsigned, decode_outside, msgpack_decoder
from contract.errors import TransferError
from contract.proofs import make_proof
from engine.connector import KVMemory
from kv_transfer.protocol.reads import LeaseName, ReadRequest, StaleLeaseError
from kv_transfer.transports.block_views import BlockViews, address_of, read_views


@dataclass
class Lent:
    """Blocks of one region that are lent, from block ``first`` of the lease on. views: of a flat pool."""

    region: KVMemory
    first: int
    block_ids: npt.NDArray[np.int64]
    views: BlockViews | None = None

    def extend(self, block_ids: Sequence[int]) -> None:
        """Lend more blocks of this region."""
        self.block_ids = np.concatenate([self.block_ids, block_ids], dtype=np.int64)
        if self.region.pool_view is not None:
            pool = self.region.pool_view.toreadonly()
            self.views = BlockViews(pool, self.region.layout.block_bytes, self.block_ids)
            self.views.keep_addresses()


@dataclass
class _Lease:
    """Lent blocks, region by region. interrupts: one per reader. num_revokes: calls that wait for the readers."""

    lent: list[Lent] = field(default_factory=list)
    interrupts: list[Callable[[], None]] = field(default_factory=list)
    num_revokes: int = 0


class LeaseBook:
    """The leases of one sender that answers requests; owns their readers. Thread-safe.

    A sender whose readers hold blocks up uses ``reading``; one that copies them first uses ``block_ids`` and then ``check``.
    """

    def __init__(self, on_idle: Callable[[LeaseName], None]) -> None:
        self._on_idle = on_idle
        self._lock = threading.Lock()
        self._leases: dict[LeaseName, _Lease] = {}

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool; called once, before ``extend``."""
        self._memory = memory

    def extend(self, name: LeaseName, block_ids: Sequence[int], first_block: int = 0, group: int = 0) -> None:
        """Make ``block_ids``, of this group of layers, readable as the blocks of this lease from ``first_block`` on.

        A lease that has ended behind its first blocks stays over: the next ones may be digested later.
        """
        region = self._memory if group == 0 else self._memory.regions[group]
        with self._lock:
            if first_block and name not in self._leases:
                return
            lease = self._leases.setdefault(name, _Lease())
            if not lease.lent or lease.lent[-1].region is not region:
                lease.lent.append(Lent(region, first_block, np.zeros(0, np.int64)))
            lease.lent[-1].extend(block_ids)

    def revoke(self, name: LeaseName) -> None:
        """End the lease and interrupt its readers; call ``on_idle`` once for each call, as soon as it has no reader."""
        with self._lock:
            lease = self._leases.get(name)
            if lease is not None and lease.interrupts:
                lease.num_revokes += 1
                for interrupt in lease.interrupts:
                    interrupt()
                return
            self._leases.pop(name, None)
        self._on_idle(name)

    def revoke_all(self) -> None:
        """End every lease, without a call of ``on_idle``."""
        with self._lock:
            self._leases.clear()

    @contextmanager
    def reading(
        self, request: ReadRequest, interrupt: Callable[[], None] = lambda: None
    ) -> Iterator[Sequence[memoryview]]:
        """Yield the requested blocks' bytes; the lease cannot become idle within. Raises TransferError.

        interrupt: called, in any thread, if the lease is revoked within; must not block.
        """
        lease = self._begin(request, interrupt)
        try:
            yield self._views(lease, request)
        finally:
            self._end(request.name, lease, interrupt)

    def block_ids(self, request: ReadRequest) -> tuple[KVMemory, npt.NDArray[np.int64]]:
        """Return the region and its blocks that are requested, under a lease that is valid now. Raises StaleLeaseError."""
        with self._lock:
            lent = lent_for(self._valid(request.name), request)
            return lent.region, lent.block_ids[request.within(len(lent.block_ids), lent.first)]

    def check(self, name: LeaseName) -> None:
        """Raise StaleLeaseError unless the lease is valid now."""
        with self._lock:
            self._valid(name)

    def _valid(self, name: LeaseName) -> _Lease:
        lease = self._leases.get(name)
        if lease is None or lease.num_revokes:
            raise StaleLeaseError(f"the lease of {name} is over or was never given")
        return lease

    def _begin(self, request: ReadRequest, interrupt: Callable[[], None]) -> _Lease:
        with self._lock:
            lease = self._valid(request.name)
            lease.interrupts.append(interrupt)
            return lease

    def _views(self, lease: _Lease, request: ReadRequest) -> Sequence[memoryview]:
        with self._lock:  # ``extend`` may go on meanwhile
            lent = lent_for(lease, request)
            wanted = request.within(len(lent.block_ids), lent.first)
            block_ids = lent.block_ids[wanted]
            if lent.views is not None and request.part is None:
                return lent.views[wanted]
        return read_views(lent.region, block_ids, request.part)

    def _end(self, name: LeaseName, lease: _Lease, interrupt: Callable[[], None]) -> None:
        with self._lock:
            lease.interrupts.remove(interrupt)
            if lease.interrupts or not lease.num_revokes:
                return
            self._leases.pop(name, None)
        for _ in range(lease.num_revokes):
            self._on_idle(name)


def lent_for(lease: _Lease, request: ReadRequest) -> Lent:
    """Return the region's blocks among which the request begins, if it is for any; a valid lease has some."""
    before = (each for each in reversed(lease.lent) if each.first <= request.first_block)
    return next(before, lease.lent[0])


class Sessions:
    """The tokens of the control links that peers hold open to this worker now. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[str, str] = {}
        self._on_end: list[Callable[[str], None]] = []

    def listen(self, on_end: Callable[[str], None]) -> None:
        """Call ``on_end(token)`` whenever a session ends."""
        self._on_end.append(on_end)

    def begin(self, token: str, then: Callable[[], None] = lambda: None) -> bool:
        """Accept the peer of this session from now on. Returns True, and ``then`` is not called (see ``RankQuestions``)."""
        with self._lock:
            self._tokens[session_name(token)] = token
        return True

    def end(self, token: str) -> None:
        """End the session: its link is gone."""
        with self._lock:
            self._tokens.pop(session_name(token), None)
        for listener in self._on_end:
            listener(token)

    def __contains__(self, token: str) -> bool:
        with self._lock:
            return token in self._tokens.values()

    def find(self, name: str) -> str | None:
        """Return the token of the open session with this name (``session_name``), if any."""
        with self._lock:
            return self._tokens.get(name)


def session_name(token: str) -> str:
    """Return the session's name, which reveals nothing of its token."""
    return make_proof(token.encode(), "session name")


SLOT_BYTES = 8
NUM_SLOTS = 65536
"""64-bit counters in a table. Slot 0 belongs to no lease: its value proves that the right table is read."""
TABLE_BYTES = NUM_SLOTS * SLOT_BYTES
# Linux: the file can neither be written to nor be mapped writable from now on; existing mappings stay writable.
_F_SEAL_FUTURE_WRITE = 0x10
_N = TypeVar("_N", np.int64, np.int32)


def seal(memfd: int) -> None:
    """Prevent resizing the file, and writing to it except through existing mappings. Raises OSError."""
    fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE)


def reopen_read_only(memfd: int) -> int:
    """Return a descriptor of the same file that cannot write."""
    return os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY | os.O_CLOEXEC)


class GenerationTable:
    """Owns the table and gives its slots to leases. Thread-safe.

    It is mapped writable here at ``address``; others may map ``descriptor`` read-only. It begins with random numbers,
    so that no other memory (an earlier table, zeros) is mistaken for it. nonce: the value of slot 0. id_type: see
    ``BlockGrant``.
    """

    def __init__(self, on_idle: Callable[[LeaseName], None], id_type: "np.dtype[Any]") -> None:
        self._on_idle = on_idle
        self._id_type = id_type
        memfd = os.memfd_create("kvbaton-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(memfd, TABLE_BYTES)
            self._map = mmap.mmap(memfd, TABLE_BYTES)
            seal(memfd)
            self.descriptor = reopen_read_only(memfd)
        finally:
            os.close(memfd)
        self._map[:] = secrets.token_bytes(TABLE_BYTES)
        self._counters = memoryview(self._map).cast("Q")
        self.address = address_of(self._counters)
        self.nonce = self._counters[0]
        self._lock = threading.Lock()
        self._slots: dict[LeaseName, int] = {}
        self._free_slots = list(range(NUM_SLOTS - 1, 0, -1))

    def extend(
        self, name: LeaseName, block_ids: Sequence[int], first_block: int = 0, group: int = 0
    ) -> bytes:
        """Return a grant of ``block_ids`` under this lease. Raises TransferError if no slot is free.

        first_block, group: see ``LeaseBook``; a reader has the numbers with the grant, and derives the group from them.
        """
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                if not self._free_slots:
                    raise TransferError(
                        f"{NUM_SLOTS - 1} leases are open, and no more can be; end some first"
                    )
                slot = self._slots[name] = self._free_slots.pop()
            generation = self._counters[slot]
        packed_ids = np.array(block_ids, self._id_type).tobytes()
        return msgspec.msgpack.encode(BlockGrant(slot, generation, packed_ids))

    def revoke(self, name: LeaseName) -> None:
        """End the lease for every reader, and call ``on_idle``: the sender never waits for one."""
        self._end(name)
        self._on_idle(name)

    def revoke_all(self) -> None:
        """End every lease, without a call of ``on_idle``."""
        with self._lock:
            names = list(self._slots)
        for name in names:
            self._end(name)

    def close(self) -> None:
        """End every lease, and unmap the table here; other processes' mappings stay as they are."""
        self.revoke_all()
        self._counters.release()
        self._map.close()
        os.close(self.descriptor)

    def _end(self, name: LeaseName) -> None:
        with self._lock:
            slot = self._slots.pop(name, None)
            if slot is not None:
                self._counters[slot] = (self._counters[slot] + 1) % 2**64
                self._free_slots.append(slot)


class Sender(ABC):
    """Lends blocks of this process's pool, and keeps all that it has lent in ``leases``. Thread-safe.

    address: where receivers find it. why_not_offered: why no peer can read over it; known once it is started.
    """

    address: str
    why_not_offered: str | None = None

    def __init__(self, leases: LeaseBook | GenerationTable) -> None:
        self.leases = leases

    @abstractmethod
    def start(self, memory: KVMemory) -> None:
        """Lend from this pool; called once, before ``publish``."""

    def publish(
        self, name: LeaseName, block_ids: Sequence[int], first_block: int = 0, group: int = 0
    ) -> bytes | None:
        """Append ``block_ids``, of this group of layers, to the ``first_block`` blocks that may be read under this lease.

        Returns a grant, by which a receiver reads them without a request (at most MAX_GRANT_BYTES, see
        ``RangeGrant``), or None.
        """
        return self.leases.extend(name, block_ids, first_block, group)

    def release(self, name: LeaseName) -> None:
        """Start no more reads of this lease and end running ones; call ``on_idle(name)`` once per call when none runs."""
        self.leases.revoke(name)

    @abstractmethod
    def close(self) -> None:
        """End all reads and stop every thread. Idempotent."""


class LendingSender(Sender):
    """A sender whose readers ask for blocks."""

    leases: LeaseBook

    def start(self, memory: KVMemory) -> None:
        """Lend from this pool."""
        self.leases.start(memory)


def lease_ended(request: ReadRequest, who: str, when: str) -> StaleLeaseError:
    """Return the error of a read from ``who`` whose generation has changed. when: "while ..." the blocks were read."""
    return StaleLeaseError(
        f"the lease of {request.name} ended {when} were read from {who}; none of them can be used"
    )


class BlockGrant(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of the sender's pool, which hold the lent bytes while ``slot`` has the value ``generation``.

    packed_ids: the blocks' ids, as integers of the type that the transport copies by (64 or 32 bits), in the byte order of
    both ends: KV is not byte-swapped either.
    """

    slot: Annotated[int, msgspec.Meta(gt=0, lt=NUM_SLOTS)]
    generation: Unsigned
    packed_ids: bytes


_grants: msgspec.msgpack.Decoder[BlockGrant] = msgpack_decoder(BlockGrant)


def decode_grant(data: bytes) -> BlockGrant:
    """Decode a grant. Raises TransferError."""
    return decode_outside(
        _grants.decode, data, lambda why: TransferError(f"the sender handed out a malformed grant: {why}")
    )


def granted_blocks(
    request: ReadRequest, transport: str, who: str, id_type: "np.dtype[_N]"
) -> tuple[npt.NDArray[_N], set[tuple[int, int]]]:
    """Return the requested blocks' ids in the sender's pool, and the (slot, generation) of each lease that lends them.

    The ids are not checked against the pool's size. Raises StaleLeaseError for blocks that ``who`` has not granted,
    TransferError for a malformed grant.
    """
    if not request.grants:
        raise TransferError(f"{who} published blocks without a grant for {transport}")
    base = end = request.grants[0].first_block
    packed: list[bytes] = []
    leases: set[tuple[int, int]] = set()
    for given in request.grants:
        grant = decode_grant(given.by_transport.get(transport, b""))
        num_ids, num_left = divmod(len(grant.packed_ids), id_type.itemsize)
        if num_left:
            raise TransferError(f"{who} granted {len(grant.packed_ids)} bytes of block ids")
        end += num_ids
        if end != given.end_block:
            raise TransferError(f"{who} granted other blocks than it published")
        packed.append(grant.packed_ids)
        leases.add((grant.slot, grant.generation))
    start = request.within(end - base, base).start * id_type.itemsize
    return np.frombuffer(b"".join(packed), id_type, request.num_blocks, start), leases
