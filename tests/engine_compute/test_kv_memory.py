"""The pool: zeroed, one contiguous range for each block, byte views that are the tensor (host) or copies (device)."""

import mmap
import os

import pytest
import torch

from contract.layout import KVLayout
from engine.connector import KVMemory
from engine.kv_cache.memory import MappedKVMemory, StagedKVMemory, allocate

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 5


def test_the_pool_is_zeroed_and_layers_are_views() -> None:
    """D10: per layer in order, zeros; block 0 is the null block."""
    memory = allocate(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    assert isinstance(memory, MappedKVMemory)
    assert tuple(memory.pool.shape) == (5, 3, 2, 2, 4, 8)
    assert memory.pool.is_contiguous()
    assert not memory.pool.any()
    memory.layers[1][3] = 7.0
    assert bool((memory.pool[3, 1] == 7.0).all())
    assert not memory.pool[3, 0].any()
    memory.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_views_share_the_memory_of_the_tensor(dtype: str) -> None:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype=dtype)
    memory: KVMemory = MappedKVMemory(layout, 3)
    assert isinstance(memory, MappedKVMemory)
    assert len(memory.read_view(1)) == layout.block_bytes
    memory.pool[1] = 1.5
    one = torch.full((layout.block_bytes // memory.pool.element_size(),), 1.5, dtype=memory.pool.dtype)
    assert memory.read_view(1) == one.view(torch.uint8).numpy().tobytes()
    memory.write_view(2)[:] = memory.read_view(1)
    memory.commit([2])
    assert torch.equal(memory.pool[2], memory.pool[1])
    assert not memory.pool[0].any()
    assert memory.read_view(1).readonly
    memory.close()


def test_another_mapping_of_the_memfd_shows_the_pool() -> None:
    memory = MappedKVMemory(LAYOUT, NUM_BLOCKS)
    assert memory.memfd is not None
    memory.pool[4] = 2.0
    size = NUM_BLOCKS * LAYOUT.block_bytes
    with mmap.mmap(memory.memfd, size, prot=mmap.PROT_READ) as other:
        start = 4 * LAYOUT.block_bytes
        assert other[start : start + LAYOUT.block_bytes] == bytes(memory.read_view(4))
    descriptor = memory.memfd
    memory.close()
    memory.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_staged_views_are_copies_until_commit() -> None:
    """Tests the behaviour of a device pool on a device that every machine has."""
    memory: KVMemory = StagedKVMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    assert isinstance(memory, StagedKVMemory)
    memory.pool[1] = 3.0
    memory.mark_computed()
    seen = memory.read_view(1)
    memory.write_view(2)[:] = seen
    memory.write_view(3)[:] = bytes(LAYOUT.block_bytes)
    assert not memory.pool[2].any()
    memory.commit([2, 3])
    assert torch.equal(memory.pool[2], memory.pool[1])
    memory.pool[1] = 4.0
    assert bytes(seen) == bytes(memory.read_view(2))
    assert seen.readonly
    memory.write_view(4)[:4] = b"abcd"
    assert bytes(memory.write_view(4)[:4]) == b"abcd"
    memory.close()


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_a_block_outside_the_pool_is_rejected(block_id: int) -> None:
    for memory in (
        MappedKVMemory(LAYOUT, NUM_BLOCKS),
        StagedKVMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu")),
    ):
        with pytest.raises(IndexError, match="pool of 5 blocks"):
            memory.read_view(block_id)
        with pytest.raises(IndexError, match="pool of 5 blocks"):
            memory.write_view(block_id)
        memory.close()
