"""Closing a connector leaves no thread and no file descriptor, whatever was going on."""

import threading
from collections.abc import Sequence

import pytest

from contract.identity import Role
from contract.layout import Side
from kv_transfer.connector import TransferFactory
from kv_transfer.protocol.reads import Read, ReadRequest, ReadStoppedError, Source
from kv_transfer.transports.transport import ReceiverTraits, ReceiverTransport
from tests.kv_transfer.builders import (
    LAYOUT,
    MODEL,
    TOKENS,
    Sides,
    hand_over,
    pair_of,
    prompt_of,
    settings_for,
)
from tests.kv_transfer.fakes import GatedMemory
from tests.leftovers import Leftovers


def assert_nothing_left(leftovers: Leftovers) -> None:
    """Assert that all newer threads of transfers and all newer descriptors are gone."""
    assert (leftovers.threads("kv-"), leftovers.descriptors()) == ([], set())


@pytest.mark.parametrize("transport", ["tcp", "shm", "nixl", "nccl", "auto"])
def test_after_a_hand_over(transport: str) -> None:
    """The second one: what a library opens once for the whole process is open then."""
    with pair_of(transport=transport) as pair:
        hand_over(pair, "first")
    leftovers = Leftovers()
    with pair_of(transport=transport) as pair:
        hand_over(pair, "r")
        assert leftovers.threads("kv-") != []
        assert leftovers.descriptors() != set()
    assert_nothing_left(leftovers)


def test_in_the_middle_of_a_read() -> None:
    """The receiver's read is terminal when close returns; the sender's waits for its own pool only."""
    leftovers, memory = Leftovers(), GatedMemory(LAYOUT, 64)
    with pair_of(memory=memory) as pair:
        prompt, decode = prompt_of(3), pair.decode.driver
        fetch = pair.fetch_request("r", prompt)
        pair.prefill.driver.send_all(pair.send_request("r", prompt), [0, 1, 2], TOKENS)
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.published, "published")
        memory.gate_after_digest(2, pair.prefill.driver)
        decode.receiver.receive_into(fetch.key, [10, 11, 12], 0)
        assert memory.is_waiting.wait(30)
        decode.close()
        for block_id in (10, 11, 12):
            decode.memory.fill(block_id, b"reused")
        memory.gate.set()
    assert bytes(decode.memory.read_view(12)[:6]) == b"reused"
    assert decode.memory.committed == []
    assert_nothing_left(leftovers)


class Endless:
    """Reads that nothing makes terminal but the receiver's end, as those of a library from a frozen peer."""

    traits = ReceiverTraits()

    def __init__(self, inner: ReceiverTransport) -> None:
        self._inner = inner
        self.is_reading, self._is_closed = threading.Event(), threading.Event()

    def fetch(self, source: Source, request: ReadRequest, views: Sequence[memoryview], read: Read) -> None:
        """Wait for ``close``."""
        self.is_reading.set()
        self._is_closed.wait()
        raise ReadStoppedError("the receiver was closed")

    def forget(self, source: Source) -> None:
        """Forward to the real one."""
        self._inner.forget(source)

    def close(self) -> None:
        """Forward to the real one."""
        self._inner.close()
        self._is_closed.set()


def test_a_read_that_never_ends_does_not_hold_up_the_close() -> None:
    endless: list[Endless] = []
    leftovers = Leftovers()

    def wrap(inner: ReceiverTransport) -> ReceiverTransport:
        endless.append(Endless(inner))
        return endless[-1]

    with pair_of(Sides(decode={"decorate": wrap})) as pair:
        prompt, decode = prompt_of(1), pair.decode.driver
        fetch = pair.fetch_request("r", prompt)
        pair.prefill.driver.send_all(pair.send_request("r", prompt), [0], TOKENS)
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: decode.published, "published")
        decode.receiver.receive_into(fetch.key, [10], 0)
        (receiver,) = endless
        assert receiver.is_reading.wait(10)
    assert leftovers.threads("kv-") == []


@pytest.mark.parametrize("is_rank_first", [True, False])
def test_unused_and_twice(is_rank_first: bool) -> None:
    """A pair that was never started, in either order, and a second close."""
    leftovers = Leftovers()
    pair = TransferFactory(settings_for("p", Role.PREFILL))(Side(LAYOUT), MODEL, lambda: None)
    closes = [pair.ranks.close, pair.scheduler.close]
    for close in (closes if is_rank_first else closes[::-1]) * 2:
        close()
    assert_nothing_left(leftovers)


def test_a_peer_sees_a_close_as_death() -> None:
    with pair_of() as pair:
        decode = pair.decode.driver
        fetch = pair.fetch_request("r", prompt_of(2))
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: pair.prefill.count("transfers_parked") == 1, "parked")
        pair.prefill.driver.close()
        decode.wait_for(lambda: decode.failed, "failed")
        assert decode.failed[fetch.key].kind == "peer_unreachable"
        assert decode.failed[fetch.key].message == "worker p closed its control link"
