"""Publishing and reading by pieces: what is verified while the rest still moves, and what one bad piece does to it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import xxhash
from msgspec.structs import replace

from contract.identity import Role
from contract.layout import KVLayout
from engine.connector import KVMemory
from engine.mailbox import Mailbox
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import DataHalf
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import Share, digest_of
from kv_transfer.protocol.orders import PublishOrder, PullJob, TransferMetadata
from kv_transfer.protocol.reads import MAX_PIECE_BLOCKS, LeaseName, Read, ReadRequest, Source, StaleLeaseError
from kv_transfer.transports.leases import Sender
from kv_transfer.transports.transport import ReceiverTraits, Senders
from tests.kv_transfer.builders import TOKENS, Pair, prompt_of, settings_for, worker
from tests.kv_transfer.fakes import ByteMemory

NAME = LeaseName("t", 0, "lease")
SOURCE = Source("p", "boot", "nowhere", "token", "played")
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
NUM_BLOCKS = 2 * MAX_PIECE_BLOCKS + 3
WAIT = 30.0


class PlayedSender(Sender):
    """Hands out how many blocks it has been given; fails when it has been given ``fails_at`` blocks already."""

    address = "nowhere"

    def __init__(self, fails_at: int = NUM_BLOCKS) -> None:
        self.num_blocks, self._fails_at = 0, fails_at

    def start(self, memory: object) -> None:
        """Nothing."""

    def publish(
        self, name: LeaseName, block_ids: Sequence[int], first_block: int = 0, group: int = 0
    ) -> bytes:
        if self.num_blocks >= self._fails_at:
            raise OSError("no room")
        self.num_blocks += len(block_ids)
        return str(len(block_ids)).encode()

    def release(self, name: LeaseName) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class PlayedReceiver:
    """Has block i land as bytes i, in pieces of so many; ``before`` is called with the number of each piece."""

    traits = ReceiverTraits()

    def __init__(self, per_piece: int, before: Callable[[int], None] = lambda _: None) -> None:
        self._per_piece, self._before = per_piece, before
        self.requests: list[ReadRequest] = []

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        self.requests.append(request)
        for number, start in enumerate(range(0, len(views), self._per_piece)):
            self._before(number)
            read.check()
            end = min(start + self._per_piece, len(views))
            for block, view in enumerate(views[start:end], request.first_block + start):
                view[:] = bytes([block % 256]) * len(view)
            read.report_landed(end)

    def forget(self, source: Source) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Reports:
    """The reports of the data half, in order."""

    def __init__(self) -> None:
        self._events = Mailbox[object]()

    def next(self) -> object:
        return self._events.get(WAIT)

    def until_end(self) -> list[object]:
        """A pull's events up to its terminal one."""
        heard = [self.next()]
        while isinstance(heard[-1], ev.PieceLanded):
            heard.append(self.next())
        return heard

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        self._events.put(event)

    def end_expected(self, key: str, seconds: float) -> None: ...

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        self._events.put(event)

    def lease_idle(self, name: LeaseName) -> None:
        self._events.put(name)

    def thread_failed(self, thread: str, error: BaseException) -> None:
        self._events.put(error)


@contextmanager
def data_half(
    sender: PlayedSender, receiver: PlayedReceiver, memory: KVMemory | None = None
) -> Iterator[tuple[DataHalf, Reports]]:
    data, reports = DataHalf(receiver, Counters(), Completions(), ["played"]), Reports()
    data.attach(Senders({"played": sender}), reports)
    data.start(memory or ByteMemory(LAYOUT, NUM_BLOCKS))
    try:
        yield data, reports
    finally:
        data.close()


def pull(num_blocks: int, bad_block: int | None = None) -> PullJob:
    """Blocks 0.. with the digests of what ``PlayedReceiver`` brings, but for one."""
    digests = [digest_of(memoryview(bytes([i % 256]) * LAYOUT.block_bytes), i) for i in range(num_blocks)]
    if bad_block is not None:
        digests[bad_block] ^= 1
    ids = tuple(range(num_blocks))
    return PullJob("r", SOURCE, NAME, 0, ids, (Share(0, tuple(digests)),), ids, Read())


def test_a_piece_is_verified_before_the_next_one_has_landed() -> None:
    """One report follows when all blocks have landed, and one when all are verified."""
    job, verified = pull(10), list[int]()
    seeds = job.seeds

    class Seeds(tuple[int, ...]):
        def __getitem__(self, part: Any) -> Any:
            verified.append(part.stop)
            return seeds[part]

    found: list[list[int]] = []
    receiver = PlayedReceiver(4, lambda _number: found.append(list(verified)))
    with data_half(PlayedSender(), receiver) as (data, reports):
        data.post_pull(replace(job, seeds=Seeds(seeds)))
        *landed, end = reports.until_end()
    assert found == [[], [4], [4, 8]]
    assert [one.num_blocks for one in landed if isinstance(one, ev.PieceLanded)] == [10]
    assert isinstance(end, ev.PieceVerified)
    assert end.num_blocks == 10


def test_a_bad_block_ends_the_read_in_its_middle() -> None:
    """The third piece is not fetched any more."""
    begun: list[int] = []
    with data_half(PlayedSender(), PlayedReceiver(4, begun.append)) as (data, reports):
        data.post_pull(pull(12, bad_block=5))
        *landed, end = reports.until_end()
    assert (landed, begun) == ([], [0, 1])
    assert isinstance(end, ev.JobFailed)
    assert "block 5 of transfer t (attempt 0) from worker p failed its digest check" in end.message


def test_pieces_that_were_verified_are_worth_nothing_when_the_lease_ends_before_the_last_one() -> None:
    def before(number: int) -> None:
        if number == 2:
            raise StaleLeaseError("the lease is over")

    with data_half(PlayedSender(), PlayedReceiver(4, before)) as (data, reports):
        data.post_pull(pull(12))
        *landed, end = reports.until_end()
    assert landed == []
    assert end == ev.JobFailed("transfer_failed", "the lease is over")


def test_a_stop_ends_a_read_before_its_next_piece() -> None:
    job, begun = pull(12), list[int]()

    def before(number: int) -> None:
        begun.append(number)
        if number == 1:
            job.read.stop()

    with data_half(PlayedSender(), PlayedReceiver(4, before)) as (data, reports):
        data.post_pull(job)
        assert reports.until_end() == [ev.JobStopped()]
    assert begun == [0, 1]


def test_blocks_are_published_range_by_range_each_with_its_grant() -> None:
    """A receiver can begin before the last range is digested."""
    ids, seeds = list(range(NUM_BLOCKS)), [7] * NUM_BLOCKS
    with data_half(PlayedSender(), PlayedReceiver(1)) as (data, reports):
        data.execute(TransferMetadata([PublishOrder("r", NAME, 5, ids, seeds)]))
        ready = [reports.next() for _ in range(3)]
    firsts, sizes = [5, 5 + MAX_PIECE_BLOCKS, 5 + 2 * MAX_PIECE_BLOCKS], [MAX_PIECE_BLOCKS] * 2 + [3]
    assert [one.first_block for one in ready if isinstance(one, ev.BlockRange)] == firsts
    assert [len(one.digests) for one in ready if isinstance(one, ev.BlockRange)] == sizes
    grants = [one.grants for one in ready if isinstance(one, ev.BlockRange)]
    assert grants == [(("played", str(size).encode()),) for size in sizes]


def test_a_range_that_fails_takes_the_rest_of_its_order_with_it(caplog: pytest.LogCaptureFixture) -> None:
    ids = list(range(NUM_BLOCKS))
    with data_half(PlayedSender(fails_at=1), PlayedReceiver(1)) as (data, reports):
        data.execute(TransferMetadata([PublishOrder("r", NAME, 5, ids, ids)]))
        data.execute(TransferMetadata([PublishOrder("s", NAME, 0, [0], [0])]))
        ready, failed, other = (reports.next() for _ in range(3))
    assert isinstance(ready, ev.BlockRange)
    what = (5 + MAX_PIECE_BLOCKS, NUM_BLOCKS - MAX_PIECE_BLOCKS, "internal", "publishing failed: no room")
    assert failed == ev.RangeFailed(*what)
    assert isinstance(other, ev.RangeFailed)
    assert "publishing blocks of r failed" in caplog.text


@pytest.mark.parametrize("num_bytes", [1, 2**20, 2**20 + 1, 3 * 2**20 + 5])
def test_a_large_block_has_the_digest_of_its_bytes(num_bytes: int) -> None:
    content = bytes(number % 251 for number in range(1000)) * (num_bytes // 1000 + 1)
    block = memoryview(content[:num_bytes])
    assert digest_of(block, 5) == xxhash.xxh3_64_intdigest(block, seed=5)
    assert digest_of(block, 6) != digest_of(block, 5)


@pytest.mark.parametrize("is_late", [False, True], ids=["fetched early", "fetched late"])
@pytest.mark.parametrize("num_cached", [0, MAX_PIECE_BLOCKS + 5])
def test_many_ranges_cross_by_shm(is_late: bool, num_cached: int) -> None:
    """However they are announced, one by one or all at once: each block is read by the grant of its own range."""
    prompt, blocks = prompt_of(NUM_BLOCKS), list(range(NUM_BLOCKS))
    with (
        worker(settings_for("p", Role.PREFILL, transport="shm"), num_blocks=NUM_BLOCKS) as prefill,
        worker(settings_for("d", Role.DECODE, transport="shm"), num_blocks=NUM_BLOCKS) as decode,
    ):
        pair = Pair(prefill, decode)
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        prefill.lend("t-r", blocks)
        if not is_late:
            decode.driver.receiver.start_fetch(fetch)
        prefill.driver.sender.open_send(send, blocks, 0)
        prefill.driver.sender.publish(send.key, len(prompt))
        prefill.driver.step()
        if is_late:
            leases = prefill.driver.scheduler.debug_state
            prefill.driver.wait_for(lambda: leases()["leases"][0]["num_published"] == NUM_BLOCKS, "published")
            decode.driver.receiver.start_fetch(fetch)
        decode.driver.wait_for(lambda: decode.driver.published, "published")
        decode.driver.receiver.receive_into(fetch.key, blocks[::-1], num_cached)
        prefill.driver.sender.finish_send(send.key, TOKENS)
        decode.driver.wait_for(lambda: decode.driver.received or decode.driver.failed, "an end")
        assert decode.driver.failed == {}
        num_bytes = decode.driver.receiver.pop_received(fetch.key).report.num_bytes
        assert num_bytes == (NUM_BLOCKS - num_cached) * decode.driver.memory.layout.block_bytes
        assert decode.holds("t-r", blocks[::-1], num_cached)
        prefill.driver.wait_for(lambda: prefill.driver.sent, "sent")
