"""A connection that is opened ahead of the first fetch: it is there, fails, or is opened once more."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from contract.requests import ReceiveTransfer
from kv_transfer.connector import ControlHalf
from tests.kv_transfer.builders import Pair, hand_over, pair_of, prompt_of

WAIT = 30.0
UNUSED = "127.0.0.1:9"


@pytest.fixture(params=["tcp", "shm", "auto"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(transport=request.param) as pair:
        yield pair


def sender_of(pair: Pair) -> ReceiveTransfer:
    """Return a transfer that names the prefill worker, under which nothing is lent."""
    transfer = pair.fetch_request("never", prompt_of(1)).transfer
    assert isinstance(transfer, ReceiveTransfer)
    return transfer


def connect(pair: Pair, transfer: ReceiveTransfer) -> None:
    """Let the decode worker connect, and wait until that is over."""
    receiver = pair.decode.driver.expecting
    assert receiver is not None
    is_over = threading.Event()
    receiver.connect(transfer, is_over.set)
    assert is_over.wait(WAIT)


def until_ended(control: ControlHalf) -> None:
    """Wait until no link is open."""
    deadline = time.monotonic() + WAIT
    while control.debug_state()["links"]["peers"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def num_handshakes(pair: Pair) -> float:
    """Return how many links the decode worker has made."""
    return pair.decode.driver.scheduler.counters()["link_handshakes_total{result=ok}"]


def test_one_link_serves_it_and_all_fetches(pair: Pair) -> None:
    for _ in range(2):
        connect(pair, sender_of(pair))
    assert num_handshakes(pair) == 1
    assert pair.prefill.driver.scheduler.debug_state()["leases"] == [], "nothing was asked for"
    for name in ("a", "b"):
        hand_over(pair, name)
    assert num_handshakes(pair) == 1


def test_a_link_that_a_fetch_has_made_serves_it(pair: Pair) -> None:
    hand_over(pair, "a")
    connect(pair, sender_of(pair))
    assert num_handshakes(pair) == 1


def test_many_wait_for_one_link(pair: Pair) -> None:
    receiver = pair.decode.driver.expecting
    assert receiver is not None
    ends = threading.Semaphore(0)
    for _ in range(20):
        receiver.connect(sender_of(pair), ends.release)
    assert all(ends.acquire(timeout=WAIT) for _ in range(20))
    assert num_handshakes(pair) == 1 and not ends.acquire(blocking=False)


def test_a_sender_that_cannot_be_reached_ends_the_wait(pair: Pair) -> None:
    connect(pair, replace(sender_of(pair), peer_control=UNUSED))
    connect(pair, replace(sender_of(pair), peer_boot_id="another"))
    connect(pair, sender_of(pair))
    hand_over(pair, "a")


def test_it_connects_again_after_the_end_of_the_link(pair: Pair) -> None:
    connect(pair, sender_of(pair))
    control = pair.decode.driver.scheduler
    assert isinstance(control, ControlHalf)
    (link,) = control._links._links._by_ref.values()
    link.sock.shutdown(socket.SHUT_RDWR)
    until_ended(control)
    deadline = time.monotonic() + WAIT
    while (
        num_handshakes(pair) < 2
    ):  # the link is closed before its end is recorded, and until then nothing is opened
        assert time.monotonic() < deadline
        connect(pair, sender_of(pair))
    assert num_handshakes(pair) == 2
