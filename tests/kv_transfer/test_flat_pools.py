"""Pools whose blocks lie side by side in host memory: blocks are named, not handed over one by one, and land the same."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from contract.errors import TransferError
from contract.layout import KVLayout
from engine.kv_cache.memory import MappedKVMemory
from kv_transfer.data import reading
from kv_transfer.protocol.reads import (
    BlockPart,
    LeaseName,
    RangeGrant,
    Read,
    ReadRequest,
    ReadStoppedError,
    Source,
    StaleLeaseError,
    blocks_per_piece,
)
from kv_transfer.transports.block_views import BlockViews, read_views, write_views
from kv_transfer.transports.leases import Sessions
from kv_transfer.transports.registry import open_transport
from kv_transfer.transports.transport import Transport
from tests.kv_transfer.fakes import ByteMemory, GatedRead, context_of

WAIT = 30.0
NAME, OTHER = LeaseName("t", 0, "lease"), LeaseName("u", 0, "other")
SMALL = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=2, dtype="float32")
LARGE = KVLayout(num_layers=1, num_kv_heads=8, head_dim=256, block_size=16, dtype="float32")
MANY = 256 * 9 + 40
"""More pieces than the tcp receiver asks for ahead, and a short one at the end."""


def content(block_id: int) -> bytes:
    return (block_id + 1).to_bytes(4, "little")


def filled(layout: KVLayout, num_blocks: int) -> MappedKVMemory:
    memory = MappedKVMemory(layout, num_blocks)
    for block_id in range(num_blocks):
        memory.write_view(block_id)[:] = content(block_id) * (layout.block_bytes // 4)
    return memory


class Port:
    """Both roles of a transport in this process, over a flat pool each."""

    def __init__(self, name: str, folder: Path, layout: KVLayout, num_blocks: int) -> None:
        self.target = MappedKVMemory(layout, num_blocks)
        self.sessions, self.idle = Sessions(), list[LeaseName]()
        self.sessions.begin("token")
        context = context_of("b", self.sessions, self.idle.append, shm_dir=folder)
        self.opened: Transport = open_transport(name, context)
        self.opened.sender.start(filled(layout, num_blocks))
        self.source = Source("p", "b", self.opened.sender.address, "token", name)
        self.grants: dict[LeaseName, tuple[RangeGrant, ...]] = {}

    def publish(self, name: LeaseName, block_ids: Sequence[int]) -> None:
        given, grant = self.grants.get(name, ()), self.opened.sender.publish(name, block_ids)
        if grant is not None:
            first = given[-1].end_block if given else 0
            self.grants[name] = (*given, RangeGrant(first, len(block_ids), {self.source.transport: grant}))

    def fetch(self, name: LeaseName, blocks: range, into: Sequence[int], read: Read | None = None) -> None:
        views, grants = write_views(self.target, into), self.grants.get(name, ())
        request = ReadRequest(name, blocks.start, len(blocks), grants)
        self.opened.receiver.fetch(self.source, request, views, read or Read())

    def landed(self, block_ids: Sequence[int]) -> list[bytes]:
        return [bytes(self.target.read_view(block_id)[-4:]) for block_id in block_ids]


@contextmanager
def port_of(name: str, folder: Path, layout: KVLayout, num_blocks: int) -> Iterator[Port]:
    port = Port(name, folder, layout, num_blocks)
    try:
        yield port
    finally:
        port.opened.receiver.close()
        port.opened.sender.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("layout", "num_blocks"), [(SMALL, MANY), (LARGE, 20)])
def test_scattered_blocks_land_where_they_should(
    transport: str, layout: KVLayout, num_blocks: int, tmp_path: Path
) -> None:
    """Lent in one order, landing in another; all of them, and some of both ranges that were published."""
    assert (LARGE.block_bytes, SMALL.block_bytes) == (2**18, 64)
    with port_of(transport, tmp_path, layout, num_blocks) as port:
        lent = [(7 * number) % num_blocks for number in range(num_blocks)]
        into = [(13 * number) % num_blocks for number in range(num_blocks)]
        assert len(set(lent)) == len(set(into)) == num_blocks
        port.publish(NAME, lent[:10])
        port.publish(NAME, lent[10:])
        port.fetch(NAME, range(num_blocks), into)
        assert port.landed(into) == [content(block_id) for block_id in lent]
        some = range(7, num_blocks - 3)
        port.fetch(NAME, some, into[: len(some)])
        wanted = [*lent[7 : num_blocks - 3], *lent[len(some) :]]
        assert port.landed(into) == [content(block_id) for block_id in wanted]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("layout", "num_blocks"), [(SMALL, MANY), (LARGE, 20)])
def test_what_has_landed_is_told_piece_by_piece(
    transport: str, layout: KVLayout, num_blocks: int, tmp_path: Path
) -> None:
    """The bytes of a reported piece have arrived: it is verified before the next piece arrives."""
    told, everything, step = list[int](), range(num_blocks), blocks_per_piece(layout.block_bytes)
    with port_of(transport, tmp_path, layout, num_blocks) as port:
        port.publish(NAME, everything)
        read = Read()

        def landed(count: int) -> None:
            known = told[-1] if told else 0
            assert port.landed(everything[known:count]) == [content(each) for each in range(known, count)]
            told.append(count)

        with read.reporting(landed):
            port.fetch(NAME, everything, everything, read)
        port.fetch(NAME, range(1), [0], read)
    assert told == sorted(told)
    assert told[-1] == num_blocks
    assert all(later - one <= step for one, later in pairwise([0, *told]))
    assert len(told) > 1


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("blocks", [range(3), range(2, 3), range(1, 4), range(5, 6)])
def test_nobody_reads_outside_a_lease(transport: str, blocks: range, tmp_path: Path) -> None:
    """Neither across its end nor behind it."""
    with port_of(transport, tmp_path, SMALL, 8) as port:
        port.publish(NAME, [7, 6])
        outside = f"block {max(2, blocks.start)} of transfer t is not readable; 2 blocks are"
        refused = f"blocks {blocks.start}..{blocks.stop - 1} of transfer t .* refused as stale"
        words = outside if transport == "shm" else refused
        with pytest.raises(StaleLeaseError, match=words):
            port.fetch(NAME, blocks, range(len(blocks)))
        assert not any(port.target.read_view(0))
        port.fetch(NAME, range(2), [0, 1])
        assert port.landed([0, 1]) == [content(7), content(6)]


@pytest.mark.parametrize("blocks", [range(-1, 1), range(-1, 0)])
@pytest.mark.parametrize(
    ("transport", "words"),
    [
        ("shm", "block -1 of transfer t is not readable; 2 blocks are"),
        ("tcp", "the connection was closed after 0 of"),
    ],
)
def test_nobody_reads_before_a_lease(transport: str, words: str, blocks: range, tmp_path: Path) -> None:
    """A request for such blocks is malformed, and ends the connection."""
    with port_of(transport, tmp_path, SMALL, 8) as port:
        port.publish(NAME, [7, 6])
        with pytest.raises(TransferError, match=words):
            port.fetch(NAME, blocks, range(len(blocks)))
        assert not any(port.target.read_view(0))
        port.fetch(NAME, range(2), [0, 1])
        assert port.landed([0, 1]) == [content(7), content(6)]


class EndingRead(Read):
    """Does something before the look number ``at`` whether it was stopped."""

    def __init__(self, at: int, then: Callable[[], None]) -> None:
        super().__init__()
        self._looks_left, self._then = at, then

    def check(self) -> None:
        self._looks_left -= 1
        if self._looks_left == 0:
            self._then()
        super().check()


def test_a_lease_that_ends_while_pieces_of_it_are_asked_for_gives_no_more_of_them(tmp_path: Path) -> None:
    """Law 3 with more on its way than sockets hold: the read fails, and its later answers reach no other read."""
    with port_of("tcp", tmp_path, LARGE, 96) as port:
        sender, everything = port.opened.sender, range(96)
        port.publish(NAME, everything)
        port.publish(OTHER, [5])
        read = EndingRead(4, lambda: sender.release(NAME))
        with pytest.raises(Exception, match=r"refused as stale|short read|reading from worker p failed"):
            port.fetch(NAME, everything, everything, read)
        assert port.landed([0]) == [content(0)]
        assert not any(port.target.read_view(95))
        port.fetch(OTHER, range(1), [1])
        assert port.landed([1]) == [content(5)]


def test_a_lease_that_ends_between_two_pieces_of_shm_fails_the_read(tmp_path: Path) -> None:
    """Law 3 where a piece is copied by one call: earlier pieces are not reported again, and no later one counts."""
    step, everything, told = blocks_per_piece(SMALL.block_bytes), range(MANY), list[int]()
    with port_of("shm", tmp_path, SMALL, MANY) as port:
        sender = port.opened.sender
        port.publish(NAME, everything)
        read = EndingRead(4, lambda: sender.release(NAME))
        with (
            pytest.raises(StaleLeaseError, match=f"ended while blocks {step}..{2 * step - 1} of {MANY}"),
            read.reporting(told.append),
        ):
            port.fetch(NAME, everything, everything, read)
        assert told == [step]
        assert not any(port.target.read_view(2 * step))


@pytest.mark.parametrize("layout", [SMALL, LARGE])
def test_a_stopped_read_of_shm_ends_after_at_most_a_piece(layout: KVLayout, tmp_path: Path) -> None:
    step = blocks_per_piece(layout.block_bytes)
    everything = range(step + 5)
    with port_of("shm", tmp_path, layout, len(everything)) as port:
        port.publish(NAME, everything)
        read, outcome = GatedRead(1), list[BaseException]()

        def fetch() -> None:
            try:
                port.fetch(NAME, everything, everything, read)
            except ReadStoppedError as error:
                outcome.append(error)

        reading = threading.Thread(target=fetch)
        reading.start()
        assert read.is_waiting.wait(WAIT)
        read.stop()
        read.gate.set()
        reading.join(WAIT)
        assert len(outcome) == 1
        assert port.landed([step - 1]) == [content(step - 1)]
        assert not any(port.target.read_view(step))


@pytest.mark.parametrize("layout", [SMALL, LARGE])
def test_blocks_of_another_size_are_refused(layout: KVLayout, tmp_path: Path) -> None:
    with port_of("shm", tmp_path, layout, 2) as port:
        port.publish(NAME, [0])
        port.target = MappedKVMemory(LARGE if layout is SMALL else SMALL, 2)
        with pytest.raises(
            Exception, match=f"has {layout.block_bytes} bytes, not {port.target.layout.block_bytes}"
        ):
            port.fetch(NAME, range(1), [0])


def test_views_of_a_flat_pool_are_those_of_its_blocks() -> None:
    memory = filled(SMALL, 8)
    views = write_views(memory, [5, 2, 7])
    assert isinstance(views, BlockViews)
    wanted = [memory.read_view(block_id) for block_id in (5, 2, 7)]
    assert len(views) == 3
    assert list(views) == wanted
    assert [views[0], views[-1]] == [wanted[0], wanted[2]]
    assert list(views[1:]) == wanted[1:]
    assert [views.ids.tolist(), views[1:].ids.tolist()] == [[5, 2, 7], [2, 7]]
    views[1][:4] = b"here"
    assert bytes(memory.read_view(2)[:4]) == b"here"
    assert all(view.readonly for view in read_views(memory, [0, 1]))
    assert list(write_views(memory, [])) == []


def test_kept_views_are_the_blocks_as_they_are_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_KEPT_VIEWS", 3)
    memory = filled(SMALL, 8)
    kept = reading.DigestViews(memory)
    first = kept.of(write_views(memory, [5, 2, 5]))
    assert first == [memory.read_view(block_id) for block_id in (5, 2, 5)]
    memory.write_view(2)[:4] = b"here"
    again = kept.of(read_views(memory, (2,)))
    assert again[0] is first[1] and again[0].readonly and bytes(again[0][:4]) == b"here"
    for block_id in range(8):
        assert kept.of(read_views(memory, [block_id])) == [memory.read_view(block_id)]
        assert len(kept) <= 4
    part = read_views(memory, [1], BlockPart(4, 4))
    assert kept.of(part) is part


@pytest.mark.parametrize(("block_ids", "outside"), [([8], 8), ([0, -1], -1), ([3, 99, 4], 99), ([-9, 3], -9)])
def test_blocks_that_a_pool_does_not_have_have_no_views(block_ids: list[int], outside: int) -> None:
    for memory in (filled(SMALL, 8), ByteMemory(SMALL, 8)):
        for views in (read_views, write_views):
            with pytest.raises(IndexError, match=f"block {outside} of a pool of 8"):
                views(memory, block_ids)


def test_a_pool_that_is_not_flat_is_asked_for_every_block() -> None:
    memory = ByteMemory(SMALL, 8)
    memory.fill(3, b"abc")
    for views in (read_views(memory, [3, 4]), write_views(memory, [3, 4])):
        assert isinstance(views, list)
        assert views == [memory.read_view(3), memory.read_view(4)]
