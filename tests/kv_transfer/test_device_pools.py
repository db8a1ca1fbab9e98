"""KV between pools on devices: by NIXL and NCCL from one to the other, verified where it lies; else by way of the host."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from contract.identity import Role
from contract.layout import KVLayout
from kv_transfer.transports.nixl import receiver, sender
from tests.kv_transfer.builders import (
    LAYOUT,
    TOKENS,
    Pair,
    hand_over,
    pair_of,
    prompt_of,
    settings_for,
    worker,
)
from tests.kv_transfer.device_memory import UNTOUCHED, FakeDevice, Numbers
from tests.kv_transfer.fakes import ByteMemory, FilledMemory
from tests.kv_transfer.test_layers_ahead import (
    NUM_BLOCKS,
    SOURCE_IDS,
    TARGET_IDS,
    compute,
    compute_and_receive,
    num_bytes,
)
from tests.kv_transfer.test_layers_ahead import begin as begin_layers
from tests.kv_transfer.watched_nixl import Watch

BLOCKS = 3
DIRECT = ["nixl", "nccl"]
"""The transports whose bytes stay on devices; here nccl's are moved by gloo."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """The real library for every worker of the test, recorded."""
    watch = Watch()
    library = watch.watched()
    monkeypatch.setattr("kv_transfer.transports.nixl.agent.load", lambda _host: library)
    return watch


@contextmanager
def pair_on(
    prefill: FilledMemory, decode: FilledMemory, transport: str, num_layer_groups: int = 2
) -> Iterator[Pair]:
    groups = {"min_split_blocks": 2, "num_layer_groups": num_layer_groups}
    lending = settings_for("p", Role.PREFILL, transport=transport, **groups)
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


@pytest.mark.parametrize("transport", DIRECT)
def test_blocks_are_moved_and_verified_without_the_host(transport: str) -> None:
    """Every byte is in place, no other block was touched, and both sides have added up all blocks on their device."""
    here, there = FakeDevice(), FakeDevice()
    with pair_on(there, here, transport, num_layer_groups=1) as pair:
        hand_over(pair, "r", BLOCKS)
        assert (here.num_through_host, there.num_through_host) == (0, 0)
        assert pair.decode.holds("t-r", [30, 31, 32])
    assert (here.num_folded, there.num_folded) == (BLOCKS, BLOCKS)
    assert here.touched() == {30, 31, 32}
    assert here.log[0] == ("unused", 0)
    assert here.committed == [30, 31, 32]


@pytest.mark.parametrize("prefill", [FakeDevice, ByteMemory])
@pytest.mark.parametrize("decode", [FakeDevice, ByteMemory])
def test_tcp_moves_blocks_by_way_of_the_host(
    prefill: Callable[[KVLayout, int], FilledMemory], decode: Callable[[KVLayout, int], FilledMemory]
) -> None:
    """Each worker digests where the bytes are, by the sender's algorithm, whatever the other one's pool is."""
    there, here = prefill(LAYOUT, 64), decode(LAYOUT, 64)
    with pair_on(there, here, "tcp", num_layer_groups=1) as pair:
        hand_over(pair, "r", BLOCKS)
        assert pair.decode.holds("t-r", [30, 31, 32])
    if isinstance(here, FakeDevice):
        assert here.num_in == BLOCKS
        assert here.num_folded == 0
        assert here.touched() == {30, 31, 32}
    if isinstance(there, FakeDevice):
        assert there.num_out == BLOCKS
        assert there.num_folded == BLOCKS


def test_bytes_that_change_on_the_device_fail_their_digest(watch: Watch) -> None:
    """They are read again, once: the second time nothing is changed."""
    here = FakeDevice()
    with pair_on(FakeDevice(), here, "nixl") as pair:
        hand_over(pair, "first", BLOCKS)
        spoiled = list[int]()

        def spoil() -> None:
            if not spoiled and here.rows[42, -1] != UNTOUCHED:  # not a part that was read ahead
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


def hand_over_by_blocks(pair: Pair, name: str, watch: Watch) -> None:
    """Compute and read a prompt block by block, in blocks 10.. and 30.."""
    prompt = prompt_of(BLOCKS)
    send, fetch = pair.send_request(name, prompt), pair.fetch_request(name, prompt)
    prefill, decode = pair.prefill.driver, pair.decode.driver
    pair.prefill.lend(f"t-{name}", [10, 11, 12])
    prefill.sender.open_send(send, [10, 11, 12], 0)
    decode.receiver.start_fetch(fetch)
    for index in range(BLOCKS):
        prefill.sender.publish(send.key, (index + 1) * LAYOUT.block_size)
        prefill.step()
        if index == 0:
            decode.wait_for(lambda: fetch.key in decode.published, "published")
            decode.receiver.receive_into(fetch.key, [30, 31, 32], 0)
        read = partial(watch.seen.__contains__, ("done", [10 + index]))
        decode.wait_for(read, "read")
    prefill.sender.finish_send(send.key, TOKENS)
    decode.wait_for(lambda: fetch.key in decode.received, "received")
    assert pair.decode.holds(f"t-{name}", [30, 31, 32])
    decode.receiver.pop_received(fetch.key)
    prefill.wait_for(lambda: send.key in prefill.sent, "sent")


def test_a_fetch_waits_once_for_the_steps_that_may_use_its_blocks(watch: Watch) -> None:
    """Steps that are launched once it has its blocks do not use them: no read waits for these. The next fetch waits anew."""
    here = FakeDevice()
    with pair_on(FakeDevice(), here, "nixl") as pair:
        for name in ("one", "two"):
            watch.clear()
            here.log.clear()
            hand_over_by_blocks(pair, name, watch)
            assert here.log.count(("unused", 0)) == 1


def test_layers_are_read_by_one_post_if_their_bytes_are_few(
    watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes that are posted at once are bounded, and a block has fewer in a group of layers."""
    monkeypatch.setattr(receiver, "_MAX_POST_BYTES", LAYOUT.block_bytes * NUM_BLOCKS // 2)
    with pair_of(transport="nixl") as pair:
        send, fetch = begin_layers(pair)
        pair.prefill.driver.compute_layer = partial(compute, pair)
        compute_and_receive(pair, send, fetch)
        assert pair.decode.holds("t-r", TARGET_IDS)
    posted = [blocks for what, blocks in watch.seen if what == "posted" and blocks[0] in SOURCE_IDS[1:]]
    assert len(posted) > 1
    assert all(blocks == SOURCE_IDS[1:] for blocks in posted)


@pytest.mark.parametrize("transport", DIRECT)
def test_blocks_that_cross_in_parts_are_digested_once(transport: str) -> None:
    """A launch stops the passes of both workers for longer than it computes, so the device digests whole blocks."""
    there, here = FakeDevice(), FakeDevice()
    with pair_on(there, here, transport) as pair:
        send, fetch = begin_layers(pair)
        pair.prefill.lend("t-r", SOURCE_IDS)
        compute_and_receive(pair, send, fetch)
        assert (here.num_through_host, there.num_through_host) == (0, 0)
        assert pair.decode.holds("t-r", TARGET_IDS)
    assert (here.num_folded, there.num_folded) == (NUM_BLOCKS, NUM_BLOCKS)


def test_on_one_device_all_parts_are_read_at_once(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read stops the pass that computes there. Whether the peer is on this device is known once it was read."""
    here = FakeDevice()
    monkeypatch.setattr(sender, "gpu_of", lambda _memory: "GPU-1")
    monkeypatch.setattr(receiver, "gpu_of", lambda memory: "GPU-1" if memory is here else "GPU-2")
    with pair_on(FakeDevice(), here, "nixl") as pair:
        hand_over(pair, "first", BLOCKS)
        send, fetch = begin_layers(pair)
        crossed = (BLOCKS + 1) * LAYOUT.block_bytes
        pair.decode.driver.wait_for(lambda: num_bytes(pair) == crossed, "block 0 has crossed, alone")
        watch.clear()
        pair.prefill.lend("t-r", SOURCE_IDS)
        compute_and_receive(pair, send, fetch)
        assert pair.decode.holds("t-r", TARGET_IDS)
        assert [blocks for what, blocks in watch.seen if what == "posted" and len(blocks) > 1] == [
            SOURCE_IDS[1:]
        ]


class BusyDevice(FakeDevice):
    """A device that digests only while ``may_fold`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.may_fold = threading.Event()
        self.may_fold.set()

    def fold(self, block_ids: Sequence[int], start: int, end: int, seeds: Numbers) -> Numbers:
        assert self.may_fold.wait(30)
        return super().fold(block_ids, start, end, seeds)


def test_blocks_that_have_arrived_are_digested_before_they_are_announced(watch: Watch) -> None:
    """Then nothing is left but to compare, while the sender still digests them."""
    there, here = BusyDevice(), FakeDevice()
    with pair_on(there, here, "nixl") as pair:
        send, fetch = begin_layers(pair)
        decode = pair.decode.driver
        pair.prefill.lend("t-r", SOURCE_IDS)
        decode.wait_for(lambda: here.num_folded == 1, "the digest of the first block")
        there.may_fold.clear()
        pair.prefill.driver.sender.publish(send, NUM_BLOCKS * LAYOUT.block_size)
        pair.prefill.driver.step()
        decode.wait_for(lambda: here.num_folded == NUM_BLOCKS, "the digests of the others")
        there.may_fold.set()
        pair.prefill.driver.sender.finish_send(send, TOKENS)
        decode.wait_for(lambda: fetch in decode.received, "received")
        assert pair.decode.holds("t-r", TARGET_IDS)
    assert here.num_folded == NUM_BLOCKS
