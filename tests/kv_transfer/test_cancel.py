"""Cancelling a fetch in every state, above all in the middle of a read: blocks come back only when nothing can land."""

import pytest

from tests.kv_transfer.builders import LAYOUT, TOKENS, Pair, hand_over, pair_of, prompt_of
from tests.kv_transfer.fakes import GatedMemory


def gated() -> GatedMemory:
    return GatedMemory(LAYOUT, 64)


def stall_in_the_middle(pair: Pair, memory: GatedMemory) -> str:
    """Start a transfer of 3 blocks whose third block the sender cannot read yet; returns the key."""
    prompt = prompt_of(3)
    send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
    decode, prefill = pair.decode.driver, pair.prefill.driver
    pair.prefill.lend("t-r", [0, 1, 2])
    prefill.send_all(send, [0, 1, 2], TOKENS)
    decode.receiver.start_fetch(fetch)
    decode.wait_for(lambda: decode.published, "published")
    memory.gate_after_digest(2, prefill)
    decode.receiver.receive_into(fetch.key, [10, 11, 12], 0)
    assert memory.is_waiting.wait(30)
    return fetch.key


def test_in_the_middle_of_a_read() -> None:
    """cancel_fetch returns False, Drained follows once, late bytes land nowhere, and nothing leaks on either side."""
    memory = gated()
    with pair_of(memory=memory) as pair:
        decode, prefill = pair.decode.driver, pair.prefill.driver
        key = stall_in_the_middle(pair, memory)
        assert decode.receiver.cancel_fetch(key) is False
        decode.wait_for(lambda: decode.drained, "drained")
        for block_id in (10, 11, 12):
            decode.memory.fill(block_id, b"reused")
        prefill.step()
        assert prefill.sent == [], "a thread still reads the lent block"
        memory.gate.set()
        prefill.wait_for(lambda: prefill.sent, "sent")
        decode.step()
        assert bytes(decode.memory.read_view(12)[:6]) == b"reused"
        assert (decode.drained, decode.failed, decode.received) == ([key], {}, [])
        assert decode.memory.committed == []
        assert pair.decode.count("transfers_quarantined") == 0
        assert pair.decode.count("fetches_active") == 0
        memory.gated_block = None
        hand_over(pair, "after")


def test_cancelling_twice_gives_one_drained() -> None:
    memory = gated()
    with pair_of(memory=memory) as pair:
        decode = pair.decode.driver
        key = stall_in_the_middle(pair, memory)
        assert decode.receiver.cancel_fetch(key) is False
        assert decode.receiver.cancel_fetch(key) is False
        decode.wait_for(lambda: decode.drained, "drained")
        memory.gate.set()
        assert decode.receiver.cancel_fetch(key) is True
        decode.step()
        assert decode.drained == [key]


@pytest.mark.parametrize("state", ["unknown", "waiting", "published", "reserved", "received", "taken"])
def test_without_an_outstanding_read_the_blocks_are_free_at_once(state: str) -> None:
    """True, no event afterwards, and the sender's lease ends."""
    with pair_of() as pair:
        prompt, decode, prefill = prompt_of(2), pair.decode.driver, pair.prefill.driver
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        if state != "unknown":
            decode.receiver.start_fetch(fetch)
        prefill.sender.open_send(send, [0, 1], 0)
        if state in ("published", "reserved", "received", "taken"):
            prefill.sender.publish(send.key, 4)
            prefill.step()
            decode.wait_for(lambda: decode.published, "published")
        if state == "reserved":
            decode.receiver.receive_into(fetch.key, [10, 11], 2)
        if state in ("received", "taken"):
            decode.receiver.receive_into(fetch.key, [10, 11], 0)
            prefill.sender.publish(send.key, 8)
            prefill.step()
            prefill.sender.finish_send(send.key, TOKENS)
            decode.wait_for(lambda: decode.received, "received")
        if state == "taken":
            decode.receiver.pop_received(fetch.key)
        assert decode.receiver.cancel_fetch(fetch.key) is True
        decode.step()
        assert (decode.drained, decode.failed) == ([], {})
        assert pair.decode.count("fetches_active") == 0
        prefill.sender.abandon_send(send.key, "cancelled", "aborted")
        prefill.wait_for(lambda: prefill.sent == [send.key], "sent")


def test_a_failure_that_nobody_took_is_taken_back_by_a_cancel() -> None:
    """A request ends either by what cancel_fetch returns or by an event, never by both."""
    with pair_of() as pair:
        decode, prefill = pair.decode.driver, pair.prefill.driver
        send, fetch = pair.send_request("r", prompt_of(2)), pair.fetch_request("r", prompt_of(2))
        prefill.sender.open_send(send, [0, 1], 0)
        prefill.sender.abandon_send(send.key, "internal", "bug")
        decode.receiver.start_fetch(fetch)
        while not decode.scheduler.has_work():
            decode._awake.wait(30)
        assert decode.receiver.cancel_fetch(fetch.key) is True
        decode.step()
        assert decode.failed == {}
