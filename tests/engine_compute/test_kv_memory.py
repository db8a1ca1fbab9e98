"""The pool: zeroed, one contiguous range for each block, byte views that are the tensor (host) or copies (device)."""

import mmap
import os
import weakref

import pytest
import torch

from contract.errors import InternalError
from contract.layout import KVLayout
from engine.connector import KVMemory
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


def test_blocks_of_a_device_are_read_and_written_by_copies(staged: StagedKVMemory) -> None:
    """Tests the behaviour of a device pool on a device that every machine has."""
    staged.pool[1] = 3.0
    staged.mark_computed()
    seen = staged.read_view(1)
    (row,) = staged.host_rows(1, LAYOUT.block_bytes)
    row.view[:] = seen
    assert not staged.pool[2].any()
    staged.write_rows([2], 0, [row])
    staged.commit([2])
    assert torch.equal(staged.pool[2], staged.pool[1])
    staged.pool[1] = 4.0
    assert bytes(seen) == bytes(staged.read_view(2))
    assert seen.readonly
    with pytest.raises(InternalError, match="block 4 is on a device"):
        staged.write_view(4)
    assert staged.device_pool is staged
    assert staged.address == staged.pool.data_ptr()
    assert MappedKVMemory(LAYOUT, 2).device_pool is None


def test_parts_of_blocks_are_written_where_they_belong(staged: StagedKVMemory) -> None:
    """A library has written the first half of block 1; the rest comes through host memory. Other blocks are untouched."""
    half = LAYOUT.block_bytes // 2
    rows = staged.pool.view(NUM_BLOCKS, -1).view(torch.uint8)
    rows[1, :half] = 7
    one, two = staged.host_rows(2, half)
    one.view[:] = bytes([9]) * half
    two.view[:] = bytes([8]) * half
    staged.write_rows([1, 3], half, [one, two])
    staged.commit([1, 3])
    assert bytes(staged.read_view(1)) == bytes([7]) * half + bytes([9]) * half
    assert bytes(staged.read_view(3)) == bytes(half) + bytes([8]) * half
    parts = staged.begin_reading([3, 1], half - 1, half + 1)
    assert [bytes(view) for view in parts.views()] == [b"\x00\x08", b"\x07\x09"]
    assert not rows[[0, 2, 4]].any()


class Step:
    """A point in a device's work that is reached when it is waited for."""

    def __init__(self) -> None:
        self.is_reached = False

    def synchronize(self) -> None:
        self.is_reached = True

    def query(self) -> bool:
        return self.is_reached


def test_memory_of_copies_is_kept_until_they_are_over(
    staged: StagedKVMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy reads its row at any time before its event; a commit waits for all that were begun."""
    steps = [Step() for _ in range(3)]
    launched = iter(steps)
    monkeypatch.setattr(staged, "_launched", lambda: next(launched))
    rows = staged.host_rows(3, 4)
    kept = [weakref.ref(row) for row in rows]
    for block_id in range(3):
        staged.write_rows([block_id], 0, [rows.pop()])
    assert all(row() is not None for row in kept)
    steps[1].is_reached = True  # not the oldest one
    staged.commit([])
    assert [step.is_reached for step in steps] == [True] * 3
    assert all(row() is None for row in kept)


def test_writing_waits_for_the_steps_before(staged: StagedKVMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that was launched may still read or write what is freed now. Reading waits for nothing: its caller does."""
    step = Step()
    monkeypatch.setattr(staged, "_computed", step)
    staged.begin_reading([1], 0, 4).views()
    staged.commit([1])
    assert not step.is_reached
    staged.wait_until_unused()
    assert step.is_reached


def test_each_step_has_an_event_of_its_own(staged: StagedKVMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for a step does not include those after it. Blocks that are freed now wait for the newest one."""
    steps = [Step(), Step()]
    launched = iter(steps)
    monkeypatch.setattr(staged, "_launched", lambda: next(launched))
    first = staged.mark_computed()
    staged.mark_computed()
    first.synchronize()
    assert [step.is_reached for step in steps] == [True, False]
    staged.wait_until_unused()
    assert [step.is_reached for step in steps] == [True, True]


def test_an_area_may_be_written_at_once(staged: StagedKVMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library writes it beside all streams, so nothing that was launched on its memory may still run, zeroing included."""
    step = Step()
    monkeypatch.setattr(staged, "_launched", lambda: step)
    area = staged.landing_area(staged.layout, 3)
    assert step.is_reached
    assert area.num_blocks == 3
    assert area.address != staged.address


@pytest.mark.parametrize("block_id", [-1, NUM_BLOCKS])
def test_a_block_outside_the_pool_is_rejected(block_id: int) -> None:
    for memory in (
        MappedKVMemory(LAYOUT, NUM_BLOCKS),
        StagedKVMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu")),
    ):
        with pytest.raises(IndexError, match="pool of 5 blocks"):
            memory.read_view(block_id)
        memory.close()
