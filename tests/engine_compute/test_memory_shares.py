"""The share of memory that each group of layers gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.cache_layout import CacheLayout
from contract.errors import SettingError
from contract.layout import KVLayout
from engine.kv_cache.shares import Workload, share_memory
from engine.kv_cache.startup import KVCacheConfig, KVCacheSpec, make_config, unify

GIB = 1 << 30
# Gemma 3 27B: each sixth layer sees all tokens, the others 1,024.
GEMMA = KVLayout(num_layers=62, num_kv_heads=16, head_dim=128, block_size=16, dtype="bfloat16")
WINDOWS = [None if layer % 6 == 5 else 1024 for layer in range(62)]
SERVED = Workload(max_model_len=131_072, max_num_batched_tokens=2048, max_num_seqs=256)

layouts = st.builds(
    CacheLayout.of,
    st.builds(
        KVLayout,
        num_layers=st.just(4),
        num_kv_heads=st.just(1),
        head_dim=st.just(2),
        block_size=st.integers(1, 9),
        dtype=st.just("float32"),
    ),
    st.lists(st.none() | st.integers(1, 300), min_size=4, max_size=4),
)
workloads = st.builds(Workload, st.integers(2, 9000), st.integers(1, 300), st.integers(1, 20))


def num_bytes(layout: CacheLayout, num_blocks: tuple[int, ...]) -> int:
    return KVCacheConfig(num_blocks, layout).num_bytes


@given(layouts, workloads, st.integers(0, 2_000_000))
def test_memory_is_shared(layout: CacheLayout, workload: Workload, available: int) -> None:
    """The blocks fit; more memory is no fewer blocks; and each text that the first group fits can be computed alone."""
    numbers = share_memory(layout, available, workload)
    assert num_bytes(layout, numbers) <= available
    assert max(numbers) == numbers[0]
    more = share_memory(layout, available + sum(g.layout.block_bytes for g in layout.groups), workload)
    assert all(a >= b for a, b in zip(more, numbers, strict=True))
    longest = min((numbers[0] - 1) * layout.groups[0].layout.block_size, workload.max_model_len)
    if longest > 0:
        needed = [group.max_blocks(longest, workload.max_num_batched_tokens) for group in layout.groups]
        assert all(number > blocks for number, blocks in zip(numbers, needed, strict=True))


@given(workloads, st.integers(0, 2_000_000))
def test_one_group_gets_all(workload: Workload, available: int) -> None:
    for window in (None, 100):
        layout = CacheLayout.of(GEMMA, [window] * 62)
        assert share_memory(layout, available * 1000, workload) == (available * 1000 // GEMMA.block_bytes,)


def test_windows_leave_memory_for_longer_texts() -> None:
    """Typical requests of 4,096 tokens: 26 of them where there were 10."""
    layout = CacheLayout.of(GEMMA, WINDOWS)
    of_all, of_windows = share_memory(layout, 20 * GIB, SERVED)
    assert 20 * GIB // GEMMA.block_bytes == 2642
    assert (of_all, of_windows) == (6657, 1 + 26 * 65 + 128)
    assert (of_all - 1) * 16 // 4096 == 26


def test_a_prompt_keeps_a_quarter_of_the_bytes() -> None:
    """8,192 tokens of Gemma 3 27B: 1.11 GB of 4.16."""
    layout = CacheLayout.of(GEMMA, WINDOWS)
    kept = num_bytes(layout, tuple(group.max_blocks(8192, 1) for group in layout.groups))
    assert 8192 // 16 * GEMMA.block_bytes == 4_160_749_568
    assert kept == 1_114_112_000
    assert kept / 4_160_749_568 < 0.28


def specs(*windows: int | None) -> dict[str, KVCacheSpec]:
    return {str(layer): KVCacheSpec(4, 1, 8, "float32", window=own) for layer, own in enumerate(windows)}


def test_layers_are_grouped_by_their_windows_if_memory_is_shared() -> None:
    """Without a workload each layer keeps all tokens; a window that no text is longer than is none."""
    workload = Workload(max_model_len=100, max_num_batched_tokens=8, max_num_seqs=1)
    uniform = make_config(specs(8, None), 100_000)
    assert uniform.cache.is_uniform
    assert uniform.num_blocks == (100_000 // 512,)
    grouped = make_config(specs(8, None), 100_000, workload)
    assert [group.window for group in grouped.cache.groups] == [None, 8]
    # The window, a chunk and the null block; the rest is for all tokens.
    assert grouped.num_blocks == ((100_000 - 6 * 256) // 256, 6)
    assert make_config(specs(100, None), 100_000, workload) == uniform
    assert make_config(specs(99, None), 100_000, workload) != uniform


def test_layers_with_equal_windows_and_other_shapes_are_refused() -> None:
    unequal = {"a": KVCacheSpec(4, 1, 8, "float32"), "b": KVCacheSpec(4, 2, 8, "float32")}
    with pytest.raises(SettingError, match="different shapes: without windows"):
        make_config(unequal, 100_000)
    workload = Workload(max_model_len=100, max_num_batched_tokens=8, max_num_seqs=1)
    with pytest.raises(SettingError, match="this model is not served"):
        make_config(unequal, 100_000, workload)


def test_ranks_have_the_smallest_number_of_blocks_of_each_group() -> None:
    cache = CacheLayout.of(GEMMA, WINDOWS)
    unified = unify([KVCacheConfig(numbers, cache) for numbers in [(9, 4), (8, 5)]])
    assert unified == [KVCacheConfig((8, 4), cache)] * 2
