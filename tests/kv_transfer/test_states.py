"""A transfer with the states of recurrent layers: its pieces, their digests and orders, without sockets or threads."""

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from contract.block_hash import all_block_hashes
from contract.cache_layout import CacheLayout, GroupedSide
from contract.errors import InternalError
from contract.layout import STATES, KVLayout, Side
from contract.state_layout import StateLayout, StatePart
from engine.kv_cache.state_memory import StateMemory
from kv_transfer.data.publishing import PassWatch
from kv_transfer.protocol.digests import digest_seeds
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.protocol.plan import TransferPlan
from kv_transfer.protocol.reads import LeaseName
from tests.kv_transfer.fakes import ByteMemory
from tests.kv_transfer.test_groups import ASKED, LAYOUT, NUM_TOKENS, sender_of, told

STATE = StateLayout(
    (
        StatePart(layer=1, name="conv", shape=(6, 3), dtype="bfloat16"),
        StatePart(layer=1, name="recurrent", shape=(2, 4, 4), dtype="float32"),
    )
)
LARGE = StateLayout((StatePart(layer=0, name="recurrent", shape=(700_000,), dtype="float32"),))
"""In three pieces."""


def side_of(
    *windows: int | None, states: StateLayout | None = STATE, layout: KVLayout = LAYOUT
) -> GroupedSide:
    cache = CacheLayout.of(layout, windows, states)
    side = GroupedSide.of(cache.groups, 1, layout.num_kv_heads, states)
    assert isinstance(side, GroupedSide)
    return side


SIDE = side_of(None, None, None)
ALONE = side_of(states=LARGE)


def test_a_slot_is_cut_into_equal_pieces() -> None:
    """Each of a mebibyte at most, at a multiple of 64 bytes: a damaged one is read again alone, and staging is small."""
    assert (STATE.num_pieces, STATE.slot_bytes, STATE.piece_layout.block_bytes) == (1, 192, 192)
    assert (LARGE.num_pieces, LARGE.piece_layout.block_bytes) == (3, 933_376)
    assert LARGE.slot_bytes == 3 * 933_376 >= 2_800_000
    assert [list(LARGE.pieces_of(slot)) for slot in (1, 2)] == [[0, 1, 2], [3, 4, 5]]


def test_one_slot_crosses_beside_the_kv_of_a_real_model() -> None:
    """Qwen3.6-35B-A3B: 10 layers with KV, 30 gated delta layers. Its states are as many bytes as the KV of 3,168 tokens."""
    layout = KVLayout(num_layers=10, num_kv_heads=2, head_dim=256, block_size=16, dtype="bfloat16")
    parts = []
    for layer in range(30):
        parts.append(StatePart(layer=layer, name="conv", shape=(8192, 4), dtype="bfloat16"))
        parts.append(StatePart(layer=layer, name="recurrent", shape=(32, 128, 128), dtype="float32"))
    states = StateLayout(tuple(parts))
    side = side_of(*[None] * 10, states=states, layout=layout)
    places = side.places_to_send(8192)
    sizes = [group.layout.block_bytes for group in side.groups]
    num_bytes = sum(len(own) * size for own, size in zip(places, sizes, strict=True))
    assert num_bytes == 20_480 * 8192 + states.slot_bytes
    assert 64_880_640 <= states.slot_bytes < 64_880_640 + 64 * states.num_pieces
    assert sizes[-1] <= 1 << 20


def test_states_are_the_last_group() -> None:
    """And the only one of a model without KV."""
    assert SIDE.group_names == ("layers 0-2: full", "states")
    assert (SIDE.state_group, ALONE.state_group, Side(LAYOUT).state_group) == (1, 0, None)
    assert SIDE.places_to_send(NUM_TOKENS) == (range(6), range(1))
    assert ALONE.places_to_send(NUM_TOKENS) == (range(3),)
    assert [group.layout.parts for group in ALONE.groups] == [STATES]
    full, window, state = TransferPlan(*[side_of(None, 6, 6)] * 2).sections(NUM_TOKENS)
    assert (full.end, window.first, window.end, state.first, state.end) == (6, 6, 8, 8, 9)
    assert [section.is_state for section in (full, window, state)] == [False, False, True]


def test_states_are_never_taken_from_the_cache() -> None:
    """The KV of all blocks but the last may be cached: whether the states behind them are is not known."""
    full, state = TransferPlan(SIDE, SIDE).sections(NUM_TOKENS)
    assert (full.missing(5), state.missing(5)) == ((5, 6), (6, 7))
    (alone,) = TransferPlan(ALONE, ALONE).sections(NUM_TOKENS)
    assert alone.missing(5) == (0, 3)
    assert [alone.num_covered(number) for number in range(4)] == [0, 1, 2, 3]


def test_seeds_of_states_have_the_whole_prompt_and_the_group_in_them() -> None:
    """Two prompts with equal first blocks have other states, also if the blocks of one side are larger."""
    seeds = digest_seeds(ASKED, "m", SIDE)
    assert seeds[:6] == digest_seeds(ASKED, "m", Side(LAYOUT))
    tokens = ASKED.prompt_token_ids
    (whole,) = all_block_hashes(ASKED.hash_root("m"), tokens, len(tokens))
    assert seeds[6] == seed_of(whole, b"states 0")
    pieces = digest_seeds(ASKED, "m", ALONE)
    assert pieces == [seed_of(whole, b"states %d" % place) for place in range(3)]
    longer = msgspec.structs.replace(ASKED, prompt_token_ids=[*tokens, 1])
    assert digest_seeds(longer, "m", SIDE)[:5] == seeds[:5]
    assert digest_seeds(longer, "m", SIDE)[6] != seeds[6]
    larger = msgspec.structs.replace(LAYOUT, block_size=16)
    assert digest_seeds(ASKED, "m", side_of(None, None, None, layout=larger))[-1] == seeds[6]


def seed_of(whole: bytes, name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(whole + name, digest_size=8).digest(), "little")


def num_tokens_of(orders: list[PublishOrder]) -> list[int]:
    return [order.num_tokens for order in orders]


def test_states_are_ordered_once_with_the_end_of_the_prompt() -> None:
    """The prefix cache changes nothing; they are not read layer by layer, and a step that ends with them is announced."""
    sends = sender_of(SIDE)
    sends.open_send(ASKED, [1, 2, 3, 4, 5, 6], num_cached_tokens=20)
    sends.publish(ASKED.key, 21)
    assert told(sends.pop_orders()) == [(0, 0, [1, 2, 3, 4, 5], True, 1)]
    sends.publish(ASKED.key, NUM_TOKENS, [[3]])
    orders = sends.pop_orders()
    assert told(orders) == [(0, 5, [6], False, 1), (1, 6, [3], False, 1)]
    assert num_tokens_of(orders) == [0, NUM_TOKENS]
    assert [order.announces_end for order in orders] == [False, True]
    alone = sender_of(ALONE)
    alone.open_send(ASKED, [], num_cached_tokens=20)
    alone.publish(ASKED.key, 21)
    assert alone.pop_orders() == []
    alone.publish(ASKED.key, NUM_TOKENS, [[3, 4, 5]])
    orders = alone.pop_orders()
    assert told(orders) == [(0, 0, [3, 4, 5], False, 1)]
    assert num_tokens_of(orders) == [NUM_TOKENS]


def test_states_that_are_handed_off_are_computed() -> None:
    sends = sender_of(SIDE)
    sends.open_send(ASKED, [1, 2, 3, 4, 5, 6], NUM_TOKENS, [[3]])
    assert told(sends.pop_orders()) == [(0, 0, [1, 2, 3, 4, 5, 6], True, 1), (1, 6, [3], True, 1)]
    with pytest.raises(InternalError, match="its transfer has 7"):
        sender_of(SIDE).open_send(ASKED, [1, 2, 3, 4, 5, 6], NUM_TOKENS)


def test_states_are_published_when_their_step_is_over() -> None:
    """A step may end without results, and in the middle of it the states are those of no text."""
    jobs: list[Callable[[], None]] = []
    memory = ByteMemory(LAYOUT, 8)
    publisher: Any = SimpleNamespace(publish=lambda *_: None)
    watch = PassWatch(memory, publisher, jobs.append)
    order = PublishOrder("r", LeaseName("t", 0, "l"), 6, [3], [1], group=1, num_tokens=NUM_TOKENS)
    watch.begin([order])
    watch.on_computed()
    assert jobs == []
    watch.end([order])
    assert len(jobs) == 1


def test_only_the_states_behind_the_prompt_are_lent() -> None:
    """The slot counts what it has absorbed; one token too many, or a step that is not over, fails the transfer."""
    memory = StateMemory(LARGE, 2, torch.zeros(2 * LARGE.slot_bytes, dtype=torch.uint8))
    with pytest.raises(
        InternalError, match="the states behind 22 tokens are lent, and slot 2 has absorbed 0"
    ):
        memory.check([3, 4, 5], NUM_TOKENS)
    memory.note_received([3, 4, 5], NUM_TOKENS)
    memory.check([4], NUM_TOKENS)
    with pytest.raises(InternalError, match="slot 2 has absorbed 22"):
        memory.check([3, 4, 5], NUM_TOKENS - 1)
    with pytest.raises(InternalError, match="slot 1 has absorbed 0"):
        memory.check([2], NUM_TOKENS)


def test_states_are_read_as_they_are_beside_converted_kv() -> None:
    rounded = msgspec.structs.replace(LAYOUT, dtype="bfloat16", block_size=8)
    other = side_of(None, None, None, layout=rounded)
    assert SIDE.differences(other) == []
    full, state = TransferPlan(SIDE, other).sections(NUM_TOKENS)
    assert not full.plan.is_direct
    assert state.plan.is_direct
    assert (full.first, full.end, full.their_places, state.first, state.their_first) == (0, 6, range(3), 6, 3)
    assert state.num_covered(3) == 0
    assert state.num_covered(4) == 1


def part_of(**changes: Any) -> StateLayout:
    return StateLayout((msgspec.structs.replace(STATE.parts[0], **changes), *STATE.parts[1:]))


@pytest.mark.parametrize(
    ("states", "told_difference"),
    [
        (
            part_of(dtype="float32"),
            "ours is conv 0 of layer 1, [6, 3] of bfloat16, the peer's is conv 0 of layer 1, ",
        ),
        (part_of(layer=2), "the peer's is conv 0 of layer 2, "),
        (part_of(shape=(6, 4)), "the peer's is conv 0 of layer 1, [6, 4] of bfloat16"),
        (StateLayout(STATE.parts[:1]), "[2, 4, 4] of float32, the peer's is none"),
    ],
)
def test_other_states_are_refused(states: StateLayout, told_difference: str) -> None:
    """With one sentence: no state is converted."""
    (found,) = SIDE.differences(side_of(None, None, None, states=states))
    assert found.startswith("states of recurrent layers: ")
    assert told_difference in found
    assert len(side_of(None, None, None, states=states).differences(SIDE)) == 1


def test_a_worker_without_states_is_refused() -> None:
    (found,) = SIDE.differences(Side(LAYOUT))
    assert found == "cache groups: ours are layers 0-2: full; states, the peer's are all tokens in all layers"
    assert len(Side(LAYOUT).differences(SIDE)) == 1
    assert SIDE.differences(SIDE) == ALONE.differences(ALONE) == []
