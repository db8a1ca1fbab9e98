"""The pool: zeroed, one contiguous range for each block, byte views that are the tensor (host) or copies (device)."""

import mmap
import os

import pytest
import torch

from contract.layout import KVLayout
from engine.connector import KVMemory, LandsDirectly
from engine.kv_cache.memory import MappedKVMemory, StagedKVMemory, allocate

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 5


@pytest.fixture
def staged() -> StagedKVMemory:
    return StagedKVMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu"))


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


def test_what_has_landed_directly_is_kept(staged: StagedKVMemory) -> None:
    """A library has written a part of blocks 1 and 2; the rest of block 1 comes through host memory."""
    half = LAYOUT.block_bytes // 2
    assert staged.land_directly([1, 2])
    rows = staged.pool.view(NUM_BLOCKS, -1).view(torch.uint8)
    rows[1, :half] = 7
    rows[2] = 8
    assert [bytes(view) for view in staged.read_parts([2, 1], half - 1, half + 1)] == [
        b"\x08\x08",
        b"\x07\x00",
    ]
    staged.write_view(1)[half:] = bytes([9]) * half
    staged.commit([1, 2])
    assert bytes(staged.read_view(1)) == bytes([7]) * half + bytes([9]) * half
    assert bytes(staged.read_view(2)) == bytes([8]) * LAYOUT.block_bytes


def test_a_block_with_a_view_does_not_land_directly(staged: StagedKVMemory) -> None:
    """The commit of its view would overwrite it. After the commit it may."""
    staged.write_view(3)[:] = bytes([5]) * LAYOUT.block_bytes
    assert not staged.land_directly([2, 3])
    staged.commit([2, 3])
    assert bytes(staged.read_view(3)) == bytes([5]) * LAYOUT.block_bytes
    assert staged.land_directly([2, 3])
    assert staged.address == staged.pool.data_ptr()
    assert isinstance(staged, LandsDirectly)
    assert not isinstance(MappedKVMemory(LAYOUT, 2), LandsDirectly)


def test_landing_waits_for_the_steps_before(staged: StagedKVMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was launched may still read or write what is freed now. Reading waits for nothing: its caller does."""
    waits = list[str]()

    class Step:
        def synchronize(self) -> None:
            waits.append("waited")

    monkeypatch.setattr(staged, "_computed", Step())
    staged.read_parts([1], 0, 4)
    staged.commit([1])
    assert waits == []
    staged.land_directly([1])
    staged.write_view(2)
    staged.commit([2])
    assert waits == ["waited"] * 2


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
