"""The ``nixl`` transport's receiver: one-sided reads out of a peer's pool, straight into this worker's own.

A read asks nobody: where the blocks are came with the words that they are published, and whether their lease has ended
is read behind the last byte, out of the peer's table of generations. A read that was posted cannot be taken back:
``fetch`` returns when it is terminal, however long that takes; until then its blocks stay in quarantine, and nobody else
waits.

Some lanes of the library need the peer's thread as well (UCX over TCP), others do not (a copy by the kernel, RDMA). Which
of them this is, is found out once by a read while the peer rests. A wrong guess costs LATE_SECONDS: the peer is asked for
help as soon as a read is late.
"""

import logging
import select
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from contract.errors import PeerUnreachableError, TransferError
from kv_transfer.links.framing import read_frame, write_frame
from kv_transfer.protocol.reads import BlockPart, PeerSilentError, Read, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.block_grants import granted_blocks
from kv_transfer.transports.block_views import block_outside, block_span, check_sizes
from kv_transfer.transports.data_port import dial, shut_down, unconnected
from kv_transfer.transports.data_wire import DataStatus
from kv_transfer.transports.kept import Kept
from kv_transfer.transports.nixl.agent import DescribedRegion
from kv_transfer.transports.nixl.memory import ID_TYPE
from kv_transfer.transports.nixl.nixl_thread import NixlThread
from kv_transfer.transports.nixl.peer import MAX_SLOTS_AT_ONCE, RemotePool
from kv_transfer.transports.nixl.read import Ids, NixlRead, ReadStep, SlotsStep
from kv_transfer.transports.nixl.wire import MAX_NIXL_FRAME_BYTES, Help, NixlAsk, NixlResting, NixlWelcome
from kv_transfer.transports.outcomes import as_outcome

logger = logging.getLogger(__name__)
_MAX_POST_BYTES = 64 * 2**20
"""Reads are posted in parts: the CPU may be what moves the bytes, and a stop is heard between two of them."""
_NONCE_SLOT = (0,)


def agent_name(boot_id: str) -> str:
    """What the agent of this incarnation of a worker is called."""
    return f"kvbaton-{boot_id}"


class _Peer:
    """The connection to a sender's data port, and its pool.

    _needs_help: whether its thread must drive the library on while something is read; None where a read was late.
    """

    def __init__(self, source: Source, nixl_thread: NixlThread, timeout_seconds: float) -> None:
        self._source = source
        self._nixl_thread = nixl_thread
        self._timeout_seconds = timeout_seconds
        self._who = f"worker {source.worker_id}"
        self._pool: RemotePool | None = None
        self._lock = threading.Lock()
        self._is_interrupted = self._is_posted = False
        self._needs_help: bool | None = None
        self._is_helped = False
        self._sock = unconnected(source, timeout_seconds)
        self._end = select.poll()

    def interrupt(self) -> None:
        """The link is gone: end what waits for the peer's words at once, a posted read when it is terminal.

        Until then the connection stays open: the peer must know that somebody reads.
        """
        with self._lock:
            self._is_interrupted = True
            if not self._is_posted:
                self.stop_asking()

    def stop_asking(self) -> None:
        """Shut the connection down."""
        shut_down(self._sock)

    def close(self) -> None:
        """Close the connection, and forget the pool as soon as nothing is posted to it."""
        self._sock.close()
        if self._pool is not None:
            self._nixl_thread.disconnect(self._pool)

    def connect(self, read: Read) -> RemotePool:
        """Dial, show the token, and prove by reading that the library reaches the right memory; once.

        Raises PeerUnreachableError where nobody (who knows us) answers, TransferError for a pool that cannot be read.
        """
        if self._pool is not None:
            return self._pool
        with read.interruptible(self.stop_asking):
            dial(self._sock, self._source)
            welcome = read_frame(self._sock, NixlWelcome, MAX_NIXL_FRAME_BYTES)
        if welcome.status is not DataStatus.OK:
            raise TransferError(f"{self._who} lends nothing over nixl: {welcome.message}")
        pool = self._pool = self._nixl_thread.connect(agent_name(self._source.boot_id), self._who, welcome)
        self._end.register(self._sock, select.POLLIN)
        self._is_helped = True
        if self._read_nonce(pool, read) != welcome.nonce:
            raise TransferError(f"nixl reads other memory than that of {self._who}")
        self._wait_at_most(self._posted(pool, [_into_bounce(pool, np.zeros(1, np.int32))]), read)
        self._find_out(pool, read)
        return pool

    def read(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read the blocks, and then whether their lease has ended. Raises as ``ReceiverTransport.fetch``."""
        pool = self._pool or self.connect(read)
        start, end = block_span(pool.region.block_bytes, request.part)
        check_sizes(views, end - start, self._who)
        block_ids, seen = granted_blocks(request, self._source.transport, self._who, ID_TYPE)
        if len(seen) > MAX_SLOTS_AT_ONCE or len(block_ids) != len(views):
            raise TransferError(f"{len(views)} blocks under {len(seen)} leases are not read at once")
        self._check_open()
        if self._needs_help is None:
            self._find_out(pool, read)
        if self._needs_help:
            self._ask(Help.BEGIN)
        slots, generations = zip(*seen, strict=True)
        try:
            self._move(pool, block_ids, views, request, slots, read)
        except TransferError as error:  # the library looks at each number
            outside = block_outside(block_ids.astype(np.int64), pool.region.num_blocks)
            if outside is None:
                raise
            words = f"{self._who} granted block {outside} of a pool of {pool.region.num_blocks}"
            raise TransferError(words) from error
        if self._is_helped:
            self._ask(Help.END)
        if pool.found.numbers(len(slots)) != list(generations):
            raise StaleLeaseError(
                f"the lease of transfer {request.name.transfer_id} (attempt {request.name.attempt}) ended while"
                f" {len(views)} blocks were read from {self._who}; none of them can be used"
            )

    def _move(
        self,
        pool: RemotePool,
        block_ids: Ids,
        views: Sequence[memoryview],
        request: ReadRequest,
        slots: tuple[int, ...],
        read: Read,
    ) -> None:
        """Part by part. The slots are read by the last one, which posts that only when its blocks are there."""
        part = request.part
        into = self._own_blocks(views, request)
        count = len(views)
        step = pool.bounce.region.num_blocks
        if into is not None:
            step = max(1, _MAX_POST_BYTES // pool.region.block_bytes)
        for start in range(0, count, step):
            end = min(start + step, count)
            steps: list[ReadStep | SlotsStep]
            if into is None:
                steps = [_into_bounce(pool, block_ids[start:end], part)]
            else:
                own, own_ids = into
                steps = [ReadStep(own, own_ids[start:end], pool.blocks, block_ids[start:end], part)]
            if end == count:
                steps.append(SlotsStep(pool, slots))
            self._carry_out(pool, steps, read)
            if into is None:
                at, to = block_span(pool.region.block_bytes, part)
                for number in range(end - start):
                    views[start + number][:] = pool.bounce.block(number)[at:to]

    def _own_blocks(
        self, views: Sequence[memoryview], request: ReadRequest
    ) -> tuple[DescribedRegion, Ids] | None:
        """Where the views are in this worker's own pool; None where they are not."""
        pool = self._nixl_thread.pool
        blocks = self._nixl_thread.pool_blocks
        found = None if pool is None else pool.find(views, request.part)
        return None if found is None or blocks is None else (blocks, found.astype(np.int32))

    def _carry_out(self, pool: RemotePool, steps: Sequence[ReadStep | SlotsStep], read: Read) -> None:
        """Until they are terminal. Raises ReadStoppedError before and behind them, TransferError without a link."""
        read.check()
        with self._lock:
            self._check_link()
            self._is_posted = True
        try:
            self._wait(self._posted(pool, steps))
        finally:
            with self._lock:
                self._is_posted = False
        self._check_link()
        read.check()

    def _check_link(self) -> None:
        if self._is_interrupted:
            raise TransferError(f"the link to {self._who} is gone")

    def _find_out(self, pool: RemotePool, read: Read) -> None:
        """Whether a read becomes terminal while the peer rests."""
        with read.interruptible(self.stop_asking):
            self._ask(Help.PAUSE)
            read_frame(self._sock, NixlResting, MAX_NIXL_FRAME_BYTES)
        self._needs_help = False
        self._read_nonce(pool, read)
        self._needs_help = self._is_helped
        if self._is_helped:
            self._ask(Help.END)

    def _read_nonce(self, pool: RemotePool, read: Read) -> int:
        self._wait_at_most(self._posted(pool, [SlotsStep(pool, _NONCE_SLOT)]), read)
        return pool.found.numbers(1)[0]

    def _check_open(self) -> None:
        """The peer says nothing unless it is asked: what can be heard now is the end of its half of the connection."""
        self._check_link()
        if self._end.poll(0):
            raise PeerUnreachableError(f"{self._who} closed its data connection")

    def _ask(self, wanted: Help) -> None:
        write_frame(self._sock, NixlAsk(wanted), MAX_NIXL_FRAME_BYTES)
        self._is_helped = wanted is Help.BEGIN

    def _help_if_late(self, posted: NixlRead) -> None:
        """The read may need help, which it is not given yet. It goes on in any case."""
        if not posted.is_late or posted.is_terminal or self._is_helped:
            return
        self._needs_help = None
        try:
            self._ask(Help.BEGIN)
        except OSError as error:
            logger.debug("%s cannot be asked for help: %s", self._who, error)

    def _posted(self, pool: RemotePool, steps: Sequence[ReadStep | SlotsStep]) -> NixlRead:
        posted = NixlRead(pool, steps)
        self._nixl_thread.post(posted)
        return posted

    def _wait(self, posted: NixlRead) -> None:
        """Until the read is terminal: blocks of the pool are its target."""
        has_told = False
        while not posted.is_terminal:
            if not posted.hear(self._timeout_seconds) and not has_told:
                has_told = True
                logger.warning(
                    "a read from %s is not terminal after %s s; its blocks stay in quarantine",
                    self._who,
                    self._timeout_seconds,
                )
            self._help_if_late(posted)
        posted.check()

    def _wait_at_most(self, posted: NixlRead, read: Read) -> None:
        """Until it is terminal, stopped, or too late: it cannot reach blocks of the pool, and may end when it will."""
        until = time.monotonic() + self._timeout_seconds
        with read.interruptible(posted.wake):
            while not (posted.is_terminal or read.is_stopped) and (left := until - time.monotonic()) > 0:
                posted.hear(left)
                self._help_if_late(posted)
        read.check()
        if not posted.is_terminal:
            raise PeerSilentError(f"nixl read nothing from {self._who} in {self._timeout_seconds} s")
        posted.check()


class NixlReceiver:
    """Owns the connections to peers. One on which anything but a stale lease went wrong is closed, never reused."""

    def __init__(self, nixl_thread: NixlThread, timeout_seconds: float) -> None:
        self._nixl_thread = nixl_thread
        self._timeout_seconds = timeout_seconds
        self._peers: Kept[_Peer] = Kept(harmless=StaleLeaseError)

    def probe(self, source: Source, read: Read) -> None:
        """Connect, authenticate, and read the nonce and a block. Raises what ``fetch`` would."""
        self._use(source, read, lambda peer: peer.connect(read))

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read part by part. Stopping ends the read behind the part that is posted, once that is terminal."""
        self._use(source, read, lambda peer: peer.read(request, views, read))

    def forget(self, source: Source) -> None:
        """Close its connection and forget its pool."""
        self._peers.forget(source)

    def close(self) -> None:
        """Close every connection, and the agent: a read that is not terminal fails."""
        self._peers.close()
        self._nixl_thread.close()

    def _use(self, source: Source, read: Read, work: Callable[[_Peer], object]) -> None:
        """Work with the peer; whatever goes wrong is raised as ``fetch`` says."""
        read.check()
        try:
            with self._peers.using(
                source, lambda: _Peer(source, self._nixl_thread, self._timeout_seconds)
            ) as peer:
                work(peer)
        except (OSError, TransferError) as error:
            raise as_outcome(error, source, read) from error


def _into_bounce(pool: RemotePool, block_ids: Ids, part: BlockPart | None = None) -> ReadStep:
    """These of its blocks, or the part of each, into the first ones of ``pool.bounce``."""
    return ReadStep(
        pool.bounce_blocks, np.arange(len(block_ids), dtype=np.int32), pool.blocks, block_ids, part
    )
