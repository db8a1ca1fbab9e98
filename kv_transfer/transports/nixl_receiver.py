"""The ``nixl`` transport's receiver: one-sided reads out of a peer's pool, straight into this worker's own.

The lease is asked for when a read begins and again after its last byte. A read that was posted cannot be taken back:
``fetch`` returns when it is terminal, however long that takes; until then its blocks stay in quarantine, and nobody else
waits.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from functools import partial

from contract.errors import TransferError, WorkerLostError
from kv_transfer.framing import read_frame, write_frame
from kv_transfer.transport import (
    BlockPart,
    LeaseName,
    Read,
    ReadRequest,
    Source,
    StaleLeaseError,
    block_span,
    check_sizes,
)
from kv_transfer.transports.data_port import dial, shut_down, unconnected
from kv_transfer.transports.kept import Kept
from kv_transfer.transports.nixl_owner import NixlOwner
from kv_transfer.transports.nixl_peer import RemotePool
from kv_transfer.transports.nixl_wire import (
    MAX_GRANT_BLOCKS,
    MAX_NIXL_FRAME_BYTES,
    NixlAsk,
    NixlGrant,
    NixlWelcome,
    decode_blocks,
)
from kv_transfer.transports.outcomes import as_outcome
from kv_transfer.transports.tcp_wire import DataStatus

logger = logging.getLogger(__name__)
_MAX_POST_BYTES = 64 * 2**20
"""Reads are posted in parts: the CPU may be what moves the bytes, and a stop is heard between two of them."""


def agent_name(boot_id: str) -> str:
    """What the agent of this incarnation of a worker is called."""
    return f"kvbaton-{boot_id}"


class _Peer:
    """The connection to a sender's data port, and its pool."""

    def __init__(self, source: Source, owner: NixlOwner, timeout_seconds: float) -> None:
        self._source, self._owner, self._timeout_seconds = source, owner, timeout_seconds
        self._who = f"worker {source.worker_id}"
        self._pool: RemotePool | None = None
        self._lock = threading.Lock()
        self._is_interrupted = self._is_posted = False
        self._sock = unconnected(source, timeout_seconds)

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
            self._owner.disconnect(self._pool)

    def connect(self, read: Read) -> RemotePool:
        """Dial, show the token, and prove by reading that the library reaches the right memory; once.

        Raises WorkerLostError where nobody (who knows us) answers, TransferError for a pool that cannot be read.
        """
        if self._pool is not None:
            return self._pool
        with read.interruptible(self.stop_asking):
            dial(self._sock, self._source)
            welcome = read_frame(self._sock, NixlWelcome, MAX_NIXL_FRAME_BYTES)
        if welcome.status is not DataStatus.OK:
            raise TransferError(f"{self._who} lends nothing over nixl: {welcome.message}")
        pool = self._pool = self._owner.connect(agent_name(self._source.boot_id), self._who, welcome)
        self._wait_at_most(self._owner.read_nonce(pool), read)
        if pool.found_nonce.block(0) != welcome.nonce:
            raise TransferError(f"nixl reads other memory than that of {self._who}")
        self._wait_at_most(self._owner.read_into_bounce(pool, [0]), read)
        self._ask(NixlAsk(None))
        return pool

    def read(self, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Ask, read, and ask again behind the last byte. Raises as ``ReceiverTransport.fetch``."""
        pool = self.connect(read)
        start, end = block_span(pool.region.block_bytes, request.part)
        check_sizes(views, end - start, self._who)
        granted = self._granted(request)
        with read.interruptible(self.stop_asking):
            self._say(NixlAsk(request.name, request.first_block, request.num_blocks))
            block_ids = self._hear().block_ids if granted is None else granted
        if len(block_ids) != len(views) or not all(0 <= each < pool.region.num_blocks for each in block_ids):
            raise TransferError(f"{self._who} granted something that is not in its pool")
        self._move(pool, block_ids, views, request.part, read)
        with read.interruptible(self.stop_asking):
            self._check_lease(request.name, granted, len(views))

    def _granted(self, request: ReadRequest) -> list[int] | None:
        """The sender's blocks that are wanted, if they came with the words that they are published."""
        ranges = [given.by_transport.get(self._source.transport) for given in request.grants]
        if not ranges or None in ranges:
            return None
        lent = [block_id for packed in ranges if packed is not None for block_id in decode_blocks(packed)]
        if len(lent) != sum(given.num_blocks for given in request.grants):
            raise TransferError(f"{self._who} granted other blocks than it published")
        return lent[request.within(len(lent), request.grants[0].first_block)]

    def _move(
        self,
        pool: RemotePool,
        block_ids: Sequence[int],
        views: Sequence[memoryview],
        part: BlockPart | None,
        read: Read,
    ) -> None:
        own = self._owner.pool.find(views, part) if self._owner.pool is not None else None
        (at, to), step = block_span(pool.region.block_bytes, part), pool.bounce.region.num_blocks
        if own is not None:
            step = max(1, _MAX_POST_BYTES // pool.region.block_bytes)
        for start in range(0, len(block_ids), step):
            remote_ids = block_ids[start : start + step]
            with self._posting(read):
                if own is not None:
                    self._wait(self._owner.read(pool, remote_ids, own[start : start + step], part))
                    continue
                self._wait(self._owner.read_into_bounce(pool, remote_ids, part))
            for number in range(len(remote_ids)):
                views[start + number][:] = pool.bounce.block(number)[at:to]

    @contextmanager
    def _posting(self, read: Read) -> Iterator[None]:
        """Within, a read may be open. Raises ReadStoppedError before and behind it, TransferError without a link."""
        read.check()
        with self._lock:
            self._check_link()
            self._is_posted = True
        try:
            yield
        finally:
            with self._lock:
                self._is_posted = False
        self._check_link()
        read.check()

    def _check_link(self) -> None:
        if self._is_interrupted:
            raise TransferError(f"the link to {self._who} is gone")

    def _check_lease(self, name: LeaseName, granted: list[int] | None, num_blocks: int) -> None:
        """Behind the last byte. granted: the blocks that were read before an answer to the first question was heard."""
        self._say(NixlAsk(name))
        answers = [self._take() for _ in range(1 if granted is None else 2)]
        if any(answer.status is not DataStatus.OK for answer in answers):
            raise StaleLeaseError(
                f"the lease of transfer {name.transfer_id} (attempt {name.attempt}) ended while {num_blocks} blocks"
                f" were read from {self._who}; none of them can be used"
            )
        if granted is not None and answers[0].block_ids != granted:
            raise TransferError(f"{self._who} lends other blocks than it granted")

    def _ask(self, ask: NixlAsk) -> NixlGrant:
        self._say(ask)
        return self._hear()

    def _say(self, ask: NixlAsk) -> None:
        write_frame(self._sock, ask, MAX_NIXL_FRAME_BYTES)

    def _take(self) -> NixlGrant:
        return read_frame(self._sock, NixlGrant, MAX_NIXL_FRAME_BYTES)

    def _hear(self) -> NixlGrant:
        grant = self._take()
        if grant.status is not DataStatus.OK:
            raise StaleLeaseError(f"{self._who} refused a read as {grant.status}: {grant.message}")
        return grant

    def _wait(self, posted: "Future[None]") -> None:
        """Until the read is terminal: blocks of the pool are its target."""
        if not posted.done() and not wait([posted], self._timeout_seconds).done:
            logger.warning(
                "a read from %s is not terminal after %s s; its blocks stay in quarantine",
                self._who,
                self._timeout_seconds,
            )
        posted.result()

    def _wait_at_most(self, posted: "Future[None]", read: Read) -> None:
        """Until it is terminal, stopped, or too late: it cannot reach blocks of the pool, and may end when it will."""
        stopped: Future[None] = Future()
        with read.interruptible(partial(_settle, stopped)):
            wait([posted, stopped], self._timeout_seconds, FIRST_COMPLETED)
        read.check()
        if not posted.done():
            raise TransferError(f"nixl read nothing from {self._who} in {self._timeout_seconds} s")
        posted.result()


class NixlReceiver:
    """Owns the connections to peers. One on which anything but a stale lease went wrong is closed, never reused."""

    def __init__(self, owner: NixlOwner, timeout_seconds: float) -> None:
        self._owner, self._timeout_seconds = owner, timeout_seconds
        self._peers: Kept[_Peer] = Kept(harmless=StaleLeaseError)

    def probe(self, source: Source, read: Read) -> None:
        """Connect, authenticate, and read the nonce and a block. Raises what ``fetch`` would."""
        with self._using(source, read) as peer:
            peer.connect(read)

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read part by part. Stopping ends the read behind the part that is posted, once that is terminal."""
        with self._using(source, read) as peer:
            for start in range(0, len(views), MAX_GRANT_BLOCKS):
                some = views[start : start + MAX_GRANT_BLOCKS]
                first = request.first_block + start
                peer.read(
                    ReadRequest(request.name, first, len(some), request.grants, request.part), some, read
                )

    def forget(self, source: Source) -> None:
        """Close its connection and forget its pool."""
        self._peers.forget(source)

    def close(self) -> None:
        """Close every connection, and the agent: a read that is not terminal fails."""
        self._peers.close()
        self._owner.close()

    @contextmanager
    def _using(self, source: Source, read: Read) -> Iterator[_Peer]:
        """The peer; whatever goes wrong within is raised as ``fetch`` says."""
        read.check()
        try:
            with self._peers.using(source, lambda: _Peer(source, self._owner, self._timeout_seconds)) as peer:
                yield peer
        except (OSError, TransferError, WorkerLostError) as error:
            raise as_outcome(error, source, read) from error


def _settle(stopped: "Future[None]") -> None:
    if not stopped.done():
        stopped.set_result(None)
