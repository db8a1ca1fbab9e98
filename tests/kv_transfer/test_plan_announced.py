"""A sender's announcements of its own blocks become announcements of ours: complete ones only, each once."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import TransferError
from contract.layout import Side
from engine.connector import FirstToken
from kv_transfer.protocol import events as ev
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.plan import AnnouncedBlocks, TransferPlan, complete_event, published_event
from tests.kv_transfer.builders import LAYOUT
from tests.kv_transfer.test_plan import UNTIMED, plans

WIDE = msgspec.structs.replace(LAYOUT, block_size=8)
MERGING = TransferPlan(Side(WIDE), Side(LAYOUT))
SPLITTING = TransferPlan(Side(LAYOUT), Side(WIDE))


def announced(plan: TransferPlan, num_tokens: int) -> AnnouncedBlocks:
    return AnnouncedBlocks(plan, num_tokens, range(1000, 1000 + plan.theirs.num_blocks(num_tokens)))


@UNTIMED
@given(plans(), st.integers(1, 60), st.data())
def test_each_block_is_told_once_when_all_it_comes_from_is_there(
    plan: TransferPlan, num_tokens: int, data: st.DataObject
) -> None:
    blocks, known, told = announced(plan, num_tokens), 0, 0
    total = plan.theirs.num_blocks(num_tokens)
    ranks = [1000 * rank for rank in range(1, plan.theirs.num_ranks)]
    while known < total:
        count = data.draw(st.integers(1, total - known))
        others = [range(known + of_rank, known + count + of_rank) for of_rank in ranks]
        first, digests = blocks.add(known, range(known, known + count), others)
        known += count
        assert first == told
        told += len(digests)
        assert told == plan.num_covered(known, num_tokens)
        for block, digest in enumerate(digests, start=first):
            assert digest == plan.source_blocks(block, block + 1, num_tokens)[-1]
    assert told == plan.ours.num_blocks(num_tokens)
    blocks.check_end(total)
    source = blocks.sources_of(0, told)
    assert (source.first_block, source.digests) == (0, tuple(range(total)))
    assert source.seeds == tuple(range(1000, 1000 + total))
    assert [share.digests for share in source.others] == [
        tuple(range(of_rank, of_rank + total)) for of_rank in ranks
    ]


def test_half_a_block_waits_for_its_other_half() -> None:
    """Their blocks of 4 tokens, ours of 8, a prompt of 21: five blocks and a bit there, three here."""
    blocks = announced(MERGING, 21)
    assert blocks.add(0, [10]) == (0, ())
    assert blocks.add(1, [11, 12]) == (0, (11,))
    assert blocks.add(3, [13, 14]) == (1, (13,))
    assert blocks.add(5, [15]) == (2, (15,))
    assert blocks.sources_of(1, 3).digests == (12, 13, 14, 15)


def test_half_of_their_block_is_enough_where_the_rest_is_cached() -> None:
    """Their blocks of 8, ours of 4: our third comes out of the upper half of their second."""
    blocks = announced(SPLITTING, 16)
    assert blocks.add(0, [20, 21]) == (0, (20, 20, 21, 21))
    source = blocks.sources_of(3, 4)
    assert (source.first_block, source.digests, source.seeds) == (1, (21,), (1001,))


@pytest.mark.parametrize(
    ("first", "digests"), [(1, [1]), (0, []), (0, [1, 2, 3, 4, 5, 6, 7]), (-1, [1]), (2, [1])]
)
def test_blocks_that_do_not_follow_or_do_not_exist_are_refused(first: int, digests: list[int]) -> None:
    with pytest.raises(TransferError, match=f"announced {len(digests)} blocks from {first}; 0 of 6 were"):
        announced(MERGING, 21).add(first, digests)


@pytest.mark.parametrize("others", [[], [[7]], [[7, 8], [7, 8]], [[7, 8, 9]]])
def test_digests_of_every_rank_or_none(others: list[list[int]]) -> None:
    """Two ranks announce two blocks: what is missing of one would go unverified."""
    half = Side(msgspec.structs.replace(LAYOUT, num_kv_heads=1), 2)
    blocks = announced(TransferPlan(Side(LAYOUT), half), 21)
    with pytest.raises(TransferError, match=r"not as many of each other rank: it has 2"):
        blocks.add(0, [1, 2], others)
    assert blocks.add(0, [1, 2], [[3, 4]]) == (0, (1, 2))
    assert isinstance(
        published_event(None, msg.BlocksPublished("t", 0, "l", 0, [1], [], [[2]]), 0.0), ev.SenderFailed
    )


def test_an_end_before_all_is_announced_is_refused() -> None:
    blocks = announced(MERGING, 21)
    blocks.add(0, range(5))
    for count in (3, 5, 6):
        with pytest.raises(TransferError, match=f"ended with {count} blocks, 5 announced; .* 6 blocks there"):
            blocks.check_end(count)


def test_messages_become_events_about_our_blocks() -> None:
    tokens, blocks = [FirstToken(4)], announced(MERGING, 16)

    def published(first: int, digests: list[int]) -> msg.BlocksPublished:
        return msg.BlocksPublished("t", 0, "lease", first, digests)

    assert published_event(None, published(5, [1]), 2.0) == ev.Announced(ev.BlockRange(5, (1,)), 2.0)
    assert published_event(blocks, published(0, [1]), 2.0) is None
    assert published_event(blocks, published(1, [2]), 3.0) == ev.Announced(ev.BlockRange(0, (2,)), 3.0)
    refused = published_event(blocks, published(1, [2]), 3.0)
    assert isinstance(refused, ev.SenderFailed) and refused.kind == "transfer_failed"
    early = complete_event(blocks, msg.TransferComplete("t", 0, 4, tokens), 2)
    assert isinstance(early, ev.SenderFailed) and "2 announced" in early.message
    assert published_event(blocks, published(2, [3, 4]), 4.0) == ev.Announced(ev.BlockRange(1, (4,)), 4.0)
    done = complete_event(blocks, msg.TransferComplete("t", 0, 4, tokens), 2)
    assert done == ev.Completed(2, (FirstToken(4),))
    direct = complete_event(None, msg.TransferComplete("t", 0, 4, tokens), 2)
    assert direct == ev.Completed(4, (FirstToken(4),))
