"""Reads of a part of each block (a group of layers), over every transport: those bytes, and no other."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from contract.errors import TransferError
from contract.layout import KVLayout
from engine.connector import KVMemory
from engine.kv_cache.memory import MappedKVMemory
from kv_transfer.protocol.reads import BlockPart, LeaseName, RangeGrant, Read, ReadRequest, Source
from kv_transfer.transports.block_views import write_views
from kv_transfer.transports.leases import LeaseBook, Sessions
from kv_transfer.transports.registry import open_transport, transport_names
from kv_transfer.transports.transport import TransportContext
from tests.kv_transfer.fakes import ByteMemory, context_of

NAME = LeaseName("t", 0, "lease")
LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
LAYER_BYTES = LAYOUT.block_bytes // LAYOUT.num_layers
MIDDLE = BlockPart(LAYER_BYTES, 2 * LAYER_BYTES)
LENT = [6, 1, 5, 2]


class Pair:
    """A sender and a receiver of one transport in this process, over a pool each; layer i of block b is of one byte."""

    def __init__(self, name: str, folder: Path, undo: ExitStack) -> None:
        self.sessions = Sessions()
        self.sessions.begin("token")
        self.lent, self.target = MappedKVMemory(LAYOUT, 8), MappedKVMemory(LAYOUT, 8)
        for block_id in range(8):
            for layer in range(LAYOUT.num_layers):
                start = layer * LAYER_BYTES
                self.lent.write_view(block_id)[start : start + LAYER_BYTES] = (
                    bytes([self.byte(block_id, layer)]) * LAYER_BYTES
                )
        there, here = (open_transport(name, self._context(each, folder)) for each in ("there", "here"))
        for opened, memory in ((there, self.lent), (here, self.target)):
            opened.sender.start(memory)
            undo.callback(opened.sender.close)
            undo.callback(opened.receiver.close)
        self.receiver, self.source = here.receiver, Source("p", "there", there.sender.address, "token", name)
        grant = there.sender.publish(NAME, LENT)
        self.grants = () if grant is None else (RangeGrant(0, len(LENT), {name: grant}),)

    def fetch(self, blocks: range, views: Sequence[memoryview], part: BlockPart | None) -> None:
        request = ReadRequest(NAME, blocks.start, len(blocks), self.grants, part)
        self.receiver.fetch(self.source, request, views, Read())

    def byte(self, block_id: int, layer: int) -> int:
        return 10 * block_id + layer + 1

    def layers(self, memory: KVMemory, block_id: int) -> list[int]:
        """The byte of each layer, which is full of it."""
        view = memory.read_view(block_id)
        layers = [set(view[at : at + LAYER_BYTES]) for at in range(0, LAYOUT.block_bytes, LAYER_BYTES)]
        assert all(len(found) == 1 for found in layers)
        return [found.pop() for found in layers]

    def _context(self, boot_id: str, folder: Path) -> TransportContext:
        return context_of(boot_id, self.sessions, shm_dir=folder)


@contextmanager
def pair_of(name: str, folder: Path) -> Iterator[Pair]:
    with ExitStack() as undo:
        yield Pair(name, folder, undo)


@pytest.mark.parametrize("name", transport_names())
def test_a_part_of_each_block_is_read(name: str, tmp_path: Path) -> None:
    """Into the same part of blocks of the pool, then into memory of another kind, and then all of a block."""
    with pair_of(name, tmp_path) as pair:
        pair.fetch(range(1, 4), write_views(pair.target, [3, 7, 4], MIDDLE), MIDDLE)
        for target_id, block_id in ((3, 1), (7, 5), (4, 2)):
            wanted = [0, pair.byte(block_id, 1), pair.byte(block_id, 2), 0]
            assert pair.layers(pair.target, target_id) == wanted
        assert not any(pair.target.read_view(2))
        staged = memoryview(bytearray(2 * LAYER_BYTES))
        last = BlockPart(3 * LAYER_BYTES, LAYER_BYTES)
        pair.fetch(range(2), [staged[LAYER_BYTES:], staged[:LAYER_BYTES]], last)
        assert [set(staged[:LAYER_BYTES]), set(staged[LAYER_BYTES:])] == [
            {pair.byte(1, 3)},
            {pair.byte(6, 3)},
        ]
        pair.fetch(range(3, 4), write_views(pair.target, [3]), None)
        assert pair.layers(pair.target, 3) == pair.layers(pair.lent, 2)


@pytest.mark.parametrize("name", transport_names())
def test_no_part_reaches_into_the_next_block(name: str, tmp_path: Path) -> None:
    beyond = BlockPart(LAYOUT.block_bytes - LAYER_BYTES, 2 * LAYER_BYTES)
    with pair_of(name, tmp_path) as pair:
        staged = memoryview(bytearray(2 * LAYER_BYTES))
        with pytest.raises(TransferError):
            pair.fetch(range(1), [staged], beyond)
        assert not any(staged)
        pair.fetch(range(1), write_views(pair.target, [0]), None)
        assert pair.layers(pair.target, 0) == pair.layers(pair.lent, 6)


@pytest.mark.parametrize("memory", [MappedKVMemory(LAYOUT, 4), ByteMemory(LAYOUT, 4)], ids=["flat", "other"])
def test_a_sender_refuses_a_part_that_its_blocks_do_not_have(memory: KVMemory) -> None:
    book = LeaseBook(lambda _: None)
    book.start(memory)
    book.extend(NAME, [1, 2])
    for part in (BlockPart(LAYOUT.block_bytes, 1), BlockPart(1, LAYOUT.block_bytes), BlockPart(-1, 4)):
        with (
            pytest.raises(TransferError, match="are not in a block of"),
            book.reading(ReadRequest(NAME, 0, 1, part=part)),
        ):
            pass
        with pytest.raises(TransferError, match="are not in a block of"):
            write_views(memory, [0], part)
    with book.reading(ReadRequest(NAME, 1, 1, part=MIDDLE)) as (view,):
        assert view.nbytes == MIDDLE.num_bytes
