"""A stuck peer delays no other one, and every thread that reads ends with its link, by idling, at close."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from contract.identity import Role
from kv_transfer.data.threads import PullThreads
from kv_transfer.protocol.digests import Share
from kv_transfer.protocol.orders import PullJob
from kv_transfer.protocol.reads import LeaseName, Read, ReadRequest, Source
from kv_transfer.transports.transport import ReceiverTraits, ReceiverTransport
from tests.kv_transfer.builders import TOKENS, Pair, prompt_of, settings_for, worker
from tests.kv_transfer.waiting import until
from tests.leftovers import Leftovers

WAIT = 30.0


def source(name: str) -> Source:
    return Source(name, f"boot-{name}", "127.0.0.1:1", "token", "tcp")


def job(name: str, key: str, read: Read | None = None) -> PullJob:
    return PullJob(
        key, source(name), LeaseName("t", 0, "l"), 0, (1,), (Share(0, (1,)),), (1,), read or Read()
    )


class Played:
    """Plays the jobs and the callbacks of PullThreads: jobs of the source "stuck" wait until they are stopped."""

    def __init__(self, idle_seconds: float = 60.0) -> None:
        self.done: list[str] = []
        self.ran_in: dict[str, int] = {}
        self.forgotten: list[Source] = []
        self.bugs: list[BaseException] = []
        self.changed = threading.Condition()
        self.stuck = threading.Event()
        self.threads = PullThreads(self._forget, self._bug, idle_seconds)
        self._claimed: list[Callable[[], None]] = []

    def post(self, job: PullJob) -> bool:
        return self.threads.post(job.source, job.key, job.read, partial(self._work, job))

    def claim(self, job: PullJob) -> Callable[[], None] | None:
        claimed = self.threads.claim(job.source, job.key, job.read, partial(self._work, job))
        if claimed is None:
            return None
        self._claimed.append(claimed)
        return partial(self._run, claimed)

    def close(self) -> None:
        """End all threads, also after a test that has failed: they wait for the jobs that were claimed."""
        self.threads.stop()
        while self._claimed:
            self._run(self._claimed[0])
        self.threads.join()

    def _run(self, claimed: Callable[[], None]) -> None:
        self._claimed.remove(claimed)
        claimed()

    def _work(self, job: PullJob) -> None:
        self.ran_in[job.key] = threading.get_ident()
        if job.key == "bug":
            raise RuntimeError("a bug")
        if job.source.worker_id == "stuck" and not job.read.is_stopped:
            stopped = threading.Event()
            with job.read.interruptible(stopped.set):
                self.stuck.set()
                assert stopped.wait(WAIT)
        with self.changed:
            self.done.append(job.key)
            self.changed.notify_all()

    def _forget(self, source: Source) -> None:
        with self.changed:
            self.forgotten.append(source)
            self.changed.notify_all()

    def _bug(self, error: BaseException) -> None:
        with self.changed:
            self.bugs.append(error)
            self.changed.notify_all()


@contextmanager
def playing(idle_seconds: float = 60.0) -> Iterator[tuple[Played, Leftovers]]:
    """Yield threads that have ended at the end of the test, and what is newer than they are."""
    leftovers = Leftovers()
    played = Played(idle_seconds)
    try:
        yield played, leftovers
    finally:
        played.close()


def test_sources_do_not_wait_for_each_other_and_close_ends_everything() -> None:
    with playing() as (played, leftovers):
        assert played.post(job("stuck", "one"))
        assert played.stuck.wait(WAIT)
        for key in ("a", "b", "c"):
            assert played.post(job("quick", key))
        with played.changed:
            assert played.changed.wait_for(lambda: played.done == ["a", "b", "c"], WAIT)
        until(lambda: played.threads.current_keys == ["one"], "the last quick job has ended")
        assert len(leftovers.threads("kv-pull-")) == 2
        played.threads.stop()
        played.threads.stop()
        played.threads.join()
        assert played.done == ["a", "b", "c", "one"]
        assert leftovers.threads() == []
        assert not played.post(job("quick", "late"))


def test_a_thread_ends_with_its_link_after_its_jobs() -> None:
    with playing() as (played, leftovers):
        read = Read()
        played.post(job("stuck", "one", read))
        played.post(job("stuck", "two", read))
        assert played.stuck.wait(WAIT)
        (thread,) = leftovers.threads("kv-pull-")
        played.threads.leave(source("stuck"))
        assert played.forgotten == []
        played.post(job("quick", "other"))
        read.stop()
        with played.changed:
            assert played.changed.wait_for(lambda: played.forgotten == [source("stuck")], WAIT)
        thread.join(WAIT)
        assert not thread.is_alive()
        played.threads.leave(source("never read"))
        assert played.forgotten[1:] == [source("never read")]


def test_an_idle_thread_ends_and_a_later_job_gets_a_new_one() -> None:
    with playing(idle_seconds=0.01) as (played, leftovers):
        for number in range(3):
            assert played.post(job("quick", str(number)))
            with played.changed:
                assert played.changed.wait_for(lambda: played.done[-1:] == [str(number)], WAIT)  # noqa: B023
            until(lambda: not leftovers.threads("kv-pull-"), "its thread has ended")
        assert played.done == ["0", "1", "2"]
        assert played.forgotten == [], "the link stands: its connection may be used again"


def test_a_bug_is_told() -> None:
    with playing() as (played, _):
        played.post(job("quick", "bug"))
        with played.changed:
            assert played.changed.wait_for(lambda: played.bugs, WAIT)


def test_a_claimed_job_runs_in_its_callers_thread_and_later_ones_of_the_source_wait_for_it() -> None:
    with playing() as (played, _):
        claimed = played.claim(job("quick", "first"))
        assert claimed is not None
        assert played.claim(job("quick", "no second one")) is None
        played.post(job("quick", "second"))
        played.post(job("other", "beside"))
        with played.changed:
            assert played.changed.wait_for(lambda: "beside" in played.done, WAIT)
        until(lambda: played.threads.num_queued == 0, "the thread has begun with the second job, and waits")
        assert played.done == ["beside"]
        claimed()
        with played.changed:
            assert played.changed.wait_for(lambda: len(played.done) == 3, WAIT)
        assert played.done == ["beside", "first", "second"]
        assert played.ran_in["first"] == threading.get_ident() != played.ran_in["second"]
        played.threads.stop()
        assert played.claim(job("quick", "too late")) is None


def test_no_job_is_claimed_before_those_that_were_posted() -> None:
    """Law 3: blocks are counted as verified up to the first one that is not, so reads of a source keep their order."""
    with playing() as (played, _):
        read = Read()
        played.post(job("stuck", "one", read))
        assert played.stuck.wait(WAIT)
        assert played.claim(job("stuck", "two")) is None
        read.stop()
        with played.changed:
            assert played.changed.wait_for(lambda: played.done == ["one"], WAIT)


def test_join_waits_for_a_claimed_job() -> None:
    with playing() as (played, _):
        claimed = played.claim(job("quick", "claimed"))
        assert claimed is not None
        played.threads.stop()
        joining = threading.Thread(target=played.threads.join)
        joining.start()
        claimed()
        joining.join(WAIT)
        assert not joining.is_alive() and played.done == ["claimed"]


class DivertingReceiver:
    """Reads from worker ``victim`` at another address."""

    traits = ReceiverTraits()

    def __init__(self, inner: ReceiverTransport, victim: str, address: str) -> None:
        self._inner, self._victim, self._address = inner, victim, address

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        if source.worker_id == self._victim:
            source = Source(source.worker_id, source.boot_id, self._address, source.token, source.transport)
        self._inner.fetch(source, request, views, read)

    def forget(self, source: Source) -> None:
        self._inner.forget(source)

    def close(self) -> None:
        self._inner.close()


def test_a_peer_that_sends_nothing_does_not_hold_up_another() -> None:
    """The stuck one's data port accepts and sends nothing; its reads may last for 300 s."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        decode_settings = settings_for(
            "d",
            Role.DECODE,
            read_timeout_seconds=300.0,
            decorate=lambda inner: DivertingReceiver(inner, "stuck", address),
        )
        with (
            worker(settings_for("stuck", Role.PREFILL)) as stuck,
            worker(settings_for("quick", Role.PREFILL)) as quick,
            worker(decode_settings) as decode,
        ):
            driver, prompt = decode.driver, prompt_of(3)
            fetches = []
            for number, prefill in enumerate((stuck, quick)):
                pair = Pair(prefill, decode)
                prefill.lend(f"t-{number}", [0, 1, 2])
                prefill.driver.send_all(pair.send_request(str(number), prompt), [0, 1, 2], TOKENS)
                fetches.append(pair.fetch_request(str(number), prompt))
                driver.receiver.start_fetch(fetches[number])
            driver.wait_for(lambda: len(driver.published) == 2, "published")
            driver.receiver.receive_into(fetches[0].key, [10, 11, 12], 0)
            with silent.accept()[0]:
                driver.receiver.receive_into(fetches[1].key, [20, 21, 22], 0)
                driver.wait_for(lambda: driver.received == [fetches[1].key], "the other's transfer")
                assert decode.holds("t-1", [20, 21, 22])
                assert fetches[0].key in driver.scheduler.debug_state()["data"]["current"]
                assert not driver.receiver.cancel_fetch(fetches[0].key)
                driver.wait_for(lambda: driver.drained == [fetches[0].key], "drained")
