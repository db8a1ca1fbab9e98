"""Blocks from pool to pool by runs and by lists of addresses: the same bytes as one by one, and no other byte."""

import random
from collections.abc import Sequence

import pytest

from kv_transfer.transport import BlockPart, BlockViews
from kv_transfer.transports.block_copy import BlockCopier, PoolItems

BLOCK_BYTES, NUM_BLOCKS = 16384, 160
RUN = list(range(40, 40 + NUM_BLOCKS // 2))
WORN = random.Random(5).sample(range(NUM_BLOCKS), NUM_BLOCKS // 2)
TWO_RUNS = [*range(100, 130), *range(20, 70)]
CONTENT = random.Random(6).randbytes(BLOCK_BYTES * NUM_BLOCKS)


def items_of(
    pool: memoryview, block_ids: Sequence[int], part: BlockPart | None = None, block_bytes: int = BLOCK_BYTES
) -> PoolItems:
    return PoolItems.of(BlockViews(pool, block_bytes, block_ids, part))


def copied(
    copier: BlockCopier,
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    part: BlockPart | None,
    block_bytes: int = BLOCK_BYTES,
) -> bytes:
    """The target pool after a copy in two pieces, out of a pool that nobody may write to."""
    target, middle = bytearray(len(CONTENT)), len(source_ids) // 3
    copy = copier.copying(
        items_of(memoryview(CONTENT), source_ids, part, block_bytes),
        items_of(memoryview(target), target_ids, part, block_bytes),
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


@pytest.mark.parametrize("part", [None, BlockPart(0, 8), BlockPart(4096, 12288)])
@pytest.mark.parametrize("target_ids", [RUN, WORN, TWO_RUNS, RUN[::-1]], ids=["run", "worn", "two", "down"])
@pytest.mark.parametrize("source_ids", [RUN, WORN, TWO_RUNS, RUN[::-1]], ids=["run", "worn", "two", "down"])
def test_every_byte_arrives_where_it_should_and_no_other_changes(
    source_ids: list[int], target_ids: list[int], part: BlockPart | None
) -> None:
    assert copied(BlockCopier(), source_ids, target_ids, part) == expected(source_ids, target_ids, part)


def test_one_copier_serves_one_read_after_the_other() -> None:
    """Its lists of addresses are used again: for fewer blocks, for more than they had room for, for other sizes."""
    copier, small = BlockCopier(), BLOCK_BYTES // 32
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
        assert copied(copier, *read) == expected(*read)


def test_a_pool_can_be_closed_while_its_items_are_named() -> None:
    """An error in the middle of a read keeps its frames, and the peer's pool is unmapped all the same."""
    pool = bytearray(BLOCK_BYTES * NUM_BLOCKS)
    view = memoryview(pool)
    items, other = items_of(view, WORN), items_of(memoryview(CONTENT), RUN)
    copy = BlockCopier().copying(other, items)
    copy(0, len(WORN))
    view.release()
    pool.clear()  # BufferError, if anything kept the pool's buffer
    assert items.num_bytes == BLOCK_BYTES
