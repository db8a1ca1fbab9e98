"""Plans between unequal sides, as pure functions, compared with the plainest mapping of each token and head."""

import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contract.layout import (
    KEY_VALUE,
    LATENT,
    MAX_BLOCK_SIZE_RATIO,
    KVLayout,
    Side,
    heads_of_rank,
    received_fingerprint,
    weights_of,
)
from kv_transfer.protocol.handshake import Accepting, Dialing, PeerTarget
from kv_transfer.protocol.plan import PeerTerms, TransferPlan, terms_between
from tests.kv_transfer.builders import LAYOUT, MODEL
from tests.kv_transfer.test_handshake import answer, identity

UNTIMED = settings(deadline=None)


@st.composite
def plans(draw: st.DrawFn) -> TransferPlan:
    """Draw two compatible sides: one block size is a multiple of the other, any numbers of heads and ranks, two dtypes.

    A latent is one head, of which each rank has a copy.
    """
    small, ratio = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    sizes = draw(st.permutations([small, small * ratio]))
    parts = draw(st.sampled_from([KEY_VALUE, LATENT]))
    num_heads = 1 if parts == LATENT else draw(st.sampled_from([1, 2, 3, 4, 6, 10, 12]))
    sides = []
    for size in sizes:
        ranks, dtype = draw(st.integers(1, 8)), draw(st.sampled_from(["float32", "bfloat16"]))
        held = -(-num_heads // ranks)
        layout = KVLayout(
            num_layers=2, num_kv_heads=held, head_dim=3, block_size=size, dtype=dtype, parts=parts
        )
        sides.append(Side(layout, ranks, num_heads))
    return TransferPlan(*sides)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[TransferPlan, int, int, int]:
    """Draw a plan, the length of a prompt, and a range of our blocks of it."""
    plan, num_tokens = draw(plans()), draw(st.integers(1, 90))
    first = draw(st.integers(0, plan.ours.num_blocks(num_tokens) - 1))
    return plan, num_tokens, first, draw(st.integers(first + 1, plan.ours.num_blocks(num_tokens)))


def tokens_of_blocks(side: Side, first: int, end: int, num_tokens: int) -> list[int]:
    size = side.layout.block_size
    return [token for token in range(num_tokens) if first <= token // size < end]


@UNTIMED
@given(ranges())
def test_each_token_goes_where_it_belongs(case: tuple[TransferPlan, int, int, int]) -> None:
    """Once, in order, from its place there to its place here; nothing else moves, nothing after the prompt's end."""
    plan, num_tokens, first, end = case
    ours, theirs, moved = plan.ours.layout.block_size, plan.theirs.layout.block_size, []
    for run in plan.token_runs(first, end, num_tokens):
        for step in range(run.count):
            there = run.theirs * theirs + run.their_offset + step
            assert there == run.ours * ours + run.our_offset + step
            assert run.their_offset + step < theirs and run.our_offset + step < ours
            moved.append(there)
    assert moved == tokens_of_blocks(plan.ours, first, end, num_tokens)


@UNTIMED
@given(ranges())
def test_sources_are_the_blocks_that_hold_a_token_of_ours(case: tuple[TransferPlan, int, int, int]) -> None:
    plan, num_tokens, first, end = case
    wanted = tokens_of_blocks(plan.ours, first, end, num_tokens)
    needed = sorted({token // plan.theirs.layout.block_size for token in wanted})
    assert list(plan.source_blocks(first, end, num_tokens)) == needed


@UNTIMED
@given(plans(), st.integers(1, 90), st.data())
def test_a_block_is_covered_when_all_its_sources_are(
    plan: TransferPlan, num_tokens: int, data: st.DataObject
) -> None:
    known = data.draw(st.integers(0, plan.theirs.num_blocks(num_tokens)))
    covered = 0
    while covered < plan.ours.num_blocks(num_tokens):
        if plan.source_blocks(covered, covered + 1, num_tokens).stop > known:
            break
        covered += 1
    assert plan.num_covered(known, num_tokens) == covered


@UNTIMED
@given(ranges(), st.integers(0, 9))
def test_pieces_are_the_whole_range_in_bounded_parts(
    case: tuple[TransferPlan, int, int, int], most: int
) -> None:
    plan, num_tokens, first, end = case
    pieces = list(plan.pieces(first, end, most))
    assert [block for piece in pieces for block in range(*piece)] == list(range(first, end))
    for piece in pieces:
        num_sources = len(plan.source_blocks(*piece, num_tokens))
        assert num_sources <= most or piece[1] - piece[0] == 1 or num_sources == 1
    if plan.ours.layout.block_size <= plan.theirs.layout.block_size:
        read = [block for piece in pieces for block in plan.source_blocks(*piece, num_tokens)]
        assert len(set(read)) == len(read), "a block is read twice"


@UNTIMED
@given(plans())
def test_each_head_of_each_rank_comes_from_the_rank_that_has_it(plan: TransferPlan) -> None:
    for rank in range(plan.ours.num_ranks):
        found: list[int] = []
        for run in plan.head_runs(rank):
            assert (run.ours, run.our_offset) == (rank, len(found))
            assert run.their_offset + run.count <= plan.theirs.layout.num_kv_heads
            found += plan.theirs.heads(run.theirs)[run.their_offset :][: run.count]
        assert found == list(plan.ours.heads(rank))


@UNTIMED
@given(plans())
def test_no_byte_crosses_twice_where_one_copy_is_enough(plan: TransferPlan) -> None:
    """A rank reads from as few ranks as can have its heads, and from none of which it uses nothing."""
    for rank in range(plan.ours.num_ranks):
        heads = set(plan.ours.heads(rank))
        read = plan.ranks_of(rank)
        assert len(set(read)) == len(read)
        choices = itertools.combinations(range(plan.theirs.num_ranks), len(read) - 1)
        assert not any(heads <= {head for each in few for head in plan.theirs.heads(each)} for few in choices)
    read_by_any = {each for rank in range(plan.ours.num_ranks) for each in plan.ranks_of(rank)}
    assert plan.read_ranks == read_by_any


@given(st.integers(1, 40), st.integers(1, 40))
def test_all_heads_are_held_evenly(num_heads: int, num_ranks: int) -> None:
    held = [heads_of_rank(num_heads, num_ranks, rank) for rank in range(num_ranks)]
    assert len({len(heads) for heads in held}) == 1
    assert {head for heads in held for head in heads} == set(range(num_heads))
    holders = [sum(head in heads for heads in held) for head in range(num_heads)]
    assert max(holders) - min(holders) <= 1, "copies are spread evenly"


@pytest.mark.parametrize(
    ("num_heads", "theirs", "ours", "read"),
    [
        (2, 4, 1, [[0, 2]]),
        (2, 1, 4, [[0], [0], [0], [0]]),
        (2, 2, 4, [[0], [0], [1], [1]]),
        (2, 4, 2, [[0], [2]]),
        (2, 4, 8, [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (1, 4, 4, [[0], [1], [2], [3]]),
        (3, 2, 1, [[0, 1]]),
    ],
)
def test_which_copy_is_read(num_heads: int, theirs: int, ours: int, read: list[list[int]]) -> None:
    """One of several ranks with the same head is read, another one by each of several readers."""
    sides = [
        Side(msgspec.structs.replace(LAYOUT, num_kv_heads=-(-num_heads // ranks)), ranks, num_heads)
        for ranks in (ours, theirs)
    ]
    plan = TransferPlan(*sides)
    assert [plan.ranks_of(rank) for rank in range(ours)] == read
    assert not plan.ours.differences(plan.theirs)
    assert plan.crossing_bytes == sum(map(len, read)) * plan.theirs.layout.block_bytes


def test_heads_that_the_ranks_do_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ranks of 2 KV heads each do not hold 5 heads"):
        Side(LAYOUT, 2, 5)


@UNTIMED
@given(plans())
def test_equal_sides_are_read_directly_and_each_rank_reads_its_like(plan: TransferPlan) -> None:
    same = TransferPlan(plan.ours, plan.ours)
    assert same.is_direct and same.describe() == ""
    assert [same.ranks_of(rank) for rank in range(plan.ours.num_ranks)] == [
        [rank] for rank in range(plan.ours.num_ranks)
    ]
    assert list(same.source_blocks(2, 5, 1000)) == [2, 3, 4]
    assert plan.is_direct == (plan.ours == plan.theirs)


def test_a_plan_says_what_it_converts() -> None:
    theirs = msgspec.structs.replace(LAYOUT, block_size=8, dtype="bfloat16", num_kv_heads=1)
    plan = TransferPlan(Side(LAYOUT), Side(theirs, 2))
    assert plan.describe() == "block_size 8 → 4, dtype bfloat16 → float32, ranks 2 → 1"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"block_size": 6}, "block_size: ours is 4, the peer's is 6 (neither is a multiple of the other)"),
        ({"block_size": 0}, "block_size: ours is 4, the peer's is 0 (neither is a multiple of the other)"),
        ({"block_size": -4}, "block_size: ours is 4, the peer's is -4 (neither is a multiple of the other)"),
        ({"block_size": 4 * MAX_BLOCK_SIZE_RATIO * 2}, "block_size: ours is 4, the peer's is 128 (more than"),
        ({"dtype": "float16"}, "dtype: ours is float32, the peer's is float16 (only float32 and bfloat16"),
        ({"dtype": "fp4"}, "dtype: ours is float32, the peer's is fp4 (only float32 and bfloat16"),
        ({"num_layers": 3}, "num_layers: ours is 2, the peer's is 3"),
        ({"num_kv_heads": 1}, "num_kv_heads: ours is 2, the peer's is 1"),
        ({"head_dim": 16}, "head_dim: ours is 8, the peer's is 16"),
        ({"block_size": 8, "dtype": "bfloat16"}, None),
        ({"block_size": 2}, None),
        ({"block_size": 4 * MAX_BLOCK_SIZE_RATIO}, None),
    ],
)
def test_what_no_plan_bridges_is_named_from_both_sides(
    changes: dict[str, int | str], named: str | None
) -> None:
    other = msgspec.structs.replace(LAYOUT, **changes)
    found = LAYOUT.differences(other)
    assert len(found) == len(other.differences(LAYOUT)) == (0 if named is None else 1)
    assert named is None or found[0].startswith(named)


def test_terms_are_only_for_what_differs() -> None:
    """KV of another dtype is hashed apart, whichever side rounds; another block size alone is the same KV (law 7)."""
    wide = msgspec.structs.replace(LAYOUT, block_size=8)
    half = msgspec.structs.replace(LAYOUT, dtype="bfloat16")
    ours, cut_otherwise, halved = Side(LAYOUT), Side(wide), Side(half)
    assert terms_between(ours, "w@float32", ours, "w@float32") is None
    cut = terms_between(ours, "w@float32", cut_otherwise, "w@float32")
    assert cut is not None
    assert (cut.kv_fingerprint, cut.plan.is_direct) == (None, False)
    rounded = terms_between(ours, "w@float32", halved, "w@bfloat16")
    widened = terms_between(halved, "w@bfloat16", ours, "w@float32")
    stored = terms_between(ours, "w@float32", halved, "w@float32")
    computed = terms_between(ours, "w@float32", ours, "w@bfloat16")
    assert rounded and widened and stored and computed
    assert computed.plan.is_direct
    names = {terms.kv_fingerprint for terms in (cut, rounded, widened, stored, computed)}
    assert len(names) == 5
    assert rounded.model_fingerprint == "w@bfloat16"


def test_the_side_that_fetches_gets_the_plan() -> None:
    """Once per link, at the handshake, from what both have proved."""
    wide = msgspec.structs.replace(LAYOUT, block_size=8)
    fetching = replace(identity("d"), side=Side(wide))
    dialer, acceptor = Dialing(fetching, PeerTarget("p", "boot-p", "127.0.0.1:1")), Accepting(identity("p"))
    answer(dialer, answer(acceptor, answer(dialer, answer(acceptor, dialer.begin()))))
    assert dialer.session is not None and acceptor.session is not None
    assert dialer.session.terms == PeerTerms(TransferPlan(Side(wide), Side(LAYOUT)), MODEL, None)
    assert acceptor.session.terms is None


def test_a_fingerprint_tells_weights_from_dtype() -> None:
    assert weights_of("w@float32") == weights_of("w@bfloat16") == weights_of("w") == "w"
    assert received_fingerprint("w@float32", "w@bfloat16") != received_fingerprint("w@bfloat16", "w@float32")
