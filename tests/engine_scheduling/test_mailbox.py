"""The mailbox between threads keeps its order, wakes who waits, and keeps its time."""

import threading
import time
from queue import Empty

import pytest

from engine import mailbox
from engine.mailbox import Mailbox


def in_thread(work: threading.Thread) -> None:
    work.daemon = True
    work.start()
    work.join(30)
    assert not work.is_alive(), "waits for ever"


def test_first_in_first_out() -> None:
    box = Mailbox[int]()
    for number in range(3):
        box.put(number)
    assert box.num_waiting == 3
    assert [box.get(), box.get(0.0), box.get(1.0)] == [0, 1, 2]
    with pytest.raises(Empty):
        box.get(0.0)


@pytest.mark.parametrize("timeout_seconds", [None, 30.0])
def test_a_waiting_reader_is_woken(timeout_seconds: float | None) -> None:
    box, got = Mailbox[str](), list[str]()
    getter = threading.Thread(target=lambda: got.append(box.get(timeout_seconds)))
    timer = threading.Timer(0.05, box.put, ["late"])
    timer.start()
    in_thread(getter)
    timer.join()
    assert got == ["late"]


@pytest.mark.parametrize("has_rung_before", [False, True])
def test_a_time_limit_that_is_over_before_the_wait_begins_is_kept(
    monkeypatch: pytest.MonkeyPatch, has_rung_before: bool
) -> None:
    """The thread is held up between its first look and its wait; ``queue.SimpleQueue`` never comes back from that."""
    box, clock = Mailbox[str](), iter([0.0, *[9.0] * 100])
    if has_rung_before:
        box.put("taken")
        assert box.get() == "taken"
    monkeypatch.setattr(mailbox, "time", type("HeldUp", (), {"monotonic": lambda: next(clock)}))
    outcome = list[str]()

    def get() -> None:
        try:
            box.get(1.0)
        except Empty:
            outcome.append("empty")

    in_thread(threading.Thread(target=get))
    assert outcome == ["empty"]


def test_nothing_is_lost_between_many_threads() -> None:
    box, num_threads, num_each = Mailbox[int](), 4, 2000
    got = list[int]()

    def put() -> None:
        for number in range(num_each):
            box.put(number)

    def get() -> None:
        while len(got) < num_threads * num_each:
            try:
                got.append(box.get(0.0001))
            except Empty:
                time.sleep(0)

    putters = [threading.Thread(target=put) for _ in range(num_threads)]
    for putter in putters:
        putter.start()
    in_thread(threading.Thread(target=get))
    for putter in putters:
        putter.join()
    assert sorted(got) == sorted([*range(num_each)] * num_threads)
