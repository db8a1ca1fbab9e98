"""What a read of lent blocks names, how it is stopped, and what it raises.

A *lease* is a list of pool blocks lent under (transfer id, attempt, lease token). Reads name blocks by their index
in that list, so nobody can ask for a block outside it. A read counts only when the lease was valid after its last byte.
"""

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated

import msgspec

from contract.errors import KvbatonError, PeerUnreachableError, TransferError, WorkerLostError

MAX_PIECE_BYTES = 4 * 2**20
MAX_PIECE_BLOCKS = 256
MAX_GRANT_BYTES = 65536


def blocks_per_piece(block_bytes: int) -> int:
    """How many blocks are published, asked for or verified at once: MAX_PIECE_BYTES at most, or one block."""
    return max(1, min(MAX_PIECE_BLOCKS, MAX_PIECE_BYTES // block_bytes))


class StaleLeaseError(TransferError):
    """The lease is over or was never given: nothing of the read may be used."""


class PeerSilentError(PeerUnreachableError):
    """Nothing came from the peer for as long as the read waits: another try would take as long."""


_NO_WAY = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT})
"""What a system reports after it has waited for packets by itself."""


def broken_connection(error: OSError, message: str) -> PeerUnreachableError:
    """Return the error that a read ends with whose connection failed so: silence is told from an end."""
    is_silent = isinstance(error, TimeoutError) or error.errno in _NO_WAY
    return PeerSilentError(message) if is_silent else PeerUnreachableError(message)


class ReadStoppedError(TransferError):
    """The read was told to stop, and is terminal."""


def may_heal(error: KvbatonError) -> bool:
    """Another read of the same blocks, or one over another transport, may succeed: the lease may be valid yet."""
    is_over = isinstance(error, (StaleLeaseError, ReadStoppedError))
    return isinstance(error, (TransferError, WorkerLostError)) and not is_over


class BlockPart(msgspec.Struct, frozen=True):
    """The bytes ``start_byte``..``start_byte + num_bytes`` - 1 of a block, the same of every block of a read."""

    start_byte: Annotated[int, msgspec.Meta(ge=0)]
    num_bytes: Annotated[int, msgspec.Meta(ge=1)]


class LeaseName(msgspec.Struct, frozen=True):
    """Which lease: a transfer, its attempt, and a token that no other lease ever had."""

    transfer_id: str
    attempt: int
    lease: str


class RangeGrant(msgspec.Struct, frozen=True):
    """What the sender's transports handed out with the blocks ``first_block``... of a transfer.

    by_transport: bytes that only the transport of that name understands; it reads the blocks by them without asking.
    rank: whose transports they are, where the sender has several ranks.
    """

    first_block: Annotated[int, msgspec.Meta(ge=0)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]
    by_transport: dict[str, Annotated[bytes, msgspec.Meta(max_length=MAX_GRANT_BYTES)]]
    rank: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def end_block(self) -> int:
        """The first block behind the range."""
        return self.first_block + self.num_blocks


def grants_within(grants: Iterable[RangeGrant], first_block: int, end_block: int) -> list[RangeGrant]:
    """Those of ranges that have a block in ``first_block``..``end_block`` - 1."""
    return [grant for grant in grants if grant.first_block < end_block and first_block < grant.end_block]


class ReadRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The blocks ``first_block``..``end_block`` - 1 of a lease, by their index in it.

    grants: of the ranges that these blocks are in, in order and without a gap; they are not said to the sender.
    part: of each of the blocks; None is all of it.
    """

    name: LeaseName
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    num_blocks: Annotated[int, msgspec.Meta(ge=1)]
    grants: tuple[RangeGrant, ...] = ()
    part: BlockPart | None = None

    @property
    def end_block(self) -> int:
        """The first block behind these."""
        return self.first_block + self.num_blocks

    def pieces(self, num_bytes: int) -> Iterator[tuple[int, "ReadRequest"]]:
        """(how many blocks before it, request) of at most MAX_PIECE_BYTES (at least one block) each.

        num_bytes: what is read of each block.
        """
        step = blocks_per_piece(num_bytes)
        for start in range(0, self.num_blocks, step):
            size = min(step, self.num_blocks - start)
            yield start, ReadRequest(self.name, self.first_block + start, size, part=self.part)

    def within(self, num_lent: int, base: int = 0) -> slice:
        """Where these blocks stand among ``num_lent`` that are lent, of which the first is block ``base``.

        Raises StaleLeaseError.
        """
        start = self.first_block - base
        end = self.end_block - base
        if start < 0 or end > num_lent:
            outside = self.first_block if start < 0 else max(self.first_block, base + num_lent)
            raise StaleLeaseError(
                f"block {outside} of transfer {self.name.transfer_id} is not readable; {num_lent} blocks are"
            )
        return slice(start, end)


class Source(msgspec.Struct, frozen=True):
    """Where a peer's blocks can be read, as agreed on the control link.

    token: proves the link to the peer's sender. transport: the name of the one that was chosen; address is its own.
    other_addresses: of the peer's ranks from 1 on, where it has several; a transport reads from one rank (``of_rank``).
    """

    worker_id: str
    boot_id: str
    address: str
    token: str
    transport: str = "tcp"
    other_addresses: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """How many ranks the peer has."""
        return 1 + len(self.other_addresses)

    def of_rank(self, rank: int) -> "Source":
        """Where the blocks of one of the peer's ranks can be read."""
        if not self.other_addresses:
            return self
        address = (self.address, *self.other_addresses)[rank]
        boot_id = rank_boot_id(self.boot_id, rank, self.num_ranks)
        return msgspec.structs.replace(self, address=address, boot_id=boot_id, other_addresses=())


def rank_boot_id(boot_id: str, rank: int, num_ranks: int) -> str:
    """What the transports of one rank call their process: names that they make of it are not another rank's."""
    return boot_id if num_ranks == 1 else f"{boot_id}.{rank}"


class Read:
    """One fetch's reads, which any thread may stop. Once stopped it stays stopped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupt: Callable[[], None] | None = None
        self._on_landed: Callable[[int], None] | None = None
        self._on_stop: list[Callable[[], None]] = []
        self.is_stopped = False

    def stop(self) -> None:
        """Make the read terminal soon. Does not block."""
        with self._lock:
            self.is_stopped = True
            if self._interrupt is not None:
                self._interrupt()
            told = self._on_stop
            self._on_stop = []
        for callback in told:
            callback()

    def when_stopped(self, callback: Callable[[], None]) -> None:
        """Have the first ``stop`` call ``callback`` (which must not block); at once where that has been."""
        with self._lock:
            if not self.is_stopped:
                self._on_stop.append(callback)
                return
        callback()

    def check(self) -> None:
        """Raise ReadStoppedError after ``stop``."""
        if self.is_stopped:
            raise ReadStoppedError("the read was stopped")

    def interruptible(self, interrupt: Callable[[], None]) -> AbstractContextManager[None]:
        """Within, ``stop`` calls ``interrupt`` (which must not block). Raises ReadStoppedError if stopped before."""
        return _Interruptible(self, interrupt)

    def interrupt_by(self, interrupt: Callable[[], None] | None) -> None:
        """What ``stop`` calls from now on; None: nothing. Raises ReadStoppedError if stopped before, but not for None."""
        with self._lock:
            if interrupt is not None:
                self.check()
            self._interrupt = interrupt

    @property
    def is_followed(self) -> bool:
        """Somebody wants to hear how far it has come."""
        return self._on_landed is not None

    def landed(self, num_blocks: int) -> None:
        """Called by a transport, in the thread that fetches: the request's first ``num_blocks`` have their bytes.

        They are not written to any more; whether the lease was valid is told by the end of the read. Raises TransferError
        when they are not what they should be: the transport must end the read. To say nothing is allowed.
        """
        if self._on_landed is not None:
            self._on_landed(num_blocks)

    @contextmanager
    def telling(self, on_landed: Callable[[int], None]) -> Iterator[None]:
        """Within, in this thread, ``on_landed`` hears what a transport says by ``landed``; nobody else does."""
        before = self._on_landed
        self._on_landed = on_landed
        try:
            yield
        finally:
            self._on_landed = before


class _Interruptible:
    """See ``Read.interruptible``. No generator: every read enters this, mostly with cold caches."""

    def __init__(self, read: Read, interrupt: Callable[[], None]) -> None:
        self._read = read
        self._interrupt = interrupt

    def __enter__(self) -> None:
        self._read.interrupt_by(self._interrupt)

    def __exit__(self, *_: object) -> None:
        self._read.interrupt_by(None)
