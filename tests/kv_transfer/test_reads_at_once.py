"""Small reads over ``shm`` run in the thread that orders them: no other thread has to get a processor first."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from contract.identity import Role
from contract.layout import KVLayout
from contract.requests import ReceiveTransfer
from kv_transfer.counters import Completions, Counters
from kv_transfer.data.data_half import MAX_BYTES_AT_ONCE, DataHalf
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import Share, digest_of
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.transports.choosing import Chooser
from kv_transfer.transports.transport import ReceiverTraits, Senders
from tests.kv_transfer.builders import LAYOUT, TOKENS, Pair, Worker, prompt_of, settings_for, worker
from tests.kv_transfer.fakes import FlatPool

WAIT = 30.0
SOURCE = Source("p", "boot", "nowhere", "token", "played")
LARGE = KVLayout(num_layers=1, num_kv_heads=4, head_dim=128, block_size=256, dtype="float32")
"""Its blocks have 1 MiB."""


def connect(pair: Pair) -> None:
    """Let the decode worker connect to the prefill worker, twice, and wait for both."""
    receiver = pair.decode.driver.expecting
    assert receiver is not None
    transfer = pair.fetch_request("never", prompt_of(1)).transfer
    assert isinstance(transfer, ReceiveTransfer)
    for _ in range(2):
        is_over = threading.Event()
        receiver.connect(transfer, is_over.set)
        assert is_over.wait(WAIT)


class Watched:
    """A receiver that records the threads in which it reads."""

    def __init__(self, inner: Chooser) -> None:
        self._inner = inner
        self.read_in: list[str] = []
        self.traits = ReceiverTraits(is_at_hand=inner.traits.is_at_hand)
        self.forget = inner.forget
        self.close = inner.close

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Read, and record the name of the thread."""
        self.read_in.append(threading.current_thread().name)
        self._inner.fetch(source, request, views, read)


def reads_in_peers_thread(transport: str, num_fetches: int, *, is_connected: bool = False) -> list[bool]:
    """Return, fetch after fetch, whether a worker has read from another one in the thread that it has for that one.

    Else the thread that ordered the read ran it: the caller of ``receive_into``, or the control half's if the blocks were
    announced only then.
    is_connected: it has connected before the first one.
    """
    watched: list[Watched] = []

    def decorate(inner: Chooser) -> Watched:
        watched.append(Watched(inner))
        return watched[0]

    settings = settings_for("d", Role.DECODE, transport=transport, decorate=decorate)
    with (
        worker(settings_for("p", Role.PREFILL, transport=transport)) as prefill,
        worker(settings, memory=FlatPool(LAYOUT, 64)) as decode,
    ):
        pair = Pair(prefill, decode)
        prompt = prompt_of(3)
        if is_connected:
            connect(pair)
        for number in range(num_fetches):
            fetch = pair.fetch_request(str(number), prompt)
            prefill.lend(f"t-{number}", [0, 1, 2])
            prefill.driver.send_all(pair.send_request(str(number), prompt), [0, 1, 2], TOKENS)
            decode.driver.receiver.start_fetch(fetch)
            decode.driver.wait_for(lambda: fetch.key in decode.driver.published, "published")  # noqa: B023
            blocks = [10 * number, 10 * number + 1, 10 * number + 2]
            decode.driver.receiver.receive_into(fetch.key, blocks, 0)
            decode.driver.wait_for(lambda: fetch.key in decode.driver.received, "received")  # noqa: B023
            decode.driver.wait_for(lambda: not num_reads_under_way(decode), "the read's turn is over")
            assert decode.holds(f"t-{number}", blocks)
    assert {*watched[0].read_in} <= {"kv-pull-p", "kv-control", threading.current_thread().name}
    return [name == "kv-pull-p" for name in watched[0].read_in]


def num_reads_under_way(reader: Worker) -> int:
    """Return the number of reads that have begun and would delay another one."""
    return len(reader.driver.scheduler.debug_state()["data"]["current"])


def test_once_the_peers_pool_is_mapped_reads_run_in_the_thread_that_orders_them() -> None:
    assert reads_in_peers_thread("shm", 4) == [True, False, False, False]


@pytest.mark.parametrize("transport", ["shm", "auto"])
def test_a_receiver_that_was_connected_ahead_reads_its_first_blocks_in_the_thread_that_orders_them(
    transport: str,
) -> None:
    """Two workers that decode read nothing from each other until an answer moves between them."""
    assert reads_in_peers_thread(transport, 1, is_connected=True) == [False]


def test_over_a_network_every_read_runs_in_the_peers_thread() -> None:
    assert reads_in_peers_thread("tcp", 3) == [True] * 3


class AtHand:
    """Has every block of a source at hand."""

    def __init__(self) -> None:
        self.are_there = True
        self.traits = ReceiverTraits(is_at_hand=lambda _source: self.are_there)

    def fetch(self, _source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Have every block land with the bytes 7."""
        read.check()
        for view in views:
            view[:] = b"\7" * len(view)
        read.report_landed(request.num_blocks)

    def forget(self, _source: Source) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Reports:
    """The events of fetches, by key."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.changed = threading.Condition()

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        """Record the end of a read."""
        with self.changed:
            if isinstance(event, ev.PieceVerified):
                self.ended.append(key)
            self.changed.notify_all()

    def wait_for(self, *keys: str) -> None:
        """Wait until these reads have ended, in this order."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.ended == list(keys), WAIT), self.ended

    def send_event(self, _key: str, _event: ev.SendEvent) -> None:
        """Do nothing."""

    def end_expected(self, _key: str, _seconds: float) -> None:
        """Do nothing."""

    def lease_idle(self, _name: LeaseName) -> None:
        """Do nothing."""

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """Fail the test."""
        raise AssertionError(thread) from error


@contextmanager
def data_half(receiver: AtHand) -> Iterator[tuple[DataHalf, Reports]]:
    data = DataHalf(receiver, Counters(), Completions(), ["played"])
    reports = Reports()
    data.attach(Senders({}), reports)
    data.start(FlatPool(LARGE, 16))
    try:
        yield data, reports
    finally:
        data.close()


def pull(key: str, num_blocks: int) -> PullJob:
    content = memoryview(b"\7" * LARGE.block_bytes)
    ids = tuple(range(num_blocks))
    digests = tuple(digest_of(content, number) for number in ids)
    return PullJob(key, SOURCE, LeaseName("t", 0, "lease"), 0, ids, (Share(0, digests),), ids, Read())


def test_between_two_steps_only_so_many_bytes_are_read_at_once() -> None:
    num_blocks = MAX_BYTES_AT_ONCE // LARGE.block_bytes // 2
    with data_half(AtHand()) as (data, reports):
        for key in ("a", "b"):
            read = data.post_pull(pull(key, num_blocks))
            assert read is not None
            read()
        reports.wait_for("a", "b")
        assert data.post_pull(pull("c", 1)) is None
        reports.wait_for("a", "b", "c")
        data.get_finished()
        read = data.post_pull(pull("d", 1))
        assert read is not None
        read()
        reports.wait_for("a", "b", "c", "d")


def test_what_is_not_at_hand_is_read_by_the_thread_and_what_follows_it_too() -> None:
    receiver = AtHand()
    receiver.are_there = False
    with data_half(receiver) as (data, reports):
        assert data.post_pull(pull("a", 1)) is None
        reports.wait_for("a")
        receiver.are_there = True
        claimed = data.post_pull(pull("b", 1))
        assert claimed is not None
        assert data.post_pull(pull("c", 1)) is None
        claimed()
        reports.wait_for("a", "b", "c")
