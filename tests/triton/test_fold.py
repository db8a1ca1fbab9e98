"""The sums of blocks by Triton's kernel are those of the host, bit for bit."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from contract.layout import KVLayout
from engine.kv_cache.memory import NUM_TILES, TILE, StagedKVMemory, TritonFold
from kv_transfer.native.folding import fold_by_numpy, fold_words
from kv_transfer.protocol.digests import FOLD64, digests_of
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.block_views import read_views

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning",
        "ignore:overflow encountered:RuntimeWarning",
    ),  # raised by the interpreter
]
AT_ONCE = TILE * NUM_TILES


def pool_of(num_blocks: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return blocks of random bytes, so that words of every sign and size are among them."""
    size = torch.empty(shape, dtype=dtype).nbytes
    content = np.random.default_rng(size).integers(0, 256, (num_blocks, size), np.uint8)
    return torch.from_numpy(content).view(dtype).view(num_blocks, *shape)


@pytest.mark.parametrize(
    ("dtype", "num_words"),
    [
        (torch.float32, 2),
        (torch.bfloat16, 6),
        (torch.float16, TILE - 2),
        (torch.bfloat16, TILE),
        (torch.float32, TILE + 6),
        (torch.float16, AT_ONCE),
        (torch.bfloat16, AT_ONCE + 2),
        (torch.float32, 3 * AT_ONCE - 10),
    ],
)
def test_sums_are_those_of_the_host(dtype: torch.dtype, num_words: int) -> None:
    """Sizes around those of a tile and of a program, whole and in two parts of layers; blocks in any order."""
    pool = pool_of(4, (2, 4 * num_words // dtype.itemsize), dtype)
    size = 8 * num_words
    chosen = [3, 1, 2]
    seeds = np.array([2**64 - 1, 0, 0x0123456789ABCDEF], np.uint64)
    addresses = np.array([pool[block].data_ptr() for block in chosen], np.uint64)
    expected = np.zeros((2, 3), np.uint64)
    fold_words()(expected, addresses, seeds, 0, num_words)
    slow = np.zeros((2, 3), np.uint64)
    fold_by_numpy(slow, addresses, seeds, 0, num_words)
    fold = TritonFold(pool)
    parts = fold(chosen, 0, size // 2, seeds) + fold(chosen, size // 2, size, seeds)
    assert fold(chosen, 0, size, seeds).tolist() == parts.tolist() == expected.tolist() == slow.tolist()


@pytest.mark.parametrize("start", [8, 24, 32])
def test_parts_may_begin_at_any_word(start: int) -> None:
    pool = pool_of(3, (1, 100), torch.float32)
    seeds = np.array([7, 8], np.uint64)
    fold = TritonFold(pool)
    assert (fold([2, 1], 0, start, seeds) + fold([2, 1], start, 400, seeds)).tolist() == fold(
        [2, 1], 0, 400, seeds
    ).tolist()


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[StagedKVMemory]:
    """A pool behind a device's interface, whose kernels are interpreted."""
    monkeypatch.setattr("engine.kv_cache.memory.find_fold", TritonFold)
    layout = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
    memory = StagedKVMemory(layout, 5, torch.device("cpu"))
    memory.pool.view(torch.uint8).random_(0, 256)
    yield memory
    memory.close()


@pytest.mark.parametrize("part", [None, BlockPart(256, 256)])
def test_digests_of_a_device_are_those_of_its_bytes(memory: StagedKVMemory, part: BlockPart | None) -> None:
    blocks = random.Random(5).sample(range(5), 4)
    there = read_views(memory, blocks, part)
    seeds = [random.Random(block).getrandbits(64) for block in blocks]
    if part is None:
        copied = [bytearray(view) for view in there]
        assert digests_of(FOLD64, there, seeds) == digests_of(
            FOLD64, [memoryview(each) for each in copied], seeds
        )
    sums = np.zeros((2, 4), np.uint64)
    expected = np.zeros((2, 4), np.uint64)
    first = 0 if part is None else part.start_byte // 8
    there.fold(sums, np.array(seeds, np.uint64), first)  # type: ignore[attr-defined]
    kept = [np.frombuffer(view, np.uint8) for view in there]
    addresses = np.array([each.ctypes.data for each in kept], np.uint64)
    fold_words()(expected, addresses, np.array(seeds, np.uint64), first, kept[0].nbytes // 8)
    assert sums.tolist() == expected.tolist()
