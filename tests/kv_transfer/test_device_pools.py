"""KV between pools on devices: by NIXL from one to the other, verified where it lies; else by way of host memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from contract.identity import Role
from contract.layout import KVLayout
from tests.kv_transfer.builders import (
    LAYOUT,
    TOKENS,
    Pair,
    hand_over,
    prompt_of,
    settings_for,
    worker,
)
from tests.kv_transfer.device_memory import FakeDevice
from tests.kv_transfer.fakes import ByteMemory, FilledMemory
from tests.kv_transfer.watched_nixl import Watch

BLOCKS = 3


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The real library for every worker of the test, recorded."""
    watch = Watch()
    library = watch.watched()
    monkeypatch.setattr("kv_transfer.transports.nixl.agent.load", lambda _host: library)
    return watch


@contextmanager
def pair_on(prefill: FilledMemory, decode: FilledMemory, transport: str) -> Iterator[Pair]:
    lending = settings_for("p", Role.PREFILL, transport=transport, min_split_blocks=2, num_layer_groups=2)
    reading = settings_for("d", Role.DECODE, transport=transport)
    with worker(lending, memory=prefill) as sender, worker(reading, memory=decode) as receiver:
        yield Pair(sender, receiver)


def begin(pair: Pair, name: str) -> str:
    """Lend a prompt in blocks 10.., and read it into blocks 30..; returns the key of the fetch."""
    prompt = prompt_of(BLOCKS)
    send, fetch = pair.send_request(name, prompt), pair.fetch_request(name, prompt)
    pair.prefill.lend(f"t-{name}", [10, 11, 12])
    pair.prefill.driver.send_all(send, [10, 11, 12], TOKENS)
    decode = pair.decode.driver
    decode.receiver.start_fetch(fetch)
    decode.wait_for(lambda: fetch.key in decode.published, "published")
    decode.receiver.receive_into(fetch.key, [30, 31, 32], 0)
    return fetch.key


def test_nixl_moves_and_verifies_blocks_without_the_host(watch: Watch) -> None:
    """Every byte is in place, no other block was touched, and both sides have added up all blocks on their device."""
    here, there = FakeDevice(), FakeDevice()
    with pair_on(there, here, "nixl") as pair:
        hand_over(pair, "r", BLOCKS)
        assert (here.num_through_host, there.num_through_host) == (0, 0)
        assert pair.decode.holds("t-r", [30, 31, 32])
    assert (here.num_folded, there.num_folded) == (BLOCKS, 2 * BLOCKS)
    assert here.touched() == {30, 31, 32}
    assert here.committed == [30, 31, 32]


@pytest.mark.parametrize("prefill", [FakeDevice, ByteMemory])
@pytest.mark.parametrize("decode", [FakeDevice, ByteMemory])
def test_tcp_moves_blocks_by_way_of_the_host(
    prefill: Callable[[KVLayout, int], FilledMemory], decode: Callable[[KVLayout, int], FilledMemory]
) -> None:
    """Each worker digests where the bytes are, by the sender's algorithm, whatever the other one's pool is."""
    there, here = prefill(LAYOUT, 64), decode(LAYOUT, 64)
    with pair_on(there, here, "tcp") as pair:
        hand_over(pair, "r", BLOCKS)
        assert pair.decode.holds("t-r", [30, 31, 32])
    if isinstance(here, FakeDevice):
        assert here.num_in == BLOCKS
        assert here.num_folded == 0
        assert here.touched() == {30, 31, 32}
    if isinstance(there, FakeDevice):
        assert there.num_out == BLOCKS
        assert there.num_folded == 2 * BLOCKS


def test_bytes_that_change_on_the_device_fail_their_digest(watch: Watch) -> None:
    """They are read again, once: the second time nothing is changed."""
    here = FakeDevice()
    with pair_on(FakeDevice(), here, "nixl") as pair:
        hand_over(pair, "first", BLOCKS)
        spoiled = list[int]()

        def spoil() -> None:
            if not spoiled and 42 in here.touched():
                spoiled.append(42)
                here.rows[42, -1] ^= 4

        watch.when_done = spoil
        prompt = prompt_of(BLOCKS)
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        pair.prefill.lend("t-r", [10, 11, 12])
        pair.prefill.driver.send_all(send, [10, 11, 12], TOKENS)
        decode = pair.decode.driver
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: fetch.key in decode.published, "published")
        decode.receiver.receive_into(fetch.key, [40, 41, 42], 0)
        decode.wait_for(lambda: fetch.key in decode.received or decode.failed, "end")
        assert fetch.key in decode.received
        assert pair.decode.holds("t-r", [40, 41, 42])
        assert pair.decode.count("transfer_digest_mismatches_total") == 1
        assert spoiled == [42]


def test_a_late_writer_finds_its_blocks_in_quarantine(watch: Watch) -> None:
    """A read that was posted writes after the cancel: until it is terminal its blocks are in quarantine."""
    here = FakeDevice()
    with pair_on(FakeDevice(), here, "nixl") as pair:
        hand_over(pair, "first", BLOCKS)
        watch.clear()
        watch.may_end.clear()
        key = begin(pair, "r")
        decode = pair.decode.driver
        assert watch.has_posted.wait(30)
        assert decode.receiver.cancel_fetch(key) is False
        decode.step()
        assert pair.decode.count("transfers_quarantined") == 1
        assert decode.drained == []
        here.rows[31] = 7  # the bytes that land late
        watch.may_end.set()
        decode.wait_for(lambda: decode.drained, "drained")
        assert decode.drained == [key]
        assert pair.decode.count("transfers_quarantined") == 0
        assert here.committed == [30, 31, 32]  # of the first one
        hand_over(pair, "after", BLOCKS)
        assert pair.decode.holds("t-after", [30, 31, 32])
