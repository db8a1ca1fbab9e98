"""A transfer of several groups of layers: its blocks, their digests, orders and reads, without sockets or threads."""

from typing import Any

import pytest

from contract.cache_layout import CacheGroup, CacheLayout, GroupedSide
from contract.errors import InternalError
from contract.identity import Role
from contract.layout import KVLayout, Side
from contract.requests import EngineRequest, SendTransfer
from contract.sampling import SamplingParams
from kv_transfer.control.sending import SendTransfers
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import fetch_side
from kv_transfer.protocol.digests import digest_seeds, digests_of
from kv_transfer.protocol.events import RetryStep
from kv_transfer.protocol.fetch_side import Fetch, FetchState, advance_fetch
from kv_transfer.protocol.orders import PublishOrder
from kv_transfer.protocol.plan import AnnouncedBlocks, PeerTerms, TransferPlan
from kv_transfer.settings import LocalWorker, TransferSettings

SIZE = 4
NUM_TOKENS = 22
PROMPT = list(range(NUM_TOKENS))
ASKED = EngineRequest(
    request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(), transfer=SendTransfer("t")
)
LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=SIZE, dtype="float32")


def side_of(*windows: int | None, layout: KVLayout = LAYOUT, num_ranks: int = 1) -> Side:
    groups = CacheLayout.of(layout, windows).groups
    return GroupedSide.of(groups, num_ranks, layout.num_kv_heads * num_ranks)


SIDE = side_of(None, 6, 6)
"""22 tokens are 6 blocks. The token at 22 sees from 17 on with a window of 6: blocks 4 and 5."""


def announced(side: Side = SIDE) -> AnnouncedBlocks:
    seeds = digest_seeds(ASKED, "m", side)
    return AnnouncedBlocks(PeerTerms(TransferPlan(side, side), "m", None), NUM_TOKENS, seeds)


def test_the_blocks_of_a_window_come_behind_those_of_all_tokens() -> None:
    """And they become complete in that order, whatever is announced together."""
    blocks = announced()
    full, window = blocks.sections
    assert (full.first, full.end, full.places) == (0, 6, range(6))
    assert (window.group, window.first, window.end, window.places) == (1, 6, 8, range(4, 6))
    assert blocks.add(0, [1, 2, 3, 4, 5]) == range(5)
    assert blocks.add(5, [6, 7]) == range(5, 7)
    assert blocks.sources_of(6, 7)[0] == range(6, 7)
    assert blocks.add(7, [8]) == range(7, 8)
    blocks.check_end(8)
    assert [blocks.section_of(number).group for number in range(8)] == [0] * 6 + [1] * 2


def test_each_group_has_seeds_of_its_own() -> None:
    """A block is not taken for another group's at the same place; those of the first group are what they were."""
    seeds = digest_seeds(ASKED, "m", SIDE)
    uniform = digest_seeds(ASKED, "m", Side(LAYOUT))
    assert seeds[:6] == uniform
    assert len(seeds) == len(set(seeds)) == 8
    block = memoryview(bytes(64))
    (sent,) = digests_of("xxh3_64", [block], seeds[4:5])
    (swapped,) = digests_of("xxh3_64", [block], seeds[6:7])
    assert sent != swapped
    # Two windows differ as well, and a window that is the first group needs no name.
    narrow = digest_seeds(ASKED, "m", side_of(None, 6, 7))
    assert len(set(narrow)) == len(narrow) == 6 + 2 + 2
    assert digest_seeds(ASKED, "m", side_of(6, 6, 6)) == uniform[4:]


def fetch_of(num_cached: int) -> tuple[Fetch, list[ev.FetchAction]]:
    """Return a fetch that has reserved blocks of both groups, behind so many cached ones of each."""
    fetch = Fetch(num_blocks=8)
    missing = [(num_cached, 6), (6 + max(0, num_cached - 4), 8)]
    kept = tuple((first, end) for first, end in missing if first < end)
    num_missing = sum(end - first for first, end in kept)
    return fetch_side.reserve(fetch, tuple(range(100, 108)), 8 - num_missing, kept)


def test_what_the_cache_has_of_each_group_is_not_read() -> None:
    fetch, _ = fetch_of(num_cached=5)
    fetch, actions = fetch_side.on_announced(fetch, 0, 8, now=1.0)
    assert actions[1:] == [ev.PullBlocks(5, (105,)), ev.PullBlocks(7, (107,))]
    assert fetch.num_posted == 2
    for _ in range(2):
        fetch, _ = advance_fetch(fetch, ev.PieceLanded(1, 1.0, 2.0))
        fetch, actions = advance_fetch(fetch, ev.PieceVerified(1, 2.0))
    assert actions == [ev.CommitBlocks((105, 107))]
    assert fetch.state is FetchState.VERIFIED


def test_only_what_is_not_verified_is_read_again() -> None:
    """The first group's blocks are verified, and the first of the window's; a later read fails."""
    fetch, _ = fetch_of(num_cached=3)
    fetch, _ = fetch_side.on_announced(fetch, 0, 7, now=1.0)
    for count in (3, 1):
        fetch, _ = advance_fetch(fetch, ev.PieceLanded(count, 1.0, 2.0))
        fetch, _ = advance_fetch(fetch, ev.PieceVerified(count, 2.0))
    fetch, actions = fetch_side.on_announced(fetch, 7, 1, now=2.0)
    assert actions == [ev.PullBlocks(7, (107,))]
    again = (RetryStep.SAME_TRANSPORT,)
    fetch, actions = advance_fetch(fetch, ev.JobFailed("internal", "x", may_heal=True, retry_steps=again))
    assert actions == [RetryStep.SAME_TRANSPORT, ev.PullBlocks(7, (107,))]
    fetch, _ = fetch_of(num_cached=6)
    fetch, actions = fetch_side.on_announced(fetch, 0, 8, now=1.0)
    assert actions[1:] == [ev.CommitBlocks(())]


def ignore(*_: object) -> None:
    return


def sender_of(side: Side) -> SendTransfers:
    settings = TransferSettings(
        worker_id="w", boot_id="b", role=Role.PREFILL, secret="secret", transport="tcp", min_split_blocks=1
    )
    worker = LocalWorker(settings, side, "m", wake=ignore)
    return SendTransfers(worker, ignore, ignore, ignore, clock=lambda: 0.0)


def told(orders: list[PublishOrder]) -> list[tuple[Any, ...]]:
    fields = ("group", "first_block", "block_ids", "is_computed", "num_parts")
    return [tuple(getattr(order, name) for name in fields) for order in orders]


def test_windows_are_ordered_once_with_the_end_of_the_prompt() -> None:
    """They are computed by that step, so they are digested behind it; whatever the prefix cache held."""
    sends = sender_of(SIDE)
    sends.open_send(ASKED, [1, 2, 3, 4, 5, 6], num_cached_tokens=9)
    sends.publish(ASKED.key, 18)
    assert told(sends.pop_orders()) == [(0, 0, [1, 2, 3, 4], False, 1)]
    sends.publish(ASKED.key, NUM_TOKENS, [[8, 9]])
    orders = sends.pop_orders()
    assert told(orders) == [(0, 4, [5, 6], False, 1), (1, 6, [8, 9], False, 1)]
    assert [order.announces_end for order in orders] == [False, True]
    assert not sends.has_orders()
    alone = sender_of(side_of(6, 6, 6))
    alone.open_send(ASKED, [], num_cached_tokens=20)
    alone.publish(ASKED.key, 21)
    assert alone.pop_orders() == []
    alone.publish(ASKED.key, NUM_TOKENS, [[8, 9]])
    assert [each[:4] for each in told(alone.pop_orders())] == [(0, 0, [8, 9], False)]


def test_what_is_handed_off_is_computed() -> None:
    sends = sender_of(SIDE)
    sends.open_send(ASKED, [1, 2, 3, 4, 5, 6], NUM_TOKENS, [[8, 9]])
    assert told(sends.pop_orders()) == [(0, 0, [1, 2, 3, 4, 5, 6], True, 1), (1, 6, [8, 9], True, 1)]


@pytest.mark.parametrize("windows", [[], [[8]], [[8, 9, 10]], [[8, 9], [8]]])
def test_a_prompt_without_its_windows_is_not_lent(windows: list[list[int]]) -> None:
    sends = sender_of(SIDE)
    sends.open_send(ASKED, [1, 2, 3, 4, 5, 6], num_cached_tokens=0)
    with pytest.raises(InternalError, match="its transfer has 8"):
        sends.publish(ASKED.key, NUM_TOKENS, windows)
    with pytest.raises(InternalError, match="its transfer has 8"):
        sender_of(SIDE).open_send(ASKED, [1, 2, 3, 4, 5, 6], NUM_TOKENS, windows)


def test_a_long_prompt_of_gemma_3_needs_a_quarter() -> None:
    """27B: 62 layers, of which each sixth sees all tokens and the others 1,024. At 8,192 tokens, held and sent."""
    layout = KVLayout(num_layers=62, num_kv_heads=16, head_dim=128, block_size=16, dtype="bfloat16")
    cache = CacheLayout.of(layout, [None if layer % 6 == 5 else 1024 for layer in range(62)])
    side = GroupedSide.of(cache.groups, 1, 16)
    whole = 512 * layout.block_bytes
    sent = sum(
        len(places) * group.layout.block_bytes
        for places, group in zip(side.places_to_send(8192), side.groups, strict=True)
    )
    held = sum(group.max_blocks(8192, 1) * group.layout.block_bytes for group in cache.groups)
    assert whole == 4_160_749_568
    assert sent == (512 * 10 + 64 * 52) * layout.block_bytes // 62 == 1_107_296_256
    assert sent <= held <= 0.28 * whole


def test_workers_with_other_groups_refuse_each_other() -> None:
    """With one sentence, on both sides."""
    plain = Side(LAYOUT)
    (found,) = SIDE.differences(plain)
    ours = "layers 0: full; layers 1-2: window of 6 tokens"
    assert found == f"cache groups: ours are {ours}, the peer's are all tokens in all layers"
    assert plain.differences(SIDE) == [
        f"cache groups: ours are all tokens in all layers, the peer's are {ours}"
    ]
    assert SIDE.differences(side_of(None, 6, 6)) == []
    assert len(SIDE.differences(side_of(None, 6, 7))) == len(SIDE.differences(side_of(6, None, 6))) == 1
    rounded = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=SIZE, dtype="bfloat16")
    assert SIDE.differences(side_of(None, 6, 6, layout=rounded)) == []
    larger = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype="float32")
    assert SIDE.differences(side_of(None, 6, 6, layout=larger)) == []
    half = KVLayout(num_layers=3, num_kv_heads=1, head_dim=4, block_size=SIZE, dtype="float32")
    assert SIDE.differences(side_of(None, 6, 6, layout=half, num_ranks=2)) == []
    with pytest.raises(ValueError, match="do not hold"):
        GroupedSide(LAYOUT, 2, 5, (CacheGroup(layers=(0, 1, 2), layout=LAYOUT, window=6),))
