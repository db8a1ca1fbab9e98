"""Reads of lent blocks: what they name, how they are stopped, and what they raise.

A *lease* is a list of pool blocks lent under (transfer id, attempt, lease token). Reads name blocks by their index
in that list, so no read can name a block outside it. A read counts only if the lease was valid after its last byte.
"""

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated

import msgspec

from contract.decoding import Count, Positive, Unsigned
from contract.errors import KvbatonError, PeerUnreachableError, TransferError, WorkerLostError
from kv_transfer.protocol.digests import XXH3_64

MAX_PIECE_BYTES = 4 * 2**20
MAX_PIECE_BLOCKS = 256
MAX_GRANT_BYTES = 65536


def blocks_per_piece(block_bytes: int) -> int:
    """Return how many blocks are published, requested or verified at once: at most MAX_PIECE_BYTES, or one block."""
    return max(1, min(MAX_PIECE_BLOCKS, MAX_PIECE_BYTES // block_bytes))


_PROBE_BYTES = 8 * 2**20


def num_probe_blocks(block_bytes: int) -> int:
    """Return how many times a probe reads the null block: 8 MiB, or one block."""
    return max(1, _PROBE_BYTES // block_bytes)


class StaleLeaseError(TransferError):
    """The lease is over or never existed: nothing of the read may be used."""


class PeerSilentError(PeerUnreachableError):
    """The peer was silent for as long as a read waits: another try would take as long."""


# Errors that the system reports after it has waited for packets itself.
_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT})


def broken_connection(error: OSError, message: str) -> PeerUnreachableError:
    """Return the error of a read whose connection failed with ``error``; silence has its own class."""
    is_silent = isinstance(error, TimeoutError) or error.errno in _NO_WAY
    return PeerSilentError(message) if is_silent else PeerUnreachableError(message)


class ReadStoppedError(TransferError):
    """The read was stopped, and is terminal."""


def may_heal(error: KvbatonError) -> bool:
    """Return True if another read of the same blocks may succeed: the lease may still be valid."""
    is_over = isinstance(error, (StaleLeaseError, ReadStoppedError))
    return isinstance(error, (TransferError, WorkerLostError)) and not is_over


class BlockPart(msgspec.Struct, frozen=True):
    """The bytes ``start_byte``..``start_byte + num_bytes`` - 1 of every block of a read."""

    start_byte: Unsigned
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]


class LeaseName(msgspec.Struct, frozen=True):
    """The name of a lease: a transfer, its attempt, and a token that no other lease ever had."""

    transfer_id: str
    attempt: Unsigned
    lease: str

    def __str__(self) -> str:
        """Return the transfer, for error texts."""
        return f"transfer {self.transfer_id} (attempt {self.attempt})"


PROBE_LEASE = LeaseName("probe", 0, "null block")
"""The lease of a sender's null block, many times over, which does not end: it has no KV, and is read by probes."""


class RangeGrant(msgspec.Struct, frozen=True):
    """The grants that the sender's transports handed out with the blocks ``first_block``... of a transfer.

    by_transport: bytes by which the transport of that name reads the blocks without asking; opaque to all others.
    rank: the rank of the sender whose transports they are.
    """

    first_block: Count
    num_blocks: Positive
    by_transport: dict[str, Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT_BYTES)]]
    rank: Count = 0

    @property
    def end_block(self) -> int:
        """The first block behind the range."""
        return self.first_block + self.num_blocks


def grants_within(grants: Iterable[RangeGrant], first_block: int, end_block: int) -> list[RangeGrant]:
    """Return those of ranges with a block in ``first_block``..``end_block`` - 1."""
    return [grant for grant in grants if grant.first_block < end_block and first_block < grant.end_block]


class ReadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The blocks ``first_block``..``end_block`` - 1 of a lease, by their index in it.

    grants: of the ranges that these blocks are in, in order and without a gap; not sent to the sender.
    part: of each block; None is all of it. group: of layers, in which all of them are.
    """

    name: LeaseName
    first_block: Count
    num_blocks: Positive
    grants: tuple[RangeGrant, ...] = ()
    part: BlockPart | None = None
    group: Count = 0

    @property
    def end_block(self) -> int:
        """The first block behind these."""
        return self.first_block + self.num_blocks

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, "ReadRequest"]]:
        """Yield (number of blocks before it, request), of at most MAX_PIECE_BYTES or one block each.

        num_bytes: bytes that are read of each block.
        """
        step = blocks_per_piece(num_bytes)
        for start in range(0, self.num_blocks, step):
            size = min(step, self.num_blocks - start)
            first = self.first_block + start
            yield start, ReadRequest(self.name, first, size, part=self.part, group=self.group)

    def within(self, num_lent: int, base: int = 0) -> slice:
        """Return where these blocks are among ``num_lent`` lent blocks from ``base`` on. Raises StaleLeaseError."""
        start = self.first_block - base
        end = self.end_block - base
        if start < 0 or end > num_lent:
            outside = self.first_block if start < 0 else max(self.first_block, base + num_lent)
            raise StaleLeaseError(
                f"block {outside} of transfer {self.name.transfer_id} is not readable; {num_lent} blocks are"
            )
        return slice(start, end)


class Source(msgspec.Struct, frozen=True):
    """A peer whose blocks can be read, as agreed on the control link.

    token: proves the link to the peer's sender. transport: the name of the chosen one. address: that of its sender in rank
    0; other_addresses: in the ranks from 1 on. A transport reads from one rank (``of_rank``). digest: the algorithm by which
    the peer announces blocks. block_bytes: of the peer's blocks in one rank; 0 if that is not known.
    """

    worker_id: str
    boot_id: str
    address: str
    token: str
    transport: str = "tcp"
    other_addresses: tuple[str, ...] = ()
    digest: str = XXH3_64
    block_bytes: int = 0

    @property
    def num_ranks(self) -> int:
        """The number of the peer's ranks."""
        return 1 + len(self.other_addresses)

    def of_rank(self, rank: int) -> "Source":
        """Return the source of one rank of the peer."""
        if not self.other_addresses:
            return self
        address = (self.address, *self.other_addresses)[rank]
        boot_id = rank_boot_id(self.boot_id, rank, self.num_ranks)
        return msgspec.structs.replace(self, address=address, boot_id=boot_id, other_addresses=())


def rank_boot_id(boot_id: str, rank: int, num_ranks: int) -> str:
    """Return the boot id of one rank's transports: names that are derived from it differ between ranks."""
    return boot_id if num_ranks == 1 else f"{boot_id}.{rank}"


class Read:
    """The reads of one fetch, which any thread may stop, for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._on_landed: Callable[[int], None] | None = None
        self._on_stop: list[Callable[[], None]] = []
        self._has_waited = False
        self.is_stopped = False

    def stop(self) -> None:
        """Make the read terminal soon. Does not block."""
        with self._lock:
            self.is_stopped = True
            if self._interrupt is not None:
                self._interrupt()
            callbacks = self._on_stop
            self._on_stop = []
        # Without the lock, which a callback may take.
        for callback in callbacks:
            callback()

    def when_stopped(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` (which must not block) at the first ``stop``, or now if that has been."""
        with self._lock:
            if not self.is_stopped:
                self._on_stop.append(callback)
                return
        callback()

    def check(self) -> None:
        """Raise ReadStoppedError after ``stop``."""
        if self.is_stopped:
            raise ReadStoppedError("the read was stopped")

    def wait_once(self, wait: Callable[[], None]) -> None:
        """Call ``wait`` unless it has returned before: it waits for the steps that may use the blocks of this fetch.

        They were launched before it got its blocks, so those that are launched later are not waited for. Called from one
        thread at a time.
        """
        if not self._has_waited:
            wait()
            self._has_waited = True

    def interruptible(self, interrupt: Callable[[], None]) -> AbstractContextManager[None]:
        """Have ``stop`` call ``interrupt`` (which must not block) within. Raises ReadStoppedError if stopped before."""
        return _Interruptible(self, interrupt)

    def interrupt_by(self, interrupt: Callable[[], None] | None) -> None:
        """Set or clear what ``stop`` calls. Raises ReadStoppedError if it is set after a stop."""
        with self._lock:
            if interrupt is not None:
                self.check()
            self._interrupt = interrupt

    @property
    def is_followed(self) -> bool:
        """True if progress is reported to a caller."""
        return self._on_landed is not None

    def report_landed(self, num_blocks: int) -> None:
        """Report that the request's first ``num_blocks`` have their bytes and are not written to any more.

        A transport may call it, in the thread that fetches. Only the end of the read shows if the lease was valid.
        Raises TransferError if the bytes are wrong: the transport must end the read.
        """
        if self._on_landed is not None:
            self._on_landed(num_blocks)

    @contextmanager
    def reporting(self, on_landed: Callable[[int], None]) -> Iterator[None]:
        """Have ``report_landed`` call ``on_landed``, and nothing else, within."""
        before = self._on_landed
        self._on_landed = on_landed
        try:
            yield
        finally:
            self._on_landed = before


class _Interruptible:
    """The context of ``Read.interruptible``. Not a generator: every read enters it, mostly with cold caches."""

    def __init__(self, read: Read, interrupt: Callable[[], None]) -> None:
        self._read = read
        self._interrupt = interrupt

    def __enter__(self) -> None:
        self._read.interrupt_by(self._interrupt)

    def __exit__(self, *_: object) -> None:
        self._read.interrupt_by(None)
