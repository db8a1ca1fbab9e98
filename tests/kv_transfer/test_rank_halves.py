"""The control half's end of several ranks' data halves, against ranks that a test plays word by word."""

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
from engine.mailbox import Mailbox
from kv_transfer.counters import Counters
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import Share
from kv_transfer.protocol.messages import Offer
from kv_transfer.protocol.orders import CommitJob, PullJob
from kv_transfer.protocol.reads import LeaseName, Read, ReadStoppedError, Source, rank_boot_id
from kv_transfer.ranks import words
from kv_transfer.ranks.halves import RankDataHalves
from kv_transfer.ranks.joined import rank_settings
from kv_transfer.ranks.progress import RankProgress
from tests.kv_transfer.builders import settings_for
from tests.kv_transfer.played_ranks import PlayedRank

NAME = LeaseName("t", 0, "lease")
SOURCE = Source("p", "boot", "there:0", "token", "tcp", ("there:1",))
FAILURE = ev.JobFailed(ErrorKind.TRANSFER_FAILED, "a block was damaged")


@dataclass
class Heard:
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
    halves: RankDataHalves
    heard: Heard
    ranks: list[PlayedRank]
    counters: Counters

    def pull(self, read: Read | None = None) -> tuple[Read, list[words.Pull]]:
        """Post a read of four blocks; what each rank is told."""
        read = read or Read()
        shares = (Share(1, (5, 6, 7, 8)),)
        job = PullJob("r", SOURCE, NAME, 0, (9, 8, 7, 6), (1, 2, 3, 4), (0, 0, 0, 0), read, others=shares)
        self.halves.post_pull(job)
        return read, [rank.hear() for rank in self.ranks]

    def nothing_was_told(self) -> None:
        """All that the ranks have said so far was heard, and nothing went up."""
        for rank in self.ranks:
            rank.say(words.LeaseIdle(LeaseName("marker", 0, "")))
        assert self.heard.next() == ("idle", LeaseName("marker", 0, ""))


@contextmanager
def two_ranks() -> Iterator[World]:
    counters, heard = Counters(), Heard()
    halves = RankDataHalves(2, counters)
    halves.attach(heard, halves.forget)
    pairs = [socket.socketpair() for _ in range(2)]
    ranks = [PlayedRank(theirs) for _, theirs in pairs]
    halves.connect([ours for ours, _ in pairs])
    try:
        yield World(halves, heard, ranks, counters)
    finally:
        halves.stop_trials()
        halves.close()
        for rank in ranks:
            rank.close()


def test_each_rank_is_told_its_own_share() -> None:
    with two_ranks() as world:
        _, told = world.pull()
        assert [(word.rank, word.digests, word.others) for word in told] == [
            (0, (1, 2, 3, 4), ()),
            (1, (5, 6, 7, 8), ()),
        ]
        assert told[0].number == told[1].number
        assert told[1].job(Read()).source.of_rank(1).address == "there:1"


def test_a_failure_on_one_rank_waits_for_the_other() -> None:
    """Law 2: rank 0 still reads, so the blocks stay quarantined: nothing is told before its read is terminal."""
    with two_ranks() as world:
        read, told = world.pull()
        number = told[0].number
        world.ranks[1].say(words.Landed(number, ev.PieceLanded(4, 1.0, 2.0)))
        world.ranks[1].say(words.Failed(number, FAILURE))
        assert [rank.hear() for rank in world.ranks] == [words.Stop(number)] * 2
        world.nothing_was_told()
        assert world.halves.debug_state()["current"] == [{"request": "r", "ranks": [0]}]
        assert not read.is_stopped, "other reads of the same request go on until it is told"
        world.ranks[0].say(words.Stopped(number))
        assert world.heard.next() == ("r", FAILURE)
        assert world.halves.debug_state()["current"] == []


def test_a_stop_reaches_every_rank() -> None:
    """Also one that came before the job did."""
    with two_ranks() as world:
        read, told = world.pull()
        read.stop()
        assert [rank.hear() for rank in world.ranks] == [words.Stop(told[0].number)] * 2
        world.ranks[0].say(words.Stopped(told[0].number))
        world.ranks[1].say(words.Verified(told[0].number, ev.PieceVerified(4, 3.0)))
        assert world.heard.next() == ("r", ev.JobStopped())
        _, told = world.pull(read)
        assert [rank.hear() for rank in world.ranks] == [words.Stop(told[0].number)] * 2


def test_what_all_have_done_goes_up() -> None:
    with two_ranks() as world:
        _, told = world.pull()
        number = told[0].number
        for rank in world.ranks:
            rank.say(words.Counted({"transfer_blocks_total{transport=tcp}": 4.0}))
            rank.say(words.Landed(number, ev.PieceLanded(4, 1.0, 2.0)))
            rank.say(words.Verified(number, ev.PieceVerified(4, 3.0)))
        assert world.heard.next() == ("r", ev.PieceLanded(4, 1.0, 2.0))
        assert world.heard.next() == ("r", ev.PieceVerified(4, 3.0))
        assert world.counters.snapshot() == {"transfer_blocks_total{transport=tcp}": 8.0}
        world.halves.post_commit(CommitJob("r", (9, 8), Read()))
        commits = [rank.hear() for rank in world.ranks]
        assert [word.block_ids for word in commits] == [(9, 8)] * 2
        world.ranks[1].say(words.Committed(commits[0].number))
        world.nothing_was_told()
        world.ranks[0].say(words.Committed(commits[0].number))
        assert world.heard.next() == ("r", ev.CommitDone())


def test_a_lease_is_idle_when_no_rank_reads_it() -> None:
    with two_ranks() as world:
        world.halves.release(NAME)
        assert [rank.hear() for rank in world.ranks] == [words.Release(NAME)] * 2
        world.ranks[1].say(words.LeaseIdle(NAME))
        world.nothing_was_told()
        world.ranks[0].say(words.LeaseIdle(NAME))
        assert world.heard.next() == ("idle", NAME)


def test_a_session_has_begun_when_every_rank_knows_it() -> None:
    """Until then the peer must not hear of it: it might show its token to a rank that would refuse it."""
    with two_ranks() as world:
        begun: list[str] = []
        for token in ("one", "two"):
            assert not world.halves.sessions.begin(token, lambda token=token: begun.append(token))  # type: ignore[misc]
            assert [rank.hear() for rank in world.ranks] == [words.BeginSession(token)] * 2
        world.halves.sessions.end("one")
        assert [rank.hear() for rank in world.ranks] == [words.EndSession("one")] * 2
        for token in ("one", "two"):
            world.ranks[0].say(words.SessionBegun(token))
        world.nothing_was_told()
        assert begun == []
        for token in ("one", "two"):
            world.ranks[1].say(words.SessionBegun(token))
        world.nothing_was_told()
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


@pytest.mark.parametrize(
    ("why_not", "words_of_it"), [(None, ""), ("no such folder", "rank 1: no such folder")]
)
def test_a_peer_can_be_read_when_every_rank_can(why_not: str | None, words_of_it: str) -> None:
    """A transport is chosen for all ranks; who cannot read over it is named."""
    with two_ranks() as world:
        thread, raised = in_thread(lambda: world.halves.trials.run(SOURCE, Read()))
        number, _ = (rank.hear().number for rank in world.ranks)
        world.ranks[0].say(words.Tried(number, None))
        world.nothing_was_told()
        assert thread.is_alive()
        world.ranks[1].say(words.Tried(number, why_not))
        thread.join(30)
        assert [str(error) for error in raised] == ([words_of_it] if words_of_it else [])


def test_a_trial_can_be_stopped_and_ends_with_the_ranks() -> None:
    with two_ranks() as world:
        read = Read()
        thread, raised = in_thread(lambda: world.halves.trials.run(SOURCE, read))
        number, _ = (rank.hear().number for rank in world.ranks)
        read.stop()
        assert [rank.hear() for rank in world.ranks] == [words.Stop(number)] * 2
        for rank in world.ranks:
            rank.say(words.Tried(number, "the read was stopped"))
        thread.join(30)
        assert isinstance(raised[0], ReadStoppedError)
        thread, raised = in_thread(lambda: world.halves.trials.run(SOURCE, Read()))
        assert world.ranks[0].hear().source == SOURCE
        world.halves.stop_trials()
        thread.join(30)
        assert "the ranks have ended" in str(raised[0])
        with pytest.raises(TransferError, match="the ranks have ended"):
            world.halves.trials.run(SOURCE, Read())


def test_only_what_every_rank_can_do_is_offered() -> None:
    """In the first one's order, with everybody's address."""
    with two_ranks() as world:
        offers = [Offer("shm", "/a"), Offer("tcp", "h:1")]
        world.ranks[0].say(words.Opened(offers, ["shm", "tcp"], ["shm"]))
        with pytest.raises(InternalError, match=r"ranks \[1\] did not open"):
            world.halves.wait_opened(0.05)
        assert world.halves.offers() == []
        world.ranks[1].say(words.Opened([Offer("tcp", "h:2")], ["tcp"], []))
        opening = world.halves.wait_opened(30)
        assert world.halves.offers() == [Offer("tcp", "h:1", ("h:2",))]
        assert (opening.readers, opening.probing) == (["tcp"], {"shm"})


def test_a_bug_in_a_rank_ends_the_worker() -> None:
    """Words of a rank's own, and words that mean nothing here."""
    with two_ranks() as world:
        world.ranks[1].say(words.ThreadFailed("kv-data", "KeyError('x')"))
        thread, error = world.heard.next()
        assert thread == "kv-data"
        assert "on rank 1: KeyError" in error
        world.ranks[0].say(words.Committed(77))
        thread, error = world.heard.next()
        assert (thread, "job 77" in error) == ("kv-ranks", True)


def test_a_dead_rank_holds_nobody_up() -> None:
    """Its executor sees that it is dead; the lines go on for the others."""
    with two_ranks() as world:
        world.ranks[1].close()
        world.halves.release(NAME)
        assert world.ranks[0].hear() == words.Release(NAME)
        world.ranks[0].say(words.RangeIsReady("r", ev.BlockRange(0, (1,))))
        world.ranks[0].say(words.ThreadFailed("marker", ""))
        assert world.heard.next()[0] == "marker"
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
        rank_settings(settings_for("p", Role.PREFILL, **change), 0, 2)


def test_what_ranks_of_one_worker_do_not_share() -> None:
    """Ports follow the first one's; names of sockets and agents are made of boot ids of their own."""
    settings = settings_for("p", Role.PREFILL, data_port=5000, boot_id="b")
    each = [rank_settings(settings, rank, 2) for rank in range(2)]
    assert [(one.data_port, one.boot_id) for one in each] == [(5000, "b.0"), (5001, "b.1")]
    assert rank_settings(settings_for("p", Role.PREFILL), 1, 2).data_port == 0
    assert (rank_boot_id("b", 0, 1), SOURCE.of_rank(1).boot_id) == ("b", "boot.1")


def test_progress_is_what_the_ranks_have_reported() -> None:
    """P4: a rank that does not answer is asked once, and none of its counts moves."""
    with two_ranks() as world:
        listeners = ["listener on rank 0", "listener on rank 1"]
        assert world.halves.progress() == dict.fromkeys(listeners, 0)
        assert [rank.hear() for rank in world.ranks] == [words.ShowProgress()] * 2
        world.ranks[1].say(words.Progress({"data": 7}))
        world.nothing_was_told()
        assert world.halves.progress() == {listeners[0]: 0, listeners[1]: 1, "data on rank 1": 7}
        assert world.ranks[1].hear() == words.ShowProgress()
        _, told = world.pull()
        assert [word.rank for word in told] == [0, 1], "rank 0 was not asked again"


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
            progress.reported(rank, {"data": count})
        listeners = {f"listener on rank {rank}": count for rank, count in enumerate(num_reports)}
        assert progress.counts() == {**listeners, **last}
