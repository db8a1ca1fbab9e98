"""Copies between a device and the host: beside what crosses the network, and gone after a failure."""

import gc
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from contract.layout import KVLayout
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import digests_of
from kv_transfer.protocol.orders import CommitJob, PublishOrder, TransferMetadata
from kv_transfer.protocol.reads import LeaseName, Read
from kv_transfer.transports.block_views import read_views
from kv_transfer.transports.tcp.socket_blocks import socket_blocks
from tests.kv_transfer.device_memory import FakeDevice
from tests.kv_transfer.fakes import ByteMemory, FilledMemory
from tests.kv_transfer.test_pieces import LAYOUT, PlayedReceiver, PlayedSender, data_half, pull


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    made = FakeDevice(LAYOUT, 64)
    yield made
    made.close()


def content(block: int) -> bytes:
    return bytes([block]) * LAYOUT.block_bytes


def test_a_piece_is_copied_to_the_device_while_the_next_one_arrives(device: FakeDevice) -> None:
    """The steps before are waited for once, when the first bytes are verified; the commit waits for the copies."""
    begun = list[list[tuple[str, int]]]()
    receiver = PlayedReceiver(4, lambda _number: begun.append(list(device.log)))
    with data_half(PlayedSender(), receiver, device) as (data, reports):
        data.post_pull(pull(10))
        assert isinstance(reports.until_end()[-1], ev.PieceVerified)
        first = [("unused", 0), ("writing", 0)]
        assert begun == [[], first, [*first, ("writing", 4)]]
        data.post_commit(CommitJob("r", tuple(range(10)), Read()))
        assert reports.next() == ev.CommitDone()
    assert device.log == [*first, ("writing", 4), ("writing", 8)]
    assert [bytes(device.read_view(block)) for block in range(10)] == [content(block) for block in range(10)]
    assert device.touched() == set(range(1, 10))


@pytest.mark.parametrize("fault", ["digest", "stop", "transport"])
def test_nothing_of_a_failed_pull_is_left(device: FakeDevice, fault: str) -> None:
    """No unverified byte reaches the device, no host memory is kept, and the next read of the blocks gets its own bytes."""
    job = pull(10, bad_block=5 if fault == "digest" else None)

    def before(number: int) -> None:
        if number == 1 and fault == "stop":
            job.read.stop()
        if number == 1 and fault == "transport":
            raise OSError("no way")

    with data_half(PlayedSender(), PlayedReceiver(4, before), device) as (data, reports):
        data.post_pull(job)
        (outcome,) = reports.until_end()
        assert isinstance(outcome, ev.JobStopped if fault == "stop" else ev.JobFailed)
        assert device.touched() == {1, 2, 3}
        data.post_commit(CommitJob("other", (4, 5), Read()))
        assert reports.next() == ev.CommitDone()
        gc.collect()
        assert len(device.rows_in_use) == 0
        assert device.touched() == {1, 2, 3}
        fault = "none"
        data.post_pull(pull(10))
        assert isinstance(reports.until_end()[-1], ev.PieceVerified)
    assert bytes(device.read_view(5)) == content(5)


def test_the_next_piece_is_copied_to_the_host_while_one_is_sent(device: FakeDevice) -> None:
    """There are never more than two pieces in host memory, and each block is copied once."""
    for block in range(1, 12):
        device.fill(block, content(block)[:1])
    blocks = socket_blocks(read_views(device, range(1, 12)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for start in range(0, 11, 4):
            blocks.send(ours, b"ok", start, min(start + 4, 11))
            gc.collect()
            assert len(device.rows_in_use) <= 4
        sent = theirs.recv(2**16, socket.MSG_WAITALL | socket.MSG_DONTWAIT)
    pieces = [range(1, 5), range(5, 9), range(9, 12)]
    assert sent == b"".join(b"ok" + b"".join(map(content, piece)) for piece in pieces)
    assert device.log == [
        ("reading", 1), ("reading", 5), ("read", 1), ("reading", 9), ("read", 5), ("read", 9),
    ]  # fmt: skip
    assert device.num_out == 11


@pytest.mark.parametrize(("memory", "sizes"), [(FakeDevice, [20]), (ByteMemory, [8, 8, 4])])
def test_a_device_publishes_many_blocks_at_once(
    memory: Callable[[KVLayout, int], FilledMemory], sizes: list[int]
) -> None:
    """It digests them by one launch; on the host a range is small enough to stay in a cache."""
    layout = KVLayout(num_layers=4, num_kv_heads=8, head_dim=128, block_size=16, dtype="float32")
    pool = memory(layout, 24)
    name = LeaseName("t", 0, "lease")
    with data_half(PlayedSender(), PlayedReceiver(4), pool) as (data, reports):
        data.execute(TransferMetadata([PublishOrder("r", name, 0, list(range(1, 21)), list(range(20)))]))
        ranges = [reports.next() for _ in sizes]
    assert [len(each.digests) for each in ranges if isinstance(each, ev.BlockRange)] == sizes
    views = [memoryview(bytearray(pool.read_view(block))) for block in range(1, 21)]
    found = tuple(digest for each in ranges if isinstance(each, ev.BlockRange) for digest in each.digests)
    assert found == digests_of(data.digest, views, range(20))


class OpenCopy:
    """A copy that is over once it is waited for."""

    is_over = False

    def synchronize(self) -> None:
        self.is_over = True

    def query(self) -> bool:
        return self.is_over


def test_a_commit_is_over_at_once_unless_a_copy_is_open(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread is woken for it if a library has written the device itself; else the one that publishes waits."""
    threads = list[str]()
    commit = device.commit

    def watched(block_ids: list[int]) -> None:
        threads.append(threading.current_thread().name)
        commit(block_ids)

    monkeypatch.setattr(device, "commit", watched)
    copy = OpenCopy()
    with data_half(PlayedSender(), PlayedReceiver(4), device) as (data, reports):
        data.post_commit(CommitJob("r", (1,), Read()))
        assert reports.next() == ev.CommitDone()
        monkeypatch.setattr(device, "_launched", lambda: copy)
        device.write_rows([2], 0, device.host_rows(1, 8))
        data.post_commit(CommitJob("r", (2,), Read()))
        assert reports.next() == ev.CommitDone()
    assert threads == [threading.current_thread().name, "kv-data"]
    assert copy.is_over
