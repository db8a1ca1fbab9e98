"""The groups of a model's layers: which layers they have, and which blocks their windows reach."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.cache_layout import CacheGroup, CacheLayout
from contract.layout import KVLayout

LAYOUT = KVLayout(num_layers=6, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def group_of(window: int | None, block_size: int) -> CacheGroup:
    layout = msgspec.structs.replace(LAYOUT, num_layers=1, block_size=block_size)
    return CacheGroup(layers=(0,), layout=layout, window=window)


def test_a_group_has_the_layers_of_one_window() -> None:
    """The group that reaches farthest is first; a block has the bytes of its group's layers."""
    layout = CacheLayout.of(LAYOUT, [8, 8, None, 32, 8, None])
    assert [(group.window, group.layers) for group in layout.groups] == [
        (None, (2, 5)),
        (32, (3,)),
        (8, (0, 1, 4)),
    ]
    assert [group.name for group in layout.groups] == ["full", "window of 32 tokens", "window of 8 tokens"]
    assert sum(group.layout.block_bytes for group in layout.groups) == LAYOUT.block_bytes
    assert not layout.is_uniform
    assert msgspec.json.decode(msgspec.json.encode(layout), type=CacheLayout) == layout


def test_layers_that_keep_all_tokens_have_the_fingerprint_of_their_block() -> None:
    """Recorded from versions without groups, whose peers compare it."""
    uniform = KVLayout(num_layers=2, num_kv_heads=3, head_dim=16, block_size=8, dtype="bfloat16")
    layout = CacheLayout.of(uniform, [None, None])
    assert layout.is_uniform
    assert layout.fingerprint() == uniform.fingerprint() == "0c9c4c425f1b404b"
    windows: list[list[int | None]] = [[8, 8], [9, 9], [None, 8], [8, None]]
    windows.append([None, None])
    assert len({CacheLayout.of(uniform, each).fingerprint() for each in windows}) == 5


def test_each_layer_is_in_one_group() -> None:
    groups = CacheLayout.of(LAYOUT, [8, 8, None, 8, 8, None]).groups
    with pytest.raises(ValueError, match=r"the groups have the layers \[2, 5\]"):
        CacheLayout(groups[:1])
    with pytest.raises(ValueError, match="each of a model must be in one of them"):
        CacheLayout((*groups, groups[0]))
    with pytest.raises(ValueError, match="1 layers do not fit a block of 6"):
        CacheGroup(layers=(0,), layout=LAYOUT)


@given(st.integers(1, 5), st.none() | st.integers(1, 17), st.integers(0, 40))
def test_passed_blocks_are_those_that_no_later_token_sees(size: int, window: int | None, start: int) -> None:
    group = group_of(window, size)
    first_seen = 0 if window is None else max(0, start - window + 1)
    passed = group.num_passed_blocks(start)
    assert passed * size <= first_seen < (passed + 1) * size or window is None
    assert window is not None or passed == 0


@given(st.integers(1, 5), st.none() | st.integers(1, 17), st.integers(1, 9), st.integers(1, 40))
def test_no_step_needs_more_blocks_than_the_most_of_a_request(
    size: int, window: int | None, chunk: int, num_tokens: int
) -> None:
    """Steps from any position on, as after a cached prefix: the blocks of the chunk, and those that its first token sees."""
    group = group_of(window, size)
    needed = [
        -(-min(start + chunk, num_tokens) // size) - group.num_passed_blocks(start)
        for start in range(num_tokens)
    ]
    assert max(needed) <= group.max_blocks(num_tokens, chunk)
    # Not more than it can be: a longer text has a step that needs as many.
    longer = range(num_tokens + 20 * size)
    reached = (-(-(start + chunk) // size) - group.num_passed_blocks(start) for start in longer)
    assert window is None or group.max_blocks(10**6, chunk) <= max(reached)
