"""Blocks from pool to pool: the loop in C and Python copy the same bytes, and no other byte."""

import random
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest

from kv_transfer.native.compiling import load_copy_blocks
from kv_transfer.protocol.reads import BlockPart, Read
from kv_transfer.transports.block_views import BlockViews
from kv_transfer.transports.shm.receiver import Copy, copy_each, copy_natively

BLOCK_BYTES, NUM_BLOCKS = 16384, 160
RUN = list(range(40, 40 + NUM_BLOCKS // 2))
WORN = random.Random(5).sample(range(NUM_BLOCKS), NUM_BLOCKS // 2)
TWO_RUNS = [*range(100, 130), *range(20, 70)]
CONTENT = random.Random(6).randbytes(BLOCK_BYTES * NUM_BLOCKS)


Copying = Callable[[BlockViews, BlockViews], Copy]


@pytest.fixture(scope="module", params=["past caches", "through caches", "Python"])
def copying(request: pytest.FixtureRequest) -> Copying:
    if request.param == "Python":
        return partial(copy_each, read=Read())
    copy_blocks = load_copy_blocks()
    assert copy_blocks is not None, "these tests need a C compiler"
    return partial(copy_natively, copy_blocks, read=Read(), past_caches=request.param == "past caches")


def copied(
    copying: Copying,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    part: BlockPart | None,
    block_bytes: int = BLOCK_BYTES,
) -> bytes:
    """Return the target pool after a copy in two pieces, out of a read-only pool."""
    target, middle = bytearray(len(CONTENT)), len(source_ids) // 3
    copy = copying(
        BlockViews(memoryview(CONTENT), block_bytes, source_ids, part),
        BlockViews(memoryview(target), block_bytes, target_ids, part),
    )
    copy(0, middle)
    copy(middle, len(source_ids))
    return bytes(target)


def expected(
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    part: BlockPart | None,
    block_bytes: int = BLOCK_BYTES,
) -> bytes:
    target = bytearray(len(CONTENT))
    start, count = (part.start_byte, part.num_bytes) if part else (0, block_bytes)
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        out_of, into = source_id * block_bytes + start, target_id * block_bytes + start
        target[into : into + count] = CONTENT[out_of : out_of + count]
    return bytes(target)


def differing_bytes(found: bytes, wanted: bytes) -> list[int]:
    """Return the first differing offsets: comparing whole pools takes pytest minutes for its message."""
    assert len(found) == len(wanted)
    differs = np.frombuffer(found, np.uint8) != np.frombuffer(wanted, np.uint8)
    return [int(at) for at in np.flatnonzero(differs)[:8]]


@pytest.mark.parametrize("part", [None, BlockPart(0, 8), BlockPart(4096, 12288), BlockPart(33, 5000)])
@pytest.mark.parametrize("target_ids", [RUN, WORN, TWO_RUNS, RUN[::-1]], ids=["run", "worn", "two", "down"])
@pytest.mark.parametrize("source_ids", [RUN, WORN, TWO_RUNS, RUN[::-1]], ids=["run", "worn", "two", "down"])
def test_every_byte_arrives_where_it_should_and_no_other_changes(
    copying: Copying, source_ids: list[int], target_ids: list[int], part: BlockPart | None
) -> None:
    found = copied(copying, source_ids, target_ids, part)
    assert not differing_bytes(found, expected(source_ids, target_ids, part))


def test_many_small_blocks_and_parts_are_copied_as_well(copying: Copying) -> None:
    small = BLOCK_BYTES // 32
    many, others = (random.Random(seed).sample(range(32 * NUM_BLOCKS), 1100) for seed in (7, 8))
    reads: list[tuple[list[int], list[int], BlockPart | None, int]] = [
        (WORN, WORN[::-1], None, BLOCK_BYTES),
        (WORN[:7], WORN[20:27], None, BLOCK_BYTES),
        (WORN[30:50], WORN[:20], BlockPart(4096, small), BLOCK_BYTES),
        (many, others, None, small),
        (others[:90], many[:90], None, small),
        (WORN[::-1], WORN, None, BLOCK_BYTES),
    ]
    for read in reads:
        assert not differing_bytes(copied(copying, *read), expected(*read))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 2047, 2048, 2049, 2111, 5000])
@pytest.mark.parametrize("offset", [0, 1, 15, 63])
def test_blocks_of_any_size_lie_anywhere(copying: Copying, size: int, offset: int) -> None:
    """The compiled loop writes whole cache lines past the cache; what is before and behind them it does not."""
    target = bytearray(8 * size + offset + 64)
    source, into = memoryview(CONTENT)[offset:], memoryview(target)[offset:]
    copy = copying(BlockViews(source, size, [5, 2, 9]), BlockViews(into, size, [1, 7, 4]))
    copy(0, 3)
    wanted = bytearray(len(target))
    for source_id, target_id in ((5, 1), (2, 7), (9, 4)):
        at = offset + target_id * size
        wanted[at : at + size] = source[source_id * size : (source_id + 1) * size]
    assert target == wanted


def test_a_pool_can_be_closed_while_its_blocks_are_named(copying: Copying) -> None:
    """An error in the middle of a read keeps its frames, and the peer's pool is unmapped all the same."""
    pool = bytearray(BLOCK_BYTES * NUM_BLOCKS)
    view = memoryview(pool)
    blocks = BlockViews(view, BLOCK_BYTES, WORN)
    copy = copying(BlockViews(memoryview(CONTENT), BLOCK_BYTES, RUN), blocks)
    copy(0, len(WORN))
    view.release()
    pool.clear()  # BufferError, if anything kept the pool's buffer
    assert blocks.view_bytes == BLOCK_BYTES
