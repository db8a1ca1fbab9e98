"""Blocks of a device are digested once their own step is computed: not before, and without the steps behind it."""

import threading
from collections.abc import Sequence

from msgspec.structs import replace

from engine.connector import Computed
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.digests import digests_of
from kv_transfer.protocol.orders import PublishOrder, TransferMetadata
from kv_transfer.protocol.reads import LeaseName
from tests.kv_transfer.device_memory import FakeDevice, Numbers
from tests.kv_transfer.test_pieces import LAYOUT, PlayedReceiver, PlayedSender, data_half

NAME = LeaseName("t", 0, "lease")


class Step:
    """A step that the device computes when the test lets it."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.is_awaited = threading.Event()

    def synchronize(self) -> None:
        self.is_awaited.set()
        assert self.may_end.wait(30)

    def query(self) -> bool:
        return self.may_end.is_set()


class SteppedDevice(FakeDevice):
    """A device whose steps a test lets end.

    steps: in the order in which they were marked. may_fold: blocks are added up from then on.
    """

    steps: list[Step]
    may_fold: threading.Event | None = None

    def fold(self, block_ids: Sequence[int], start: int, end: int, seeds: Numbers) -> Numbers:
        assert self.may_fold is None or self.may_fold.wait(30)
        return super().fold(block_ids, start, end, seeds)

    def mark_computed(self) -> Computed:
        self.steps.append(step := Step())
        return step


def test_a_range_waits_for_its_own_step_only() -> None:
    """The host runs ahead of the device: both steps were launched, and the second one takes long."""
    device = SteppedDevice(LAYOUT, 16)
    device.steps = []
    with data_half(PlayedSender(), PlayedReceiver(1), device) as (data, reports):
        data.execute(TransferMetadata([PublishOrder("r", NAME, 0, [1, 2], [7, 8])]))
        data.execute(TransferMetadata([PublishOrder("r", NAME, 2, [3], [9])]))
        first, second = device.steps
        assert first.is_awaited.wait(30)
        assert device.num_folded == 0
        for block in (1, 2):
            device.fill(block, bytes([block]))  # the device is slow: this is when it writes them
        first.may_end.set()
        published = reports.next()
        assert isinstance(published, ev.BlockRange)
        assert second.is_awaited.wait(30)
        assert device.num_folded == 2
        views = [memoryview(bytearray(device.read_view(block))) for block in (1, 2)]
        assert published.digests == digests_of(data.digest, views, [7, 8])
        second.may_end.set()
        assert isinstance(reports.next(), ev.BlockRange)


def test_layers_wait_for_their_own_step_only() -> None:
    """The first group of layers is readable while the rest is being computed."""
    layout = replace(LAYOUT, num_layers=2)
    device = SteppedDevice(layout, 16)
    device.steps = []
    with data_half(PlayedSender(), PlayedReceiver(1), device) as (data, reports):
        order = PublishOrder("r", NAME, 0, [1], [7], num_parts=2)
        metadata = TransferMetadata([order])
        watch = data.watch_layers(metadata)
        assert watch is not None
        watch.on_stored(1)
        watch.on_stored(2)
        watch.on_computed()
        data.execute(metadata)
        assert device.steps[0].is_awaited.wait(30)
        assert device.num_folded == 0
        device.fill(1, b"layers")
        device.steps[0].may_end.set()
        published = reports.next()
        assert isinstance(published, ev.LayerRange)
        assert published.num_bytes == layout.block_bytes // 2
        for step in device.steps[1:]:
            assert not step.may_end.is_set()
            step.may_end.set()
        while not isinstance(published, ev.BlockRange):
            published = reports.next()
        assert published.digests == digests_of(data.digest, [memoryview(bytearray(device.read_view(1)))], [7])


def test_blocks_are_announced_when_their_last_layer_is_stored() -> None:
    """The receiver reads layers before they are digested, and verifies whole blocks while the pass goes on to its token.

    A block is digested once, when all of it is stored.
    """
    layout = replace(LAYOUT, num_layers=2)
    device = SteppedDevice(layout, 16)
    device.steps = []
    device.may_fold = threading.Event()
    with data_half(PlayedSender(), PlayedReceiver(1), device) as (data, reports):
        metadata = TransferMetadata([PublishOrder("r", NAME, 0, [1], [7], num_parts=2)])
        watch = data.watch_layers(metadata)
        assert watch is not None
        for num_layers in (1, 2):
            watch.on_stored(num_layers)
        watch.on_computed()
        first, last, whole = device.steps
        first.may_end.set()
        assert isinstance(reports.next(), ev.LayerRange)
        assert last.is_awaited.wait(30)
        assert device.num_folded == 0
        device.fill(1, b"all layers")
        last.may_end.set()
        assert isinstance(reports.next(), ev.LayerRange)
        device.may_fold.set()
        published = reports.next()
        assert isinstance(published, ev.BlockRange)
        assert not whole.is_awaited.is_set()
    whole_block = memoryview(bytearray(device.read_view(1)))
    assert published.digests == digests_of(data.digest, [whole_block], [7])
    assert device.num_folded == 1
