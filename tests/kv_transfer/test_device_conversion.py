"""Unequal sides on devices: blocks land in an area of the device, are verified there, and converted into the pool there."""

import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from contract.identity import Role
from contract.layout import Side
from contract.requests import EngineRequest
from engine.kv_cache.memory import TORCH_DTYPES
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.settings import TransferSettings
from tests.kv_transfer.builders import LAYOUT, TOKENS, Pair, Worker, settings_for, worker
from tests.kv_transfer.device_memory import FakeDevice
from tests.kv_transfer.played_ranks import SHARE, worker_of_ranks
from tests.kv_transfer.test_device_pools import watch
from tests.kv_transfer.test_plan_converting import cut, prompt_kv
from tests.kv_transfer.test_plan_links import HALF, NUM_TOKENS, WAYS, WIDE
from tests.kv_transfer.watched_nixl import Watch

__all__ = ["watch"]
WIDE_SHARE = Side(replace(SHARE, block_size=8, dtype="bfloat16"), 2)
ALL_WAYS = {
    **{
        str(name): (Side(theirs), Side(ours))
        for name, (theirs, ours) in zip(WAYS.kwargs["ids"], WAYS.args[1], strict=True)
    },
    "two ranks to one": (Side(SHARE, 2), Side(LAYOUT)),
    "one rank to two": (Side(LAYOUT), Side(SHARE, 2)),
    "two ranks to one, split and widened": (WIDE_SHARE, Side(LAYOUT)),
    "two ranks to one, merged": (Side(SHARE, 2), Side(WIDE)),
    "one rank to two, merged and rounded": (Side(LAYOUT), WIDE_SHARE),
    "two ranks to two, split and widened": (WIDE_SHARE, Side(SHARE, 2)),
}
ways = pytest.mark.parametrize(("theirs", "ours"), ALL_WAYS.values(), ids=ALL_WAYS)


@dataclass
class OnDevices:
    """A pair of workers with a device for each rank, and one prompt: its blocks there (``source``) and here (``target``)."""

    pair: Pair
    plan: TransferPlan
    prefill: list[FakeDevice]
    decode: list[FakeDevice]
    kv: Tensor
    source: list[int]
    target: list[int]

    def begin(self, name: str = "r") -> tuple[EngineRequest, EngineRequest]:
        """Compute the prompt, lend it, and begin to fetch it; returns both requests."""
        prompt = list(range(NUM_TOKENS))
        send, fetch = self.pair.send_request(name, prompt), self.pair.fetch_request(name, prompt)
        for rank, memory in enumerate(self.prefill):
            memory.pool[self.source] = cut(self.kv, self.plan.theirs, rank, 0, len(self.source))
        self.pair.prefill.driver.send_all(send, self.source, TOKENS)
        decode = self.pair.decode.driver
        decode.receiver.start_fetch(fetch)
        decode.wait_for(lambda: fetch.key in decode.published, "published")
        decode.receiver.receive_into(fetch.key, self.target, 0)
        return send, fetch

    def hand_over(self, name: str = "r") -> None:
        """Move the prompt, and check that it is in place."""
        send, fetch = self.begin(name)
        decode = self.pair.decode.driver
        decode.wait_for(lambda: fetch.key in decode.received or decode.failed, "an end")
        assert not decode.failed
        decode.receiver.pop_received(fetch.key)
        prefill = self.pair.prefill.driver
        prefill.wait_for(lambda: send.key in prefill.sent, "sent")
        self.check_in_place()

    def check_in_place(self) -> None:
        """Assert that every rank has its share, zeros behind the prompt's end, and that nothing else was touched."""
        ours = self.plan.ours.layout
        kv = self.kv.to(TORCH_DTYPES[ours.dtype])
        for rank, memory in enumerate(self.decode):
            expected = cut(kv, self.plan.ours, rank, 0, len(self.target))
            expected[-1, :, :, :, NUM_TOKENS - (len(self.target) - 1) * ours.block_size :] = 0
            assert torch.equal(memory.pool[self.target], expected)
            assert memory.touched() == set(self.target)

    def end_leases(self) -> None:
        """End all leases of the sender, as when their time is over. No message of it is sent."""
        rank: Any = self.pair.prefill.driver.rank
        halves = [rank] if self.plan.theirs.num_ranks == 1 else [half._data.half for half in rank.halves]
        for half in halves:
            half._senders._senders["nixl"].leases.revoke_all()

    @property
    def areas(self) -> list[FakeDevice]:
        return [area for memory in self.decode for area in memory.areas]

    @property
    def num_through_host(self) -> int:
        return sum(memory.num_through_host for memory in self.prefill + self.decode)

    @property
    def committed(self) -> list[list[int]]:
        return [memory.committed for memory in self.decode]


def running(
    side: Side, memories: Sequence[FakeDevice], settings: TransferSettings
) -> AbstractContextManager[Worker]:
    model = f"w@{side.layout.dtype}"
    if side.num_ranks > 1:
        return worker_of_ranks(settings, memories, side.layout, model)
    return worker(settings, side.layout, model, memory=memories[0])


@contextmanager
def on_devices(theirs: Side, ours: Side, transport: str = "nixl", **decode: int) -> Iterator[OnDevices]:
    plan = TransferPlan(ours, theirs)
    there = [FakeDevice(theirs.layout) for _ in range(theirs.num_ranks)]
    here = [FakeDevice(ours.layout) for _ in range(ours.num_ranks)]
    source = list(range(10, 10 + theirs.num_blocks(NUM_TOKENS)))[::-1]
    target = list(range(30, 30 + ours.num_blocks(NUM_TOKENS)))[::-1]
    lending = settings_for("p", Role.PREFILL, transport=transport)
    reading = settings_for("d", Role.DECODE, transport=transport, **decode)
    with running(theirs, there, lending) as prefill, running(ours, here, reading) as decoder:
        yield OnDevices(
            Pair(prefill, decoder), plan, there, here, prompt_kv(plan, NUM_TOKENS), source, target
        )


@pytest.mark.parametrize("transport", ["nixl", "nccl"])
@ways
def test_unequal_blocks_are_converted_on_the_device(theirs: Side, ours: Side, transport: str) -> None:
    """No byte passes through a host: blocks are digested in the area, then converted into the pool, once it is unused."""
    with on_devices(theirs, ours, transport) as case:
        case.hand_over()
        assert case.num_through_host == 0
        assert case.committed == [case.target] * ours.num_ranks
        num_reads = sum(len(case.plan.ranks_of(rank)) for rank in range(ours.num_ranks))
        assert len(case.areas) == num_reads
        assert sum(area.num_folded for area in case.areas) == num_reads * len(case.source)
        for memory in case.decode:
            assert memory.num_folded == 0
            assert memory.log == [("unused", 0), ("launched", 0)]


@ways
def test_by_tcp_blocks_reach_the_area_through_the_host_and_are_converted_there(
    theirs: Side, ours: Side
) -> None:
    """Each is copied to the device once, as it crossed, after its digest was compared; nothing is copied back."""
    with on_devices(theirs, ours, "tcp") as case:
        case.hand_over()
        for memory in case.decode:
            assert [memory.num_out, memory.num_in] == [0, 0]
            assert [(area.num_out, area.num_in) for area in memory.areas] == [
                (0, len(case.source)) for _ in memory.areas
            ]


@ways
def test_the_area_is_bounded_and_its_next_blocks_wait_for_the_conversion(theirs: Side, ours: Side) -> None:
    """The device converts only when it is waited for: bytes that landed before would be those of the next piece."""
    most = 2 * theirs.layout.block_bytes
    with on_devices(theirs, ours, max_staging_bytes=most) as case:
        case.hand_over()
        num_read = len(case.plan.ranks_of())
        room = max(2 // num_read, ours.layout.block_size // theirs.layout.block_size, 1)
        assert {area.num_blocks for area in case.areas} == {room}
        assert case.pair.decode.count("transfer_staging_bytes") == sum(
            area.num_blocks * theirs.layout.block_bytes for area in case.areas
        )
        num_pieces = -(-len(case.source) // room)
        assert [memory.log for memory in case.decode] == [
            [("unused", 0), ("launched", 0)] * num_pieces
        ] * ours.num_ranks


@ways
def test_nothing_of_a_damaged_block_reaches_the_pool(watch: Watch, theirs: Side, ours: Side) -> None:
    """The prompt's last block changes in the area, in every read: its digest is compared before."""
    with on_devices(theirs, ours) as case:

        def spoil() -> None:
            for area in case.areas:
                area.rows[len(case.source) - 1, -1] = 7

        watch.when_done = spoil
        _, fetch = case.begin()
        decode = case.pair.decode.driver
        decode.wait_for(lambda: fetch.key in decode.received or decode.failed, "an end")
        assert f"block {len(case.source) - 1} of " in decode.failed[fetch.key].message
        assert [memory.touched() for memory in case.decode] == [set()] * ours.num_ranks
        assert case.committed == [[]] * ours.num_ranks
        assert case.num_through_host == 0


@ways
def test_a_read_that_ends_after_its_lease_leaves_nothing(watch: Watch, theirs: Side, ours: Side) -> None:
    """Every byte has landed in the area, and is right; the lease ended before the read was terminal."""
    with on_devices(theirs, ours) as case:
        case.hand_over("first")
        for memory in case.decode:
            memory.rows[case.target] = 0x5A
        watch.clear()
        watch.may_end.clear()
        _, fetch = case.begin()
        decode = case.pair.decode.driver
        assert watch.has_posted.wait(30)
        case.end_leases()
        watch.may_end.set()
        decode.wait_for(lambda: fetch.key in decode.received or decode.failed, "an end")
        assert "ended while" in decode.failed[fetch.key].message
        assert [memory.touched() for memory in case.decode] == [set()] * ours.num_ranks
        assert case.committed == [case.target] * ours.num_ranks, "of the first one"


@ways
def test_a_late_writer_reaches_the_area_alone(watch: Watch, theirs: Side, ours: Side) -> None:
    """The fetch was cancelled: until its read is terminal the blocks are in quarantine, and the area takes no other read."""
    with on_devices(theirs, ours) as case:
        case.hand_over("first")
        watch.clear()
        watch.may_end.clear()
        _, fetch = case.begin()
        decode = case.pair.decode.driver
        assert watch.has_posted.wait(30)
        assert decode.receiver.cancel_fetch(fetch.key) is False
        decode.step()
        assert case.pair.decode.count("transfers_quarantined") == 1
        assert decode.drained == []
        for area in case.areas:
            area.rows[:] = 7  # the bytes that land late
        watch.may_end.set()
        decode.wait_for(lambda: decode.drained, "drained")
        case.check_in_place()
        assert case.pair.decode.count("transfers_quarantined") == 0
        assert case.committed == [case.target] * ours.num_ranks
        case.hand_over("after")


@pytest.mark.parametrize("transport", ["nixl", "tcp"])
def test_an_area_goes_with_its_link(transport: str) -> None:
    """It is kept between reads; when the peer is gone its memory is released and is not counted any more."""
    with on_devices(Side(HALF), Side(WIDE), transport) as case:
        case.hand_over()
        case.hand_over("again")
        decode = case.pair.decode
        assert len(case.areas) == 1
        assert decode.count("transfer_staging_bytes") == case.areas[0].num_blocks * HALF.block_bytes
        area = weakref.ref(case.areas[0])
        case.decode[0].areas.clear()
        case.pair.prefill.driver.close()
        decode.driver.wait_for(lambda: decode.count("transfer_staging_bytes") == 0, "released")

        def is_gone() -> bool:
            gc.collect()
            return area() is None

        decode.driver.wait_for(is_gone, "gone")
