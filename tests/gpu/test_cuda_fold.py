"""`make gpu-check`: blocks on a device have the digests of their bytes, and bytes get there and back unchanged."""

import random

import pytest
import torch

from contract.layout import KVLayout
from engine.kv_cache.memory import StagedKVMemory
from kv_transfer.protocol.digests import FOLD64, digests_of, running_digests
from kv_transfer.protocol.reads import BlockPart
from kv_transfer.transports.block_views import read_views, settle, write_views

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)
SMALL = KVLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_size=1, dtype="bfloat16")
QWEN = KVLayout(num_layers=28, num_kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16")
LLAMA = KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype="bfloat16")


@pytest.mark.parametrize("layout", [SMALL, QWEN, LLAMA], ids=["small", "qwen", "llama"])
def test_blocks_have_the_digests_of_their_bytes(layout: KVLayout) -> None:
    """They are put there by way of the host, and digested as a whole, layer by layer, and on the host."""
    memory = StagedKVMemory(layout, 40, CUDA)
    assert memory.can_fold
    rng = random.Random(3)
    blocks = rng.sample(range(1, 40), 33)
    seeds = [rng.getrandbits(64) for _ in blocks]
    contents = [bytearray(rng.randbytes(layout.block_bytes)) for _ in blocks]
    into = write_views(memory, blocks)
    for view, content in zip(into, contents, strict=True):
        view[:] = content
    settle(into)
    memory.commit(blocks)
    there = read_views(memory, blocks)
    assert list(there) == contents
    expected = digests_of(FOLD64, [memoryview(content) for content in contents], seeds)
    assert digests_of(FOLD64, there, seeds) == expected
    running = running_digests(FOLD64, seeds)
    layer = layout.block_bytes // layout.num_layers
    for start in range(0, layout.block_bytes, layer):
        running.go_on(read_views(memory, blocks, BlockPart(start, layer)))
    assert running.values(0, len(blocks)) == expected
    memory.close()
