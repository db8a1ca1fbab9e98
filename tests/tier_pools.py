"""Small KV pools with content, which tests of KV tiers copy from and to."""

import torch

from contract.block_hash import BlockHash, block_hash
from contract.layout import KVLayout
from engine.kv_cache.memory import MappedKVMemory, PagedKVMemory, StagedKVMemory

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
NUM_BLOCKS = 9


def hash_of(number: int) -> BlockHash:
    return block_hash(b"\0" * 16, [number])


def pool_of(kind: str = "host") -> PagedKVMemory:
    """Return a pool with content; a device's is reached through copies."""
    memory: PagedKVMemory
    if kind == "host":
        memory = MappedKVMemory(LAYOUT, NUM_BLOCKS)
    else:
        memory = StagedKVMemory(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    memory.pool[:] = torch.randn(memory.pool.shape, generator=generator)
    return memory


def content(memory: PagedKVMemory, *block_ids: int) -> list[bytes]:
    return [memory.read_view(block_id).tobytes() for block_id in block_ids]
