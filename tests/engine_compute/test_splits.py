"""The division of contexts among the programs of the split kernel: every token once, by a request's own lengths only."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.splits import (
    CHUNK_SPLIT,
    DECODE_SPLIT,
    LONG_CONTEXT,
    MOST_SPLITS,
    SHORT_CHUNK,
    Packing,
    Splits,
    bounds_of,
    is_split,
    joined,
    passes_of,
    splits_needed,
    splits_of,
)
from tests.attention_cases import Case

TILE = 64
DECODE = Packing(group=4, rows=4, split=DECODE_SPLIT, window=None, tile=TILE, is_decode=True)
LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=8)


def split(counts: list[int], seq_lens: list[int], packing: Packing) -> Splits:
    requests = np.arange(len(counts), dtype=np.int32)
    bounds = bounds_of(np.array(counts, dtype=np.int32), np.array(seq_lens, dtype=np.int32), packing)
    return splits_of(requests, bounds, packing)


@pytest.mark.parametrize(
    ("length", "number"),
    [
        (1, 1),
        (255, 1),
        (256, 1),
        (257, 2),
        (1024, 4),
        (2048, 8),
        (2049, 5),
        (8192, 16),
        (65_536, 128),
        (65_537, 114),
        (131_072, 128),
        (10**6, 128),
    ],
)
def test_splits_of_a_decode(length: int, number: int) -> None:
    """256 tokens each up to 2,048, then 512, up to 128 splits; longer contexts have longer ones of whole tiles."""
    splits = split([1], [length], DECODE)
    assert splits.units.tolist() == [[0, 0, 0, number]]
    assert len(splits.items) == number
    assert number <= splits_needed(length)
    assert splits_needed(length) <= splits_needed(length + 1)


@given(seq_lens=LENGTHS, window=st.sampled_from([None, 1, 300, 5000]))
def test_a_decode_is_split_alike_in_any_batch(seq_lens: list[int], window: int | None) -> None:
    packing = replace(DECODE, window=window)
    together = split([1] * len(seq_lens), seq_lens, packing)
    alone = [split([1], [length], packing).items[:, 1:] for length in seq_lens]
    assert np.array_equal(together.items[:, 1:], np.concatenate(alone))


@given(
    seq_lens=LENGTHS,
    count=st.integers(1, 64),
    window=st.sampled_from([None, 1, 300, 5000]),
    rows=st.sampled_from([4, 7, 64]),
    group=st.integers(1, 8),
)
def test_every_visible_token_is_in_one_split_of_each_unit(
    seq_lens: list[int], count: int, window: int | None, rows: int, group: int
) -> None:
    """Units hold all packed rows of a request, and are alike in any batch."""
    counts = [min(count, seq_len) for seq_len in seq_lens]
    packing = Packing(group, rows, CHUNK_SPLIT, window, TILE)
    splits = split(counts, seq_lens, packing)
    for index, (own, seq_len) in enumerate(zip(counts, seq_lens, strict=True)):
        units = splits.units[splits.units[:, 0] == index]
        assert units[:, 1].tolist() == list(range(0, own * group, rows))
        first_seen = 0 if window is None else max(0, seq_len - own - window + 1)
        alone = split([own], [seq_len], packing)
        for unit, alone_unit in zip(units.tolist(), alone.units.tolist(), strict=True):
            items = splits.items[unit[2] : unit[2] + unit[3]]
            assert len(items) <= MOST_SPLITS
            assert (items[:, 0] == index).all()
            assert (items[:, 1] == unit[1]).all()
            assert (items[:, 4] == len(items)).all()
            assert first_seen - TILE < items[0, 2] <= first_seen
            assert (items[1:, 2] == items[:-1, 3]).all()
            assert items[-1, 2] < seq_len <= items[-1, 3]
            assert (items[:, 2] % TILE == 0).all()
            own_items = alone.items[alone_unit[2] : alone_unit[2] + alone_unit[3]]
            assert np.array_equal(items[:, 1:], own_items[:, 1:])


@given(seq_lens=LENGTHS, most=st.integers(1, 300))
def test_passes_hold_all_units_in_order(seq_lens: list[int], most: int) -> None:
    """A pass has at most the items that memory is reserved for, unless it has a single unit."""
    whole = split([1] * len(seq_lens), seq_lens, DECODE)
    passes = list(passes_of(whole, most))
    assert np.array_equal(np.concatenate([each.items for each in passes]), whole.items)
    for each in passes:
        assert len(each.items) <= most or len(each.units) == 1
        ends = np.cumsum(each.units[:, 3])
        assert (each.units[:, 2] == ends - each.units[:, 3]).all()
        assert ends[-1] == len(each.items)
    kept = np.concatenate([each.units[:, [0, 1, 3]] for each in passes])
    assert np.array_equal(kept, whole.units[:, [0, 1, 3]])


@given(seq_lens=LENGTHS, most=st.integers(1, 5), window=st.sampled_from([None, 300, 5000]))
def test_joined_items_hold_all_splits_in_order(seq_lens: list[int], most: int, window: int | None) -> None:
    """A program finds the borders of the splits within, and the places of their results, which are those of single ones."""
    splits = split([1] * len(seq_lens), seq_lens, replace(DECODE, window=window))
    found = list[list[int]]()
    for request, first_row, begin, end, num_splits, length, place in joined(splits, most).tolist():
        assert begin < end <= begin + most * length
        for number, start in enumerate(range(begin, end, length)):
            assert place + number == len(found)
            found.append([request, first_row, start, start + length, num_splits])
    assert found == splits.items.tolist()
    runs = np.bincount(joined(splits, most)[:, 0])
    assert runs.tolist() == [-(-number // most) for number in splits.units[:, 3].tolist()]


def test_short_chunks_on_long_contexts_are_split() -> None:
    """By their own lengths: neither decodes, nor long chunks, nor short contexts."""
    long = LONG_CONTEXT
    work = ((long, 2), (long, SHORT_CHUNK), (long - 1, 2), (long, SHORT_CHUNK + 1), (long, 1), (0, 20))
    assert is_split(Case(work=work).inputs()).tolist() == [True, True, False, False, False, False]
