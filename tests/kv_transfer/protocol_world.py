"""Two workers' transfers over a clock, links and data jobs that a test moves by hand; used by the protocol machine.

The transfers, the lease book and the memories are the real ones; only threads and sockets are played.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

import pytest
import xxhash

from contract.layout import KVLayout
from contract.requests import EngineRequest, ReceiveTransfer, SendTransfer
from engine.connector import Failed, FirstToken, Published
from kv_transfer.control.fetch_effects import FetchPorts
from kv_transfer.control.fetching import FetchTransfers
from kv_transfer.control.sending import SendTransfers
from kv_transfer.counters import Counters
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.events import RetryStep
from kv_transfer.protocol.handshake import PeerTarget, Session
from kv_transfer.protocol.orders import CommitJob, PublishOrder, PullJob
from kv_transfer.protocol.reads import LeaseName, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.choosing import Alternatives
from kv_transfer.transports.leases import LeaseBook
from tests.kv_transfer.builders import block_content, local_worker, request_of
from tests.kv_transfer.fakes import ByteMemory

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=2, dtype="float32")
LEASE_SECONDS = 10.0
NUM_BLOCKS = 48
JUNK = b"somebody else's"
Clock = Callable[[], float]
Command = tuple[PeerRef, msg.Message]


def prompt_of(number: int) -> list[int]:
    """Return transfer ``number``'s prompt: one to three blocks, different from all others."""
    return [number * 100 + position for position in range(2 * (number % 3) + 1)]


def num_blocks_of(number: int) -> int:
    return number % 3 + 1


class Pool:
    """Blocks of one worker; a free block contains junk."""

    def __init__(self) -> None:
        self.memory = ByteMemory(LAYOUT, NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))

    def take(self, number: int) -> list[int]:
        taken, self.free = self.free[:number], self.free[number:]
        return taken

    def give_back(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            assert block_id not in self.free
            self.memory.fill(block_id, JUNK)
        self.free += block_ids


@dataclass
class LentRequest:
    """A request in the prefill scheduler. num_ordered: tokens whose step was made."""

    request: EngineRequest
    number: int
    block_ids: list[int]
    num_published: int = 0
    num_ordered: int = 0
    is_over: bool = False
    lease: LeaseName | None = None


class Lender:
    """A prefill worker's incarnation."""

    def __init__(self, boot_id: str, clock: Clock) -> None:
        self.boot_id, self.pool = boot_id, Pool()
        self.commands: deque[Command] = deque()
        self.orders: deque[PublishOrder] = deque()
        self.requests: dict[str, LentRequest] = {}
        self.opened: set[tuple[int, int]] = set()
        self.newest: dict[str, int] = {}
        self.num_sent = 0
        worker = local_worker(LAYOUT, lease_seconds=LEASE_SECONDS, parked_seconds=LEASE_SECONDS, max_parked=2)
        self.completions = worker.completions
        self.book = LeaseBook(self._idle)
        self.book.start(self.pool.memory)
        self.sends = SendTransfers(
            worker,
            self._post,
            self.book.revoke,
            lambda _: None,
            clock,
        )

    def _idle(self, name: LeaseName) -> None:
        self.sends.lease_idle(name)

    def _post(self, ref: PeerRef, message: msg.Message) -> None:
        self.commands.append((ref, message))

    def open(self, number: int, attempt: int) -> None:
        transfer = SendTransfer(f"t{number}")
        request = request_of(f"s{number}", prompt_of(number), transfer, attempt)
        blocks = self.pool.take(num_blocks_of(number))
        self.requests[request.key] = LentRequest(request, number, blocks)
        self.opened.add((number, attempt))
        self.sends.open_send(request, blocks, 0)
        self.saw(f"t{number}", attempt)

    def saw(self, transfer_id: str, attempt: int) -> None:
        self.newest[transfer_id] = max(attempt, self.newest.get(transfer_id, attempt))

    def step(self) -> None:
        """Compute what was planned; the orders wait for the data thread."""
        orders = self.sends.pop_orders()
        for lent in self.requests.values():
            lent.num_ordered = lent.num_published
        for order in orders:
            number, self.requests[order.key].lease = self.requests[order.key].number, order.name
            for index, block_id in enumerate(order.block_ids, start=order.first_block):
                self.pool.memory.fill(block_id, block_content(f"t{number}", index))
        self.orders += orders

    def digest_next(self, is_failing: bool) -> None:
        order = self.orders.popleft()
        outcome: ev.SendEvent
        if is_failing:
            outcome = ev.RangeFailed(order.first_block, len(order.block_ids), "internal", "played")
        else:
            digests = tuple(
                digest_of(self.pool.memory.read_view(block_id), seed)
                for block_id, seed in zip(order.block_ids, order.seeds, strict=True)
            )
            self.book.extend(order.name, order.block_ids, order.first_block)
            outcome = ev.BlockRange(order.first_block, digests)
        self.sends.send_event(order.key, outcome)

    def collect(self, read_blocks: set[int]) -> None:
        """Take what was sent, in the step thread; ``read_blocks`` are being read at this moment."""
        for key in self.completions.drain()[0]:
            lent = self.requests.pop(key)
            assert lent.is_over, "reported before the scheduler had finished with it"
            assert not read_blocks & set(lent.block_ids), "reported while it is read"
            assert all(order.key != key for order in self.orders), "reported while it is digested"
            if lent.lease is not None:
                with pytest.raises(StaleLeaseError):
                    self.book.check(lent.lease)
            self.pool.give_back(lent.block_ids)
            self.num_sent += 1


@dataclass(eq=False)
class Reading:
    """A posted pull. stack: holds the lease's reader while its bytes cross. source_blocks: those of the lender."""

    job: PullJob
    stage: str = "posted"
    stack: ExitStack = field(default_factory=ExitStack)
    views: Sequence[memoryview] = ()
    lender: Lender | None = None
    source_blocks: set[int] = field(default_factory=set)


@dataclass
class FetchedRequest:
    """A request in the decode scheduler."""

    request: EngineRequest
    number: int
    boot_id: str
    block_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    is_published: bool = False
    is_given_up: bool = False


class Fetcher:
    """A decode worker's incarnation."""

    def __init__(self, boot_id: str, clock: Clock) -> None:
        self.boot_id, self.pool = boot_id, Pool()
        self.commands: deque[tuple[PeerTarget | None, PeerRef, msg.Message]] = deque()
        self.lanes: dict[tuple[str, str], deque[Reading]] = {}
        self.commits: deque[CommitJob] = deque()
        self.requests: dict[str, FetchedRequest] = {}
        self.committed: set[tuple[str, int]] = set()
        self.num_received = 0
        self._numbers = count()
        self.num_reads: Counter[tuple[str, int]] = Counter()
        self.alternatives = Alternatives(Counters())
        worker = local_worker(LAYOUT)
        self.completions = worker.completions
        self.fetches = FetchTransfers(
            worker,
            FetchPorts(
                self._dial,
                self._post,
                self._pull,
                self.commits.append,
                self._choose,
                self.alternatives,
            ),
            clock,
        )

    def _dial(self, target: PeerTarget, message: msg.Message) -> None:
        self.commands.append((target, PeerRef(target.boot_id, is_dialed=True), message))

    def _post(self, ref: PeerRef, message: msg.Message) -> None:
        if isinstance(message, msg.ReleaseLease):
            assert (message.transfer_id, message.attempt) in self.committed, "released before it was verified"
        self.commands.append((None, ref, message))

    def _pull(self, job: PullJob) -> None:
        for lane in self.lanes.values():
            for posted in lane:
                assert not set(posted.job.block_ids) & set(job.block_ids), "read twice at once"
        for block in range(job.first_block, job.first_block + len(job.block_ids)):
            self.num_reads[job.key, block] += 1
            assert self.num_reads[job.key, block] <= 1 + len(RetryStep), "read again and again"
        self.lanes.setdefault((job.source.boot_id, job.source.transport), deque()).append(Reading(job))

    def _choose(self, session: Session, _told: Callable[[Source, Source], bool]) -> Source:
        """Return the first of two transports."""
        sources = [
            Source("p", session.boot_id, "127.0.0.1:2", session.token, name) for name in ("shm", "tcp")
        ]
        self.alternatives.begin(sources)
        return sources[0]

    def outstanding(self, key: str) -> bool:
        readings = (reading for lane in self.lanes.values() for reading in lane)
        return any(reading.job.key == key for reading in readings) or any(
            commit.key == key for commit in self.commits
        )

    def start(self, number: int, attempt: int, boot_id: str) -> None:
        transfer = ReceiveTransfer(f"t{number}", "p", boot_id, "127.0.0.1:1")
        request = request_of(f"d{next(self._numbers)}", prompt_of(number), transfer, attempt)
        self.requests[request.key] = FetchedRequest(request, number, boot_id)
        self.fetches.start_fetch(request)

    def step(self) -> None:
        """Take the events, and what was received."""
        for key in self.completions.drain()[1]:
            fetched = self.requests.pop(key)
            received = self.fetches.pop_received(key)
            assert received.first_tokens == [FirstToken(fetched.number)]
            assert not self.outstanding(key)
            for index, block_id in enumerate(fetched.block_ids):
                assert self._holds(block_id, fetched.number, index), "committed what is not the prompt's"
            self.pool.give_back(fetched.block_ids)
            self.num_received += 1
        for event in self.fetches.pop_events():
            if isinstance(event, Published):
                self.requests[event.key].is_published = True
                continue
            fetched = self.requests.pop(event.key)
            assert fetched.is_given_up or isinstance(event, Failed)
            self._give_back(fetched)

    def reserve(self, key: str, num_cached: int) -> None:
        fetched = self.requests[key]
        fetched.block_ids = self.pool.take(num_blocks_of(fetched.number))
        fetched.num_cached = min(num_cached, len(fetched.block_ids))
        for index in range(fetched.num_cached):
            self.pool.memory.fill(fetched.block_ids[index], block_content(f"t{fetched.number}", index))
        self.fetches.receive_into(key, fetched.block_ids, fetched.num_cached)

    def cancel(self, key: str) -> None:
        fetched = self.requests[key]
        fetched.is_given_up = True
        if self.fetches.cancel_fetch(key):
            del self.requests[key]
            self._give_back(fetched)

    def _give_back(self, fetched: FetchedRequest) -> None:
        assert not self.outstanding(fetched.request.key), "freed while a read into it is not terminal"
        self.pool.give_back(fetched.block_ids)

    def _holds(self, block_id: int, number: int, index: int) -> bool:
        probe = ByteMemory(LAYOUT, 1)
        probe.fill(0, block_content(f"t{number}", index))
        return self.pool.memory.read_view(block_id) == probe.read_view(0)

    def commit_next(self) -> None:
        job = self.commits.popleft()
        if job.read.is_stopped:
            self.fetches.fetch_event(job.key, ev.JobStopped())
            return
        readings = (reading for lane in self.lanes.values() for reading in lane)
        assert all(reading.job.key != job.key for reading in readings), "committed before it was verified"
        fetched = self.requests[job.key]
        transfer = fetched.request.transfer
        assert isinstance(transfer, ReceiveTransfer)
        missing = list(enumerate(fetched.block_ids))[fetched.num_cached :]
        assert list(job.block_ids) == [block_id for _, block_id in missing]
        for index, block_id in missing:
            assert self._holds(block_id, fetched.number, index), "committed what was not verified"
        self.committed.add((transfer.transfer_id, fetched.request.attempt))
        self.fetches.fetch_event(job.key, ev.CommitDone())

    def advance_lane(self, source: tuple[str, str], lender: Lender | None, how: str) -> None:
        """Advance the lane's first read by a stage; ``lender`` is its living sender. how: go, break, corrupt."""
        reading = self.lanes[source][0]
        outcome = self._outcome(reading, lender, how)
        if outcome is None:
            return
        reading.stack.close()
        self.lanes[source].popleft()
        self.fetches.fetch_event(reading.job.key, outcome)

    def _outcome(self, reading: Reading, lender: Lender | None, how: str) -> ev.FetchEvent | None:
        job = reading.job
        if job.read.is_stopped:
            return ev.JobStopped()
        if how == "break" or (lender is None and reading.stage != "landed"):
            return ev.JobFailed("transfer_failed", "the connection broke", may_heal=True)
        try:
            if reading.stage == "posted" and lender is not None:
                self._begin(reading, lender)
            elif reading.stage == "reading" and lender is not None:
                self._land(reading, lender, how == "corrupt")
            else:
                return self._verify(job)
        except StaleLeaseError as error:
            return ev.JobFailed(error.kind, error.message)
        return None

    def _begin(self, reading: Reading, lender: Lender) -> None:
        request = ReadRequest(reading.job.name, reading.job.first_block, len(reading.job.block_ids))
        reading.views = reading.stack.enter_context(lender.book.reading(request))
        reading.stage, reading.lender = "reading", lender
        for lent in lender.requests.values():
            if (lent.request.attempt, f"t{lent.number}") == (
                reading.job.name.attempt,
                reading.job.name.transfer_id,
            ):
                reading.source_blocks = set(lent.block_ids[request.first_block : request.end_block])

    def _land(self, reading: Reading, lender: Lender, is_corrupt: bool) -> None:
        job = reading.job
        for block_id, view in zip(job.block_ids, reading.views, strict=True):
            assert block_id not in self.pool.free, "written after it was freed"
            self.pool.memory.write_view(block_id)[:] = view
        if is_corrupt:
            self.pool.memory.write_view(job.block_ids[0])[0] ^= 1
        reading.stack.close()
        reading.source_blocks = set()
        lender.book.check(job.name)
        reading.stage = "landed"
        self.fetches.fetch_event(job.key, ev.PieceLanded(len(job.block_ids), 0.0, 0.0))

    def _verify(self, job: PullJob) -> ev.FetchEvent:
        for block_id, digest, seed in zip(job.block_ids, job.shares[0].digests, job.seeds, strict=True):
            if digest_of(self.pool.memory.read_view(block_id), seed) != digest:
                return ev.JobFailed("transfer_failed", "digest", may_heal=True)
        return ev.PieceVerified(len(job.block_ids), 0.0)


def digest_of(view: memoryview, seed: int) -> int:
    digest: int = xxhash.xxh3_64_intdigest(view, seed=seed)
    return digest


@dataclass(eq=False)
class Wire:
    """A control link: the messages in both directions, and the ends that have not noticed that it broke."""

    lender: Lender
    fetcher: Fetcher
    to_lender: list[msg.Message] = field(default_factory=list)
    to_fetcher: list[msg.Message] = field(default_factory=list)
    is_broken: bool = False
    is_known_to_lender: bool = True
    is_known_to_fetcher: bool = True

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.lender.boot_id, is_dialed=True)
