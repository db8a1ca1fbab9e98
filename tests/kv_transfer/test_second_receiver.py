"""KV that was handed off stays lent until a worker has continued the answer: a receiver that fails does not end it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from contract.identity import Role
from contract.requests import EngineRequest, SendTransfer
from tests.kv_transfer.builders import (
    LAYOUT,
    TOKENS,
    Pair,
    Worker,
    pair_of,
    prompt_of,
    request_of,
    settings_for,
    worker,
)
from tests.kv_transfer.fakes import GatedMemory

SOURCE = [0, 1, 2]
TARGET = [10, 11, 12]


@dataclass
class Three:
    """A sender that has handed a request off, and two receivers."""

    sender: Worker
    first: Worker
    second: Worker
    sent: EngineRequest

    def fetch(self, receiver: Worker) -> EngineRequest:
        """Let a receiver fetch the transfer; return its request."""
        fetch = Pair(self.sender, receiver).fetch_request("r", prompt_of(3), self.sent.attempt)
        receiver.driver.receiver.start_fetch(fetch)
        return fetch

    def receive(self, receiver: Worker) -> None:
        """Let a receiver fetch the transfer to its end, and check the blocks and the end of the lease."""
        fetch = self.fetch(receiver)
        driver = receiver.driver
        driver.wait_for(lambda: driver.published, "published")
        driver.receiver.receive_into(fetch.key, TARGET, 0)
        driver.wait_for(lambda: driver.received, "received")
        assert driver.receiver.pop_received(fetch.key).first_tokens == TOKENS
        assert receiver.holds("t-r", TARGET) and driver.failed == {}
        self.sender.driver.wait_for(lambda: self.sender.driver.sent == [self.sent.key], "sent")
        assert self.sender.count("leases_active") == self.sender.count("leases_expired_total") == 0

    def peer(self) -> str | None:
        (lease,) = self.sender.driver.scheduler.debug_state()["leases"]
        peer: str | None = lease["peer"]
        return peer


@contextmanager
def three(
    transport: str = "tcp", memory: GatedMemory | None = None, lease_seconds: float = 30.0
) -> Iterator[Three]:
    with ExitStack() as stack:
        sender, first, second = (
            stack.enter_context(
                worker(
                    settings_for(name, Role.DECODE, transport=transport, lease_seconds=lease_seconds),
                    memory=memory if name == "sender" else None,
                )
            )
            for name in ("sender", "first", "second")
        )
        sent = request_of("r", prompt_of(3), SendTransfer("t-r", may_change_receiver=True), attempt=4)
        sender.lend("t-r", SOURCE)
        sender.driver.send_all(sent, SOURCE, TOKENS)
        yield Three(sender, first, second, sent)


def reading(case: Three) -> EngineRequest:
    """Let the first receiver read blocks of which the sender cannot read the last one."""
    fetch = case.fetch(case.first)
    driver = case.first.driver
    driver.wait_for(lambda: driver.published, "published")
    memory = case.sender.driver.memory
    assert isinstance(memory, GatedMemory)
    memory.gate_after_digest(SOURCE[-1], case.sender.driver)
    driver.receiver.receive_into(fetch.key, TARGET, 0)
    assert memory.is_waiting.wait(30)
    return fetch


def open_gate(case: Three) -> None:
    memory = case.sender.driver.memory
    assert isinstance(memory, GatedMemory)
    memory.gated_block = None
    memory.gate.set()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_receiver_that_cancels_leaves_the_lease_to_the_next_one(transport: str) -> None:
    with three(transport) as case:
        fetch = case.fetch(case.first)
        case.first.driver.wait_for(lambda: case.first.driver.published, "published")
        assert case.first.driver.receiver.cancel_fetch(fetch.key) is True
        case.sender.driver.wait_for(lambda: case.peer() is None, "left")
        case.receive(case.second)


def test_a_receiver_that_dies_in_the_middle_of_a_read_leaves_the_lease_to_the_next_one() -> None:
    with three(memory=GatedMemory(LAYOUT, 64)) as case:
        reading(case)
        case.first.driver.close()
        case.sender.driver.wait_for(lambda: case.peer() is None, "gone")
        open_gate(case)
        case.receive(case.second)


def test_the_next_receiver_need_not_wait_until_the_first_one_is_known_to_be_dead() -> None:
    """It takes the lease over; the first one, which hangs, learns that, and its cancel ends nothing."""
    with three(memory=GatedMemory(LAYOUT, 64)) as case:
        fetch = reading(case)
        waiting = case.fetch(case.second)
        case.second.driver.wait_for(lambda: case.second.driver.published, "published")
        assert case.peer() == case.second.boot_id
        first = case.first.driver
        # If the gate opened before this message, the first receiver could have all blocks, and would rightly go on.
        first.wait_for(lambda: first.failed, "failed")
        open_gate(case)
        assert "another worker fetches this transfer now" in first.failed[fetch.key].message
        case.second.driver.receiver.receive_into(waiting.key, TARGET, 0)
        case.second.driver.wait_for(lambda: case.second.driver.received, "received")
        assert case.second.holds("t-r", TARGET)
        case.sender.driver.wait_for(lambda: case.sender.driver.sent, "sent")


@pytest.mark.parametrize("is_withdrawn", [True, False])
def test_a_lease_that_a_receiver_has_left_is_withdrawn_or_expires(is_withdrawn: bool) -> None:
    """Law 4: it is not renewed by a receiver that does not fetch it any more, though its link is up."""
    with three(lease_seconds=0.5) as case:
        fetch = case.fetch(case.first)
        case.first.driver.wait_for(lambda: case.first.driver.published, "published")
        case.first.driver.receiver.cancel_fetch(fetch.key)
        sender = case.sender.driver
        if is_withdrawn:
            sender.sender.abandon_send(case.sent.key, "cancelled", "the request was cancelled")
        sender.wait_for(lambda: sender.sent == [case.sent.key], "sent")
        assert case.sender.count("leases_expired_total") == (0 if is_withdrawn else 1)


@pytest.mark.parametrize("end", ["cancel", "death"])
def test_a_prompt_that_was_not_handed_off_has_one_receiver(end: str) -> None:
    """Its router begins again with a prefill leg, so the blocks are free at once."""
    with pair_of() as pair:
        sender, receiver = pair.prefill.driver, pair.decode.driver
        send, fetch = pair.send_request("r", prompt_of(3)), pair.fetch_request("r", prompt_of(3))
        sender.send_all(send, SOURCE, TOKENS)
        receiver.receiver.start_fetch(fetch)
        receiver.wait_for(lambda: receiver.published, "published")
        if end == "cancel":
            receiver.receiver.cancel_fetch(fetch.key)
        else:
            receiver.close()
        sender.wait_for(lambda: sender.sent == [send.key], "sent")
