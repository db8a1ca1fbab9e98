"""`make gpu-check`: KV blocks beyond 2^31 elements of the pool, whose offsets need 64 bits."""

import pytest
import torch

from contract.layout import KVLayout
from engine.attention.backend import create_backend
from engine.kv_cache.memory import StagedKVMemory
from kv_transfer.protocol.digests import FOLD64, digests_of
from kv_transfer.transports.block_views import read_views, settle, write_views
from tests.attention_cases import Case, assert_far_blocks_are_right
from tests.gpu.test_cuda_attention import backends

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CUDA = torch.device("cuda", 0)
CASES = {
    "decodes": Case(head_dim=128, dtype=torch.bfloat16, work=((700, 1), (9, 1), (15, 1), (0, 1), (16, 1), (300, 1))),
    "mixed": Case(head_dim=128, dtype=torch.bfloat16),
    "chunks behind long contexts": Case(head_dim=128, dtype=torch.bfloat16, work=((5000, 20), (4096, 64))),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_attention_reads_and_stores_far_blocks(name: str) -> None:
    for backend in backends("bfloat16", CASES[name].head_dim):
        if backend != "torch":
            assert_far_blocks_are_right(CASES[name], create_backend(backend), CUDA)


def test_far_blocks_are_digested_and_copied() -> None:
    """Blocks of 229,376 elements: from the 9,363rd on they lie beyond 2^31. Their bytes get there and back."""
    layout = KVLayout(num_layers=28, num_kv_heads=2, head_dim=128, block_size=16, dtype="bfloat16")
    memory = StagedKVMemory(layout, 9400, CUDA)
    blocks = [9364, 9390, 3, 9399]
    contents = [bytes([number + 1]) * layout.block_bytes for number in range(len(blocks))]
    into = write_views(memory, blocks)
    for view, content in zip(into, contents, strict=True):
        view[:] = content
    settle(into)
    memory.commit(blocks)
    there = read_views(memory, blocks)
    assert list(there) == contents
    seeds = list(range(len(blocks)))
    expected = digests_of(FOLD64, [memoryview(content) for content in contents], seeds)
    assert digests_of(FOLD64, there, seeds) == expected
    memory.close()
