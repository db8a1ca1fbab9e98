"""A sender's announcements of its own blocks become announcements of ours: complete ones only, each once."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import TransferError
from contract.layout import Side
from contract.requests import SendTransfer
from engine.connector import FirstToken
from kv_transfer.control.incoming_transfer import IncomingTransfer
from kv_transfer.links.link import PeerRef
from kv_transfer.protocol import messages as msg
from kv_transfer.protocol.digests import Share
from kv_transfer.protocol.fetch_side import Fetch
from kv_transfer.protocol.plan import AnnouncedBlocks, PeerTerms, TransferPlan
from tests.kv_transfer.builders import LAYOUT, request_of
from tests.kv_transfer.test_plan import UNTIMED, plans

WIDE = msgspec.structs.replace(LAYOUT, block_size=8)
MERGING = TransferPlan(Side(WIDE), Side(LAYOUT))
DIRECT = TransferPlan(Side(LAYOUT), Side(LAYOUT))
SPLITTING = TransferPlan(Side(LAYOUT), Side(WIDE))


def announced(plan: TransferPlan, num_tokens: int) -> AnnouncedBlocks:
    terms = PeerTerms(plan, "model", None)
    return AnnouncedBlocks(terms, num_tokens, range(1000, 1000 + plan.theirs.num_blocks(num_tokens)))


def incoming(num_blocks: int, blocks: AnnouncedBlocks) -> IncomingTransfer:
    """Return a fetch of so many blocks of ours that has just begun."""
    request = request_of("r", list(range(4 * num_blocks)), SendTransfer("t"))
    ref = PeerRef("boot", is_dialed=True)
    return IncomingTransfer(request, ref, "t", 0, Fetch(num_blocks=num_blocks), blocks, 0.0)


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
        ours = blocks.add(known, range(known, known + count), others)
        known += count
        assert ours.start == told
        told = ours.stop
        assert told == plan.num_covered(known, num_tokens)
        for block in ours:
            assert plan.source_blocks(block, block + 1, num_tokens).stop <= known
    assert told == plan.ours.num_blocks(num_tokens)
    blocks.check_end(total)
    sources, seeds, shares = blocks.sources_of(0, told)
    assert (sources, seeds) == (range(total), tuple(range(1000, 1000 + total)))
    assert shares == tuple(
        Share(rank, tuple(range(of_rank, of_rank + total)))
        for rank, of_rank in enumerate([0, *ranks])
        if rank in plan.read_ranks
    )


def test_half_a_block_waits_for_its_other_half() -> None:
    """Their blocks of 4 tokens, ours of 8, a prompt of 21: five blocks and a bit there, three here."""
    blocks = announced(MERGING, 21)
    assert blocks.add(0, [10]) == range(0)
    assert blocks.add(1, [11, 12]) == range(1)
    assert blocks.add(3, [13, 14]) == range(1, 2)
    assert blocks.add(5, [15]) == range(2, 3)
    assert blocks.sources_of(1, 3)[2] == (Share(0, (12, 13, 14, 15)),)


def test_half_of_their_block_is_enough_where_the_rest_is_cached() -> None:
    """Their blocks of 8, ours of 4: our third comes out of the upper half of their second."""
    blocks = announced(SPLITTING, 16)
    assert blocks.add(0, [20, 21]) == range(4)
    assert blocks.sources_of(3, 4) == (range(1, 2), (1001,), (Share(0, (21,)),))


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
    assert blocks.add(0, [1, 2], [[3, 4]]) == range(2)
    with pytest.raises(TransferError, match=r"not as many of each other rank: it has 1"):
        incoming(1, announced(DIRECT, 4)).step_of(msg.BlocksPublished("t", 0, "l", 0, [1], [], [[2]]), 0.0)


def test_an_end_before_all_is_announced_is_refused() -> None:
    blocks = announced(MERGING, 21)
    blocks.add(0, range(5))
    for count in (3, 5, 6):
        with pytest.raises(TransferError, match=f"ended with {count} blocks, 5 announced; .* 6 blocks there"):
            blocks.check_end(count)


def test_messages_are_about_our_blocks() -> None:
    """Their blocks of 4 tokens, ours of 8: two here."""
    fetching = incoming(2, announced(MERGING, 16))
    end = msg.TransferComplete("t", 0, 4, [FirstToken(4)])

    def receive(message: msg.SenderMessage) -> Fetch:
        step = fetching.step_of(message, 2.0)
        if step is not None:
            fetching.fetch = step[0]
        return fetching.fetch

    def published(first: int, digests: list[int]) -> msg.BlocksPublished:
        return msg.BlocksPublished("t", 0, "lease", first, digests)

    assert not receive(published(0, [1])).is_published
    fetch = receive(published(1, [2]))
    assert (fetch.num_announced, fetch.announced_at) == (1, 2.0)
    with pytest.raises(TransferError, match="announced 1 blocks from 1; 2 of 4 were"):
        receive(published(1, [2]))
    with pytest.raises(TransferError, match="2 announced"):
        receive(end)
    assert receive(published(2, [3, 4])).num_announced == 2
    assert receive(end).first_tokens == (FirstToken(4),)


def test_equal_blocks_are_announced_as_they_are() -> None:
    fetching = incoming(1, announced(DIRECT, 4))
    step = fetching.step_of(msg.BlocksPublished("t", 0, "lease", 0, [7]), 2.0)
    assert step is not None and step[0].num_announced == 1
    does_not_follow = msg.BlocksPublished("t", 0, "lease", 5, [1])
    too_many = msg.TransferComplete("t", 0, 4, [FirstToken(4)])
    for message in (does_not_follow, too_many):
        with pytest.raises(TransferError):
            fetching.step_of(message, 2.0)
