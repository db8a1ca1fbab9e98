"""The layout of a block: its size, its differences from a peer's, and its encodings, which older peers read."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.layout import KEY_VALUE, LATENT, KVLayout, Side

UNIFORM = KVLayout(num_layers=2, num_kv_heads=3, head_dim=16, block_size=8, dtype="bfloat16")
ROW = KVLayout(num_layers=61, num_kv_heads=1, head_dim=576, block_size=16, dtype="bfloat16", parts=LATENT)
"""DeepSeek-V3: 512 numbers of the latent and 64 of the rotated key."""


def test_a_layout_of_keys_and_values_is_encoded_as_before_there_were_parts() -> None:
    """D6: recorded from the version before, whose peers have five fields and compare the fingerprint."""
    encoded = b'{"num_layers":2,"num_kv_heads":3,"head_dim":16,"block_size":8,"dtype":"bfloat16"}'
    assert msgspec.json.encode(UNIFORM) == encoded
    assert UNIFORM.fingerprint() == "0c9c4c425f1b404b"
    assert msgspec.json.decode(encoded, type=KVLayout) == UNIFORM
    assert UNIFORM.parts == KEY_VALUE
    assert UNIFORM.block_bytes == 2 * 2 * 3 * 16 * 8 * 2


def test_a_latent_is_one_row_of_a_token() -> None:
    """D6: nothing is held in the place of a value."""
    assert ROW.block_bytes == 61 * 576 * 16 * 2
    assert ROW.block_bytes // ROW.block_size == 70_272
    assert msgspec.json.decode(msgspec.json.encode(ROW), type=KVLayout) == ROW
    assert ROW.fingerprint() != msgspec.structs.replace(ROW, parts=KEY_VALUE).fingerprint()


def test_latents_are_not_handed_over_as_keys_and_values() -> None:
    padded = msgspec.structs.replace(ROW, parts=KEY_VALUE)
    assert ROW.differences(padded) == ["parts: ours is latent, the peer's is key and value"]
    assert padded.differences(ROW) == ["parts: ours is key and value, the peer's is latent"]


@pytest.mark.parametrize("parts", [[], ["key"] * 9, [1]])
def test_a_peers_parts_are_a_few_names(parts: list[object]) -> None:
    """A block of no bytes would be a divisor."""
    encoded = msgspec.json.encode({**msgspec.to_builtins(ROW), "parts": parts})
    with pytest.raises(msgspec.ValidationError, match="parts"):
        msgspec.json.decode(encoded, type=KVLayout)


@given(st.integers(1, 8))
def test_each_rank_has_a_copy_of_a_latent(num_ranks: int) -> None:
    side = Side(ROW, num_ranks, num_kv_heads=1)
    assert [side.heads(rank) for rank in range(num_ranks)] == [range(1)] * num_ranks
    assert side.whole == ROW
