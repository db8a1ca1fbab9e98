"""``auto`` between two devices: both transports are measured on the null block, and the faster one is used."""

import gc
import logging
import re
import weakref

import pytest

from contract.identity import Role
from kv_transfer.protocol.reads import Read, num_probe_blocks
from kv_transfer.transports.nixl.receiver import SlowReads
from kv_transfer.transports.nixl.settings import has_rdma_device
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
from tests.kv_transfer.device_memory import FakeDevice
from tests.kv_transfer.nixl_port import LAYOUT as NIXL_LAYOUT
from tests.kv_transfer.nixl_port import NAME, NixlPort, Reader

BLOCKS = 3


def test_the_transport_that_reads_faster_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever that is here. No probe writes to a pool, and none of the blocks in it is read."""
    caplog.set_level(logging.INFO, "kv_transfer")
    monkeypatch.setattr("kv_transfer.transports.registry.has_nvidia_gpu", lambda: True)
    monkeypatch.setattr("kv_transfer.transports.nixl.sender.has_rdma_device", lambda: True)
    there, here = FakeDevice(), FakeDevice()
    lending = settings_for("p", Role.PREFILL, transport="auto")
    reading = settings_for("d", Role.DECODE, transport="auto")
    with worker(lending, memory=there) as prefill, worker(reading, memory=here) as decoder:
        pair = Pair(prefill, decoder)
        decode = pair.decode.driver
        prompt = prompt_of(BLOCKS)
        send, fetch = pair.send_request("r", prompt), pair.fetch_request("r", prompt)
        pair.prefill.lend("t-r", [10, 11, 12])
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: "is read over" in caplog.text, "a choice")
        assert here.touched() == set()
        assert not here.pool[0].any()
        assert here.num_through_host == 0
        assert {block for kind, block in there.log if kind == "reading"} <= {0}
        pair.prefill.driver.send_all(send, [10, 11, 12], TOKENS)
        decode.wait_for(lambda: fetch.key in decode.published, "published")
        decode.receiver.receive_into(fetch.key, [30, 31, 32], 0)
        decode.wait_for(lambda: fetch.key in decode.received, "received")
        assert pair.decode.holds("t-r", [30, 31, 32])
        (found,) = re.findall(r"was read by probes: nixl ([\d.]+) GB/s, tcp ([\d.]+) GB/s", caplog.text)
        faster = "tcp" if float(found[1]) > float(found[0]) else "nixl"
        moved = {
            name: pair.decode.count(f"transfer_blocks_total{{transport={name}}}") for name in ("nixl", "tcp")
        }
        assert moved == {"nixl": 0.0, "tcp": 0.0} | {faster: BLOCKS}


def test_nixl_is_measured_in_an_area_of_the_device_which_is_released() -> None:
    """In host memory it is measured in a buffer. The pool that is read, and the reader's own, stay as they are."""
    port, reader = NixlPort(), Reader()
    try:
        before = bytes(reader.memory.read_view(0))
        assert (reader.receiver.probe(port.source, Read()) or 0) > 0
        device = FakeDevice(reader.memory.layout, 4)
        reader.nixl_thread.memory = device
        assert (reader.receiver.probe(port.source, Read()) or 0) > 0
        (area,) = device.areas
        assert area.num_blocks == num_probe_blocks(reader.memory.layout.block_bytes)
        assert bytes(area.rows[-1].numpy()) == bytes(port.memory.read_view(0)), "the lent pool's block 0"
        assert device.touched() == set()
        assert bytes(reader.memory.read_view(0)) == before
        kept = weakref.ref(area)
        device.areas.clear()
        del area
        gc.collect()
        assert kept() is None
    finally:
        reader.close()
        port.sender.close()


def test_a_probe_reads_as_much_of_small_blocks_as_of_large_ones() -> None:
    assert num_probe_blocks(LAYOUT.block_bytes) * LAYOUT.block_bytes == 8 * 2**20
    assert num_probe_blocks(2**30) == 1


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("gigabytes_per_second", "num_warnings"),
    [([1, 2, 2.9, 1], 1), ([1, 1, 1, 3], 0), ([1, 1, 1], 0), ([4, 1, 1, 1, 1, 1], 0)],
    ids=["slow", "one is fast", "too few", "decided"],
)
def test_slow_reads_are_warned_of_once(
    gigabytes_per_second: list[float], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Without GPUDirect its library reads by TCP without a word."""
    slow_reads = SlowReads()
    for who in ("worker p", "worker q"):
        for rate in gigabytes_per_second:
            slow_reads.note(who, 2**23, 2**23 / (rate * 1e9))
            slow_reads.note(who, 2**23 - 1, 100.0)
    found = warnings_of(caplog)
    assert len(found) == num_warnings
    assert all("worker p" in text and "set transport to auto" in text for text in found)


def test_a_peer_that_comes_back_is_measured_anew(caplog: pytest.LogCaptureFixture) -> None:
    slow_reads = SlowReads()
    for seconds in (0.001, 1.0):
        for _ in range(4):
            slow_reads.note("worker p", 2**23, seconds)
        slow_reads.forget("worker p")
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize("slow_bytes_per_second", [0.0, 1e15])
def test_the_reads_of_blocks_are_measured(
    slow_bytes_per_second: float, caplog: pytest.LogCaptureFixture
) -> None:
    port = NixlPort()
    reader = Reader(slow_reads=SlowReads(slow_bytes_per_second))
    number = -(-(2**23) // NIXL_LAYOUT.block_bytes)
    try:
        grants = port.publish(NAME, range(number))
        for _ in range(4):
            reader.fetch(port.source, range(number), grants)
    finally:
        reader.close()
        port.sender.close()
    assert len(warnings_of(caplog)) == bool(slow_bytes_per_second)


def test_a_pool_in_host_memory_is_lent_over_nixl_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """An RDMA card would read host memory fast; `auto` offers tcp instead."""
    with pair_of(transport="nixl") as pair:
        hand_over(pair, "r")
    assert ("set transport to tcp or auto" in caplog.text) is not has_rdma_device()
