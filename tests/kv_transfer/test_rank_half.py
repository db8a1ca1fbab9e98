"""One rank's half of a connector of several ranks, whose control half a test plays message by message."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contract.identity import Role
from contract.layout import Side
from engine.mailbox import Mailbox
from kv_transfer.protocol.reads import Source
from kv_transfer.ranks import rank_messages as messages
from kv_transfer.ranks.rank_data import RankHalf, rank_settings
from kv_transfer.ranks.rank_messages import RankSocket
from tests.kv_transfer.builders import LAYOUT, settings_for
from tests.kv_transfer.fakes import ByteMemory
from tests.kv_transfer.played_ranks import SHARE
from tests.leftovers import Leftovers

NOWHERE = Source("p", "boot", "/nowhere/0", "token", "shm", ("/nowhere/1",))
MORE_THAN_THERE_IS = 2**60
"""Bytes; no thread with such a stack can be started."""


@contextmanager
def rank_half() -> Iterator[tuple[RankSocket[messages.FromRank], Mailbox[messages.FromRank]]]:
    """Run the half of rank 1 of 2; yield the control half's end, and what it receives but for counters."""
    ours, theirs = socket.socketpair()
    received = Mailbox[messages.FromRank]()

    def on_bug(thread: str, error: BaseException) -> None:
        received.put(messages.ThreadFailed(thread, repr(error)))

    control = RankSocket(ours, messages.from_rank, received.put, on_bug, "control")
    settings = settings_for("d", Role.DECODE, transport="shm", read_timeout_seconds=300.0)
    half = RankHalf(rank_settings(settings, Side(LAYOUT, 2))[1].encoded(), theirs)
    try:
        half.start(ByteMemory(SHARE, 4))
        control.start()
        assert isinstance(received.get(30), messages.Counted)
        assert isinstance(received.get(30), messages.Opened)
        yield control, received
    finally:
        half.close()
        control.close()


def test_a_probe_for_which_no_thread_can_be_started_fails_alone() -> None:
    """The transport is ruled out for that peer; the rank goes on, and probes again when it can."""
    with rank_half() as (control, received):
        usual = threading.stack_size(MORE_THAN_THERE_IS)
        try:
            control.send(messages.Probe("one", NOWHERE))
            answer = received.get(30)
        finally:
            threading.stack_size(usual)
        assert answer == messages.Answer("one", "no thread can be started")
        control.send(messages.Stop("one"))
        control.send(messages.Probe("two", NOWHERE))
        answer = received.get(30)
        assert isinstance(answer, messages.Answer)
        assert (answer.key, "/nowhere/1" in str(answer.error)) == ("two", True)


def test_a_probe_that_hangs_delays_no_other_and_ends_when_it_is_stopped_or_at_close(tmp_path: Path) -> None:
    """The peer's rank accepts and sends nothing; a read would wait for 300 s."""
    address, leftovers = str(tmp_path / "silent"), Leftovers()
    silent_source = Source("silent", "boot", "/nowhere/0", "token", "shm", (address,))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(address)
        silent.listen()
        with rank_half() as (control, received):
            control.send(messages.Probe("one", silent_source))
            with silent.accept()[0]:
                control.send(messages.Probe("two", NOWHERE))
                answer = received.get(30)
                assert isinstance(answer, messages.Answer)
                assert answer.key == "two"
                control.send(messages.Stop("one"))
                assert received.get(30) == messages.Answer("one", "the read was stopped")
            control.send(messages.Probe("three", silent_source))
            control.send(messages.Probe("queued", silent_source))
            begun = silent.accept()[0]
            begin = time.monotonic()
        with begun:
            assert time.monotonic() - begin < 30
            assert leftovers.threads("kv-pull") == []
