"""Blocks from pool to pool by runs and by lists of addresses: the same bytes as one by one, and no other byte."""

import random
from collections.abc import Sequence

import pytest

from kv_transfer.transport import BlockPart, BlockViews
from kv_transfer.transports.block_copy import PoolItems, copying

BLOCK_BYTES, NUM_BLOCKS = 16384, 160
RUN = list(range(40, 40 + NUM_BLOCKS // 2))
WORN = random.Random(5).sample(range(NUM_BLOCKS), NUM_BLOCKS // 2)
TWO_RUNS = [*range(100, 130), *range(20, 70)]
CONTENT = random.Random(6).randbytes(BLOCK_BYTES * NUM_BLOCKS)


def copied(source_ids: Sequence[int], target_ids: Sequence[int], part: BlockPart | None) -> bytes:
    """The target pool after a copy in two pieces, out of a pool that nobody may write to."""
    target = bytearray(BLOCK_BYTES * NUM_BLOCKS)
    source_views = BlockViews(memoryview(CONTENT), BLOCK_BYTES, source_ids, part)
    target_views = BlockViews(memoryview(target), BLOCK_BYTES, target_ids, part)
    copy, middle = copying(PoolItems.of(source_views), PoolItems.of(target_views)), len(source_ids) // 3
    copy(0, middle)
    copy(middle, len(source_ids))
    return bytes(target)


def expected(source_ids: Sequence[int], target_ids: Sequence[int], part: BlockPart | None) -> bytes:
    target = bytearray(BLOCK_BYTES * NUM_BLOCKS)
    start, count = (part.start_byte, part.num_bytes) if part else (0, BLOCK_BYTES)
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        out_of, into = source_id * BLOCK_BYTES + start, target_id * BLOCK_BYTES + start
        target[into : into + count] = CONTENT[out_of : out_of + count]
    return bytes(target)


@pytest.mark.parametrize("part", [None, BlockPart(0, 8), BlockPart(4096, 12288)])
@pytest.mark.parametrize("target_ids", [RUN, WORN, TWO_RUNS, RUN[::-1]], ids=["run", "worn", "two", "down"])
@pytest.mark.parametrize("source_ids", [RUN, WORN, TWO_RUNS, RUN[::-1]], ids=["run", "worn", "two", "down"])
def test_every_byte_arrives_where_it_should_and_no_other_changes(
    source_ids: list[int], target_ids: list[int], part: BlockPart | None
) -> None:
    assert copied(source_ids, target_ids, part) == expected(source_ids, target_ids, part)


def test_a_pool_can_be_closed_while_its_items_are_named() -> None:
    """An error in the middle of a read keeps its frames, and the peer's pool is unmapped all the same."""
    pool = bytearray(BLOCK_BYTES * NUM_BLOCKS)
    view = memoryview(pool)
    items = PoolItems.of(BlockViews(view, BLOCK_BYTES, WORN))
    other = PoolItems.of(BlockViews(memoryview(CONTENT), BLOCK_BYTES, RUN))
    copy = copying(other, items)
    copy(0, len(WORN))
    view.release()
    pool.clear()  # BufferError, if anything kept the pool's buffer
    assert items.num_bytes == BLOCK_BYTES
