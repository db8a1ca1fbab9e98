"""The queue of a source's reads: which of them are requested ahead, and when."""

import threading
from collections.abc import Sequence

import pytest

from contract.identity import Role
from kv_transfer.data.threads import PullThreads
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import BlockPart, Read, ReadRequest, Source
from kv_transfer.transports.choosing import Chooser
from kv_transfer.transports.tcp.transport import Asked
from kv_transfer.transports.transport import ReceiverTraits, fetch_first
from tests.kv_transfer.builders import TOKENS, Pair, prompt_of, settings_for, worker
from tests.kv_transfer.test_asking_ahead import frames_in, name_of, request_of

WAIT = 30.0


def source(name: str) -> Source:
    return Source(name, "b", "127.0.0.1:1", "token")


def test_the_requests_of_queued_jobs_are_known_up_to_one_that_is_not() -> None:
    """Stopped reads are left out, since they do not come; nothing is known behind a probe."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()
    found: list[list[ReadRequest]] = []
    threads = PullThreads(lambda _source: None, lambda _error: None)

    def first() -> None:
        begun.set()
        assert go_on.wait(WAIT)
        later()

    def later() -> None:
        found.append(threads.following(source("p")))

    stopped = Read()
    threads.post(source("p"), "a", Read(), first, request_of(0))
    assert begun.wait(WAIT)
    threads.post(source("other"), "z", Read(), lambda: None, request_of(5))
    threads.post(source("p"), "b", Read(), later, request_of(1))
    threads.post(source("p"), "c", stopped, later, request_of(2))
    threads.post(source("p"), "d", Read(), later, request_of(3))
    threads.post(source("p"), "probe", Read(), later)
    threads.post(source("p"), "e", Read(), later, request_of(4))
    threads.post(source("p"), "end", Read(), done.set, request_of(5))
    stopped.stop()
    go_on.set()
    assert done.wait(WAIT)
    threads.stop()
    threads.join()
    assert found == [
        [request_of(1), request_of(3)],
        [request_of(3)],
        [request_of(3)],
        [],
        [request_of(4), request_of(5)],
        [request_of(5)],
    ]
    assert threads.following(source("p")) == threads.following(source("nobody")) == []


def test_a_source_is_asked_only_while_none_of_its_jobs_runs() -> None:
    """A request that is posted while a job runs goes with the next one."""
    runs, done = threading.Lock(), threading.Event()
    asked: list[list[ReadRequest]] = []

    def ask(_source: Source, requests: Sequence[ReadRequest]) -> None:
        assert runs.acquire(blocking=False), "a job runs"
        asked.append(list(requests))
        runs.release()

    def work() -> None:
        with runs:
            done.set()

    threads = PullThreads(lambda _source: None, lambda _error: None, ask=ask)
    try:
        for _ in range(1000):  # the thread may be faster than the one that posts
            done.clear()
            threads.post(source("p"), "a", Read(), work, request_of(0))
            assert done.wait(WAIT)
            if any(asked):
                break
        assert [request_of(0)] in asked
        asked.clear()
        run = threads.claim(source("q"), "b", Read(), work)
        assert run is not None
        threads.post(source("q"), "c", Read(), done.set, request_of(1))
        asked_beside_it = list(asked)
        run()
        assert asked_beside_it == []
    finally:
        threads.stop()
        threads.join()


@pytest.mark.parametrize("part", [None, BlockPart(0, 8)])
def test_only_the_request_of_a_job_of_one_whole_read_is_known(part: BlockPart | None) -> None:
    job = PullJob("r", source("p"), name_of(0), 2, (7, 8), (), (1, 2), Read(), part=part)
    assert job.only_request == (None if part else ReadRequest(name_of(0), 2, 2))


class Gated:
    """A worker's receiver whose first read waits for ``gate``."""

    def __init__(self, inner: Chooser) -> None:
        self._inner = inner
        self.begun, self.gate = threading.Event(), threading.Event()
        self.fetch, self.forget, self.close = inner.fetch, inner.forget, inner.close
        self.traits = ReceiverTraits(fetch_first=self.fetch_first, ask=inner.traits.ask)

    def fetch_first(
        self,
        source: Source,
        request: ReadRequest,
        views: Sequence[memoryview],
        read: Read,
        following: Sequence[ReadRequest],
    ) -> None:
        """Read once the gate is open."""
        self.begun.set()
        assert self.gate.wait(WAIT)
        fetch_first(self._inner, source, request, views, read, following)


def test_fetches_that_wait_for_one_peer_are_asked_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first one is read, three more get their blocks."""
    receivers: list[Gated] = []
    asked: list[list[str]] = []
    frames_for = Asked.frames_for

    def watched(self: Asked, request: ReadRequest, following: Sequence[ReadRequest]) -> bytes:
        frames = frames_for(self, request, following)
        asked.append([request.name.transfer_id for request in frames_in(frames)])
        return frames

    def decorate(inner: Chooser) -> Gated:
        receivers.append(Gated(inner))
        return receivers[0]

    monkeypatch.setattr(Asked, "frames_for", watched)
    reader = settings_for("d", Role.DECODE, transport="tcp", decorate=decorate)
    with worker(settings_for("p", Role.PREFILL, transport="tcp")) as prefill, worker(reader) as decode:
        pair = Pair(prefill, decode)
        fetches = [pair.fetch_request(str(number), prompt_of(2)) for number in range(4)]
        for number, fetch in enumerate(fetches):
            prefill.lend(f"t-{number}", [2 * number, 2 * number + 1])
            send = pair.send_request(str(number), prompt_of(2))
            prefill.driver.send_all(send, [2 * number, 2 * number + 1], TOKENS)
            decode.driver.receiver.start_fetch(fetch)
        decode.driver.wait_for(lambda: len(decode.driver.published) == 4, "published")
        for number, fetch in enumerate(fetches):
            decode.driver.receiver.receive_into(fetch.key, [10 + 2 * number, 11 + 2 * number], 0)
            assert receivers[0].begun.wait(WAIT)
        receivers[0].gate.set()
        decode.driver.wait_for(lambda: len(decode.driver.received) == 4, "received")
        for number in range(4):
            assert decode.holds(f"t-{number}", [10 + 2 * number, 11 + 2 * number])
    assert asked == [["t-0"], ["t-1", "t-2", "t-3"], [], []]
