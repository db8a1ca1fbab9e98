"""The data halves of several ranks as one, against ranks that a test plays message by message."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from contract.errors import ErrorKind, InternalError, SettingError, TransferError
from contract.identity import Role
from contract.layout import Side
from engine.mailbox import Mailbox
from kv_transfer.counters import Completions, Counters
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import Share
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.reads import LeaseName, Read, ReadStoppedError, Source, rank_boot_id
from kv_transfer.ranks import rank_messages as messages
from kv_transfer.ranks.aggregation import RankProgress
from kv_transfer.ranks.rank_data import RankSettings, rank_settings
from kv_transfer.ranks.rank_data_group import RankDataGroup
from tests.kv_transfer.builders import LAYOUT, settings_for
from tests.kv_transfer.played_ranks import PlayedRank

NAME = LeaseName("t", 0, "lease")
SOURCE = Source("p", "boot", "there:0", "token", "tcp", ("there:1",))
FAILURE = ev.JobFailed(ErrorKind.TRANSFER_FAILED, "a block was damaged")


@dataclass
class Reports:
    """Fulfils ``DataReports``."""

    events: Mailbox[tuple[str, Any]] = field(default_factory=Mailbox)

    def send_event(self, key: str, event: ev.SendEvent) -> None:
        self.events.put((key, event))

    def end_expected(self, key: str, seconds: float) -> None: ...

    def fetch_event(self, key: str, event: ev.FetchEvent) -> None:
        self.events.put((key, event))

    def lease_idle(self, name: LeaseName) -> None:
        self.events.put(("idle", name))

    def thread_failed(self, thread: str, error: BaseException) -> None:
        self.events.put((thread, str(error)))

    def next(self) -> tuple[str, Any]:
        return self.events.get(30)


@dataclass
class World:
    group: RankDataGroup
    reports: Reports
    ranks: list[PlayedRank]
    counters: Counters
    rate: float | None = None

    def pull(self, read: Read | None = None) -> tuple[Read, list[PullJob]]:
        """Post a read of four blocks; return what each rank receives."""
        read = read or Read()
        shares = (Share(0, (1, 2, 3, 4)), Share(1, (5, 6, 7, 8)))
        job = PullJob("r", SOURCE, NAME, 0, (9, 8, 7, 6), shares, (0, 0, 0, 0), read)
        self.group.post_pull(job)
        return read, [rank.receive() for rank in self.ranks]

    def probe(self, read: Read) -> None:
        self.rate = self.group.sessions.probe(SOURCE, read)

    def assert_nothing_reported(self) -> None:
        """Check that all messages of the ranks so far were received, and none was passed on."""
        marker = ev.BlockRange(0, (1,))
        for rank in self.ranks:
            rank.send(messages.RangeReport("marker", marker))
        assert self.reports.next()[0] == "marker"


@contextmanager
def two_ranks() -> Iterator[World]:
    counters = Counters()
    reports = Reports()
    settings = rank_settings(settings_for("d", Role.DECODE), Side(LAYOUT, 2))
    group = RankDataGroup(settings, counters, Completions().drain)
    group.attach(reports, lambda: reports.events.put(("serving", None)))
    pairs = [socket.socketpair() for _ in range(2)]
    ranks = [PlayedRank(theirs) for _, theirs in pairs]
    group.connect([ours for ours, _ in pairs], [theirs.fileno() for _, theirs in pairs])
    try:
        yield World(group, reports, ranks, counters)
    finally:
        group.close()
        for rank in ranks:
            rank.close()


def test_each_rank_reads_its_own_share() -> None:
    with two_ranks() as world:
        _, received = world.pull()
        assert [message.shares for message in received] == [
            (Share(0, (1, 2, 3, 4)),),
            (Share(1, (5, 6, 7, 8)),),
        ]
        assert received[0].key == received[1].key
        assert received[1].source.of_rank(1).address == "there:1"


def test_a_failure_on_one_rank_waits_for_the_other() -> None:
    """Law 2: rank 0 still reads, so the blocks stay quarantined: nothing is reported before its read is terminal."""
    with two_ranks() as world:
        read, received = world.pull()
        key = received[0].key
        world.ranks[1].send(messages.JobReport(key, ev.PieceLanded(4, 1.0, 2.0)))
        world.ranks[1].send(messages.JobReport(key, FAILURE))
        assert [rank.receive() for rank in world.ranks] == [messages.Stop(key)] * 2
        world.assert_nothing_reported()
        assert world.group.debug_state()["current"] == [{"request": "r", "ranks": [0]}]
        assert not read.is_stopped, "other reads of the same request go on until the end is reported"
        world.ranks[0].send(messages.JobReport(key, ev.JobStopped()))
        assert world.reports.next() == ("r", FAILURE)
        assert world.group.debug_state()["current"] == []


def test_a_stop_reaches_every_rank() -> None:
    """Also one that came before the job did."""
    with two_ranks() as world:
        read, received = world.pull()
        read.stop()
        assert [rank.receive() for rank in world.ranks] == [messages.Stop(received[0].key)] * 2
        world.ranks[0].send(messages.JobReport(received[0].key, ev.JobStopped()))
        world.ranks[1].send(messages.JobReport(received[0].key, ev.PieceVerified(4, 3.0)))
        assert world.reports.next() == ("r", ev.JobStopped())
        _, received = world.pull(read)
        assert [rank.receive() for rank in world.ranks] == [messages.Stop(received[0].key)] * 2


def test_reports_of_all_ranks_are_passed_on() -> None:
    with two_ranks() as world:
        _, received = world.pull()
        key = received[0].key
        for rank in world.ranks:
            rank.send(messages.Counted({"transfer_blocks_total{transport=tcp}": 4.0}))
            rank.send(messages.JobReport(key, ev.PieceLanded(4, 1.0, 2.0)))
            rank.send(messages.JobReport(key, ev.PieceVerified(4, 3.0)))
        assert world.reports.next() == ("r", ev.PieceLanded(4, 1.0, 2.0))
        assert world.reports.next() == ("r", ev.PieceVerified(4, 3.0))
        assert world.counters.snapshot() == {"transfer_blocks_total{transport=tcp}": 8.0}
        world.group.post_commit(CommitJob("r", (9, 8), Read()))
        commits = [rank.receive() for rank in world.ranks]
        assert [message.block_ids for message in commits] == [(9, 8)] * 2
        world.ranks[1].send(messages.JobReport(commits[0].key, ev.CommitDone()))
        world.assert_nothing_reported()
        world.ranks[0].send(messages.JobReport(commits[0].key, ev.CommitDone()))
        assert world.reports.next() == ("r", ev.CommitDone())


def test_a_lease_is_idle_when_no_rank_reads_it() -> None:
    with two_ranks() as world:
        world.group.release(NAME)
        assert [rank.receive() for rank in world.ranks] == [messages.Release(NAME)] * 2
        world.ranks[1].send(messages.LeaseIdle(NAME))
        world.assert_nothing_reported()
        world.ranks[0].send(messages.LeaseIdle(NAME))
        assert world.reports.next() == ("idle", NAME)


def test_a_session_has_begun_when_it_has_on_every_rank() -> None:
    """Until then the peer must not use it: it might show its token to a rank that would refuse it."""
    with two_ranks() as world:
        begun: list[str] = []
        for token in ("one", "two"):
            assert not world.group.sessions.begin(token, lambda token=token: begun.append(token))  # type: ignore[misc]
            assert [rank.receive() for rank in world.ranks] == [messages.BeginSession(token)] * 2
        world.group.sessions.end("one")
        assert [rank.receive() for rank in world.ranks] == [messages.EndSession("one")] * 2
        for token in ("one", "two"):
            world.ranks[0].send(messages.Answer(token))
        world.assert_nothing_reported()
        assert begun == []
        for token in ("one", "two"):
            world.ranks[1].send(messages.Answer(token))
        world.assert_nothing_reported()
        assert begun == ["two"]


def in_thread(action: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except TransferError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.mark.parametrize(("why_not", "message"), [(None, ""), ("no such folder", "rank 1: no such folder")])
def test_a_peer_can_be_read_when_every_rank_can(why_not: str | None, message: str) -> None:
    """A transport is chosen for all ranks; a rank that cannot read over it is named."""
    with two_ranks() as world:
        thread, raised = in_thread(lambda: world.probe(Read()))
        key, _ = (rank.receive().key for rank in world.ranks)
        world.ranks[0].send(messages.Answer(key, None))
        world.assert_nothing_reported()
        assert thread.is_alive()
        world.ranks[1].send(messages.Answer(key, why_not))
        thread.join(30)
        assert [str(error) for error in raised] == ([message] if message else [])


@pytest.mark.parametrize(
    ("rates", "expected"), [((3.0, 2.0), 2.0), ((3.0, None), None), ((None, None), None)]
)
def test_a_peer_is_read_as_fast_as_by_the_slowest_rank(
    rates: tuple[float | None, float | None], expected: float | None
) -> None:
    """If a rank measures nothing, nothing can be compared."""
    with two_ranks() as world:
        thread, raised = in_thread(lambda: world.probe(Read()))
        for rank, rate in zip(world.ranks, rates, strict=True):
            rank.send(messages.Answer(rank.receive().key, None, rate))
        thread.join(30)
        assert raised == []
        assert world.rate == expected


def test_a_probe_can_be_stopped_and_ends_with_the_ranks() -> None:
    with two_ranks() as world:
        read = Read()
        thread, raised = in_thread(lambda: world.probe(read))
        key, _ = (rank.receive().key for rank in world.ranks)
        read.stop()
        assert [rank.receive() for rank in world.ranks] == [messages.Stop(key)] * 2
        for rank in world.ranks:
            rank.send(messages.Answer(key, "the read was stopped"))
        thread.join(30)
        assert isinstance(raised[0], ReadStoppedError)
        thread, raised = in_thread(lambda: world.probe(Read()))
        assert world.ranks[0].receive().source == SOURCE
        world.group.sessions.close()
        thread.join(30)
        assert "the ranks have ended" in str(raised[0])
        with pytest.raises(TransferError, match="the ranks have ended"):
            world.probe(Read())


def test_only_what_every_rank_can_do_is_offered() -> None:
    """In the first rank's order, with the address of each."""
    with two_ranks() as world:
        offers = [Offer("shm", "/a"), Offer("tcp", "h:1")]
        world.ranks[0].send(messages.Opened(offers, ["shm", "nixl", "tcp"]))
        with pytest.raises(InternalError, match=r"ranks \[1\] did not open"):
            world.group.begin(0.05)
        assert world.group.opened() == messages.Opened([], [])
        world.ranks[1].send(messages.Opened([Offer("tcp", "h:2")], ["tcp", "nixl"]))
        world.group.begin()
        assert world.reports.next() == ("serving", None)
        together = messages.Opened([Offer("tcp", "h:1", ("h:2",))], ["nixl", "tcp"])
        assert world.group.opened() == together


def test_a_bug_in_a_rank_ends_the_worker() -> None:
    """A bug that a rank reports, and a message that makes no sense."""
    with two_ranks() as world:
        world.ranks[1].send(messages.ThreadFailed("kv-data", "KeyError('x')"))
        thread, error = world.reports.next()
        assert thread == "kv-data"
        assert "on rank 1: KeyError" in error
        world.ranks[0].send(messages.JobReport("77", ev.CommitDone()))
        thread, error = world.reports.next()
        assert (thread, "job 77" in error) == ("kv-ranks-0", True)


def test_a_dead_rank_does_not_delay_the_others() -> None:
    """Its executor notices its death; the other sockets go on."""
    with two_ranks() as world:
        world.ranks[1].close()
        world.group.release(NAME)
        assert world.ranks[0].receive() == messages.Release(NAME)
        world.ranks[0].send(messages.RangeReport("r", ev.BlockRange(0, (1,))))
        world.ranks[0].send(messages.ThreadFailed("marker", ""))
        assert world.reports.next()[0] == "marker"
        with suppress(OSError):
            world.ranks[0].close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decorate": lambda inner: inner}, "decorate is for workers of one rank; this one has 2"),
        ({"data_port": 65535}, "data_port is 65535, and each of 2 ranks needs a port from there on"),
    ],
)
def test_settings_that_ranks_cannot_have(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        rank_settings(settings_for("p", Role.PREFILL, **change), Side(LAYOUT, 2))


def test_ports_and_boot_ids_of_ranks() -> None:
    """Ports follow the first one's; names of sockets and agents are made of boot ids of their own."""
    settings = settings_for("p", Role.PREFILL, data_port=5000, boot_id="b")
    each = rank_settings(settings, Side(LAYOUT, 2))
    assert [(one.data_port, one.boot_id) for one in each] == [(5000, "b.0"), (5001, "b.1")]
    assert RankSettings.model_validate_json(each[1].encoded()) == each[1]
    assert settings.secret.encode() not in each[1].encoded()
    assert rank_settings(settings_for("p", Role.PREFILL), Side(LAYOUT, 2))[1].data_port == 0
    assert (rank_boot_id("b", 0, 1), SOURCE.of_rank(1).boot_id) == ("b", "boot.1")


def test_progress_is_that_which_the_ranks_have_reported() -> None:
    """P4: a rank that does not answer is asked once, and none of its counts moves."""
    with two_ranks() as world:
        listeners = ["listener on rank 0", "listener on rank 1"]
        assert world.group.progress() == dict.fromkeys(listeners, 0)
        assert [rank.receive() for rank in world.ranks] == [messages.RequestProgress()] * 2
        world.ranks[1].send(messages.Progress({"data": 7}))
        world.assert_nothing_reported()
        assert world.group.progress() == {listeners[0]: 0, listeners[1]: 1, "data on rank 1": 7}
        assert world.ranks[1].receive() == messages.RequestProgress()
        _, received = world.pull()
        assert [message.shares[0].rank for message in received] == [0, 1], "rank 0 was not asked again"


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2), st.integers(0, 9))), max_size=40))
def test_no_rank_is_asked_twice_and_each_report_counts(happenings: list[tuple[int, int] | None]) -> None:
    """P4: None is a question, else a rank answers with a count, if it was asked."""
    progress, owing, num_reports, last = RankProgress(3), set[int](), [0] * 3, dict[str, int]()
    for each in happenings:
        if each is None:
            asked = progress.to_ask()
            assert not owing.intersection(asked)
            owing.update(asked)
            assert owing == {0, 1, 2}
        elif each[0] in owing:
            rank, count = each
            owing.remove(rank)
            num_reports[rank] += 1
            last[f"data on rank {rank}"] = count
            progress.add(rank, {"data": count})
        listeners = {f"listener on rank {rank}": count for rank, count in enumerate(num_reports)}
        assert progress.counts() == {**listeners, **last}
