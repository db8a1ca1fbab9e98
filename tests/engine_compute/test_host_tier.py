"""The tier in host memory on real pools: bytes go there and back, and every flipped bit is noticed."""

import random

import pytest

from contract.errors import SettingError
from engine.kv_tiers.host import HostTier
from engine.kv_tiers.storage import BlockCopy
from tests.tier_pools import LAYOUT, content, hash_of, pool_of

ROOM = 2**30


@pytest.mark.parametrize("kind", ["host", "device"])
def test_blocks_go_there_and_back(kind: str) -> None:
    memory = pool_of(kind)
    tier = HostTier(memory, 4 * LAYOUT.block_bytes + 5, ROOM)
    assert (tier.num_slots, tier.slot_bytes) == (4, LAYOUT.block_bytes)
    kept = content(memory, 1, 2, 3)
    copies = [BlockCopy(block, slot, hash_of(block)) for block, slot in ((1, 2), (2, 0), (3, 3))]
    assert tier.store(copies).result() == 3
    memory.pool.zero_()
    back = [copy._replace(block_id=place) for place, copy in zip((5, 4, 8), copies, strict=True)]
    assert tier.load(back).result() == 3
    assert content(memory, 5, 4, 8) == kept
    assert not memory.pool[[0, 1, 2, 3, 6, 7]].any()
    tier.close()
    memory.close()


def test_a_flipped_bit_of_a_slot_is_noticed() -> None:
    """Law 3: 100 random bits, one at a time: what came before the damage is used, and nothing else."""
    memory = pool_of("host")
    tier = HostTier(memory, 4 * LAYOUT.block_bytes, ROOM)
    copies = [BlockCopy(block, block - 1, hash_of(block)) for block in range(1, 5)]
    assert tier.store(copies).result() == 4
    drawn = random.Random(3)
    for _ in range(100):
        slot, bit = drawn.randrange(4), drawn.randrange(8 * LAYOUT.block_bytes)
        tier.slot_view(slot)[bit // 8] ^= 1 << bit % 8
        assert tier.load(copies).result() == slot
        tier.slot_view(slot)[bit // 8] ^= 1 << bit % 8
    assert tier.load(copies).result() == 4
    tier.close()
    memory.close()


def test_the_right_bytes_of_another_block_are_damage() -> None:
    memory = pool_of("host")
    tier = HostTier(memory, 2 * LAYOUT.block_bytes, ROOM)
    tier.store([BlockCopy(1, 0, hash_of(1))]).result()
    assert tier.load([BlockCopy(2, 0, hash_of(2))]).result() == 0
    tier.close()
    memory.close()


def test_copies_are_made_in_order_and_end_with_the_tier() -> None:
    memory = pool_of("host")
    tier = HostTier(memory, 2 * LAYOUT.block_bytes, ROOM)
    first = tier.store([BlockCopy(1, 0, hash_of(1))])
    second = tier.load([BlockCopy(5, 0, hash_of(1))])
    tier.settle()
    assert first.done() and second.result() == 1
    tier.close()
    tier.close()
    memory.close()


def test_sizes_that_cannot_be_are_refused() -> None:
    memory = pool_of("host")
    with pytest.raises(SettingError, match=r"host_kv_bytes is 5 bytes, and one block has"):
        HostTier(memory, 5, ROOM)
    with pytest.raises(SettingError, match=r"host_kv_bytes is 1073741825 bytes, and 1073741824 bytes"):
        HostTier(memory, ROOM + 1, ROOM)
    memory.close()
