"""The division of long contexts among the programs of the split kernel: which program reads which tokens for which queries.

A unit is some packed rows of one request: row r is token ``r // group``, and within each KV head query head ``r % group``.
Its context is divided into splits, by its own lengths only, so no result depends on the batch. An item is one split of one
unit, or some that follow each other (``joined``). The partial results of a pass lie in the order of its splits, and a pass
has no more of them than memory is reserved for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.compute.inputs import IntVector, PreparedInputs

DECODE_SPLIT = 512
"""Tokens per split of a decode, so that the results of splits are a hundredth of the KV that is read."""
SHORT_DECODE = 2048
SHORT_DECODE_SPLIT = 256
"""Tokens per split of a decode that sees up to ``SHORT_DECODE``: a split takes longer than all else of its attention."""
CHUNK_SPLIT = 2048
"""Tokens per split of a short chunk: each of its splits writes results for many rows."""
MOST_SPLITS = 128
"""A longer context has longer splits: 128 are enough to occupy a device for one request with one KV head."""
JOINED_SPLITS = 2
"""Splits of a unit that a program reads in one loop where there are programs enough (1: each split has its own)."""
SHORT_CHUNK = 64
LONG_CONTEXT = 4096
ITEM_FIELDS = 5
RUN_FIELDS = 7
UNIT_FIELDS = 4

_Table = NDArray[np.int32]


@dataclass(frozen=True)
class Packing:
    """The form of units and splits. group: query heads per KV head. rows: packed rows of a unit.

    split: least tokens of a split. window: tokens that a query sees (None: all). tile: tokens that are read together.
    is_decode: a unit has one token, the last of its request.
    """

    group: int
    rows: int
    split: int
    window: int | None
    tile: int
    is_decode: bool = False


@dataclass(frozen=True)
class Splits:
    """One pass, int32. items: request, first packed row, first token, the token behind the last, splits of its unit.

    units: request, first packed row, first item, splits. A split's end may lie behind the end of the sequence.
    """

    items: _Table
    units: _Table


def splits_needed(num_tokens: int) -> int:
    """Return the largest number of splits of a decode that sees up to ``num_tokens``."""
    of_short = -(-min(num_tokens, SHORT_DECODE) // SHORT_DECODE_SPLIT)
    return max(1, of_short, min(MOST_SPLITS, -(-num_tokens // DECODE_SPLIT)))


def is_split(inputs: PreparedInputs) -> NDArray[np.bool_]:
    """Return which requests are short chunks on a long context, by their own lengths only."""
    counts = inputs.num_scheduled_tokens
    return (counts > 1) & (counts <= SHORT_CHUNK) & (inputs.num_computed_tokens >= LONG_CONTEXT)


def bounds_of(counts: IntVector, seq_lens: IntVector, packing: Packing) -> _Table:
    """Return for each request ``[4, num_requests]``: first visible token, tokens per split, splits, units."""
    begin = np.zeros_like(seq_lens)
    if packing.window is not None:
        begin = np.maximum(seq_lens - counts - packing.window + 1, 0) // packing.tile * packing.tile
    visible = seq_lens - begin
    is_short = packing.is_decode & (visible <= SHORT_DECODE)
    least = np.where(is_short, SHORT_DECODE_SPLIT, packing.split)
    length = np.maximum(-(-visible // (MOST_SPLITS * packing.tile)) * packing.tile, least)
    return np.stack([begin, length, -(-visible // length), -(-counts * packing.group // packing.rows)])


def splits_of(requests: IntVector, bounds: _Table, packing: Packing) -> Splits:
    """Return all splits of these requests. bounds: those of each request of the list."""
    begin, length, num_splits, num_units = bounds
    owner = np.repeat(np.arange(len(requests)), num_units)
    first_unit = np.cumsum(num_units) - num_units
    first_row = (np.arange(len(owner)) - first_unit[owner]) * packing.rows
    splits = num_splits[owner]
    first_item = np.cumsum(splits) - splits
    unit = np.repeat(np.arange(len(owner)), splits)
    number = np.arange(len(unit)) - first_item[unit]
    item_owner = owner[unit]
    first = begin[item_owner] + number * length[item_owner]
    items = [requests[item_owner], first_row[unit], first, first + length[item_owner], splits[unit]]
    units = [requests[owner], first_row, first_item, splits]
    return Splits(np.stack(items, 1).astype(np.int32), np.stack(units, 1).astype(np.int32))


def joined(splits: Splits, most: int) -> _Table:
    """Return the items of a pass with up to ``most`` consecutive splits of a unit joined.

    Behind its fields, an item has the tokens of a split and the place of its first result. The results and the units are
    those of single splits: joining changes which program computes a split, and nothing else.
    """
    num_splits = splits.units[:, 3]
    number = np.arange(len(splits.items)) - np.repeat(splits.units[:, 2], num_splits)
    first = np.flatnonzero(number % most == 0)
    last = np.append(first[1:], len(splits.items)) - 1
    items = splits.items[first]
    length = items[:, 3] - items[:, 2]
    items[:, 3] = splits.items[last, 3]
    return np.column_stack([items, length, first]).astype(np.int32)


def passes_of(splits: Splits, most_items: int) -> Iterator[Splits]:
    """Divide the splits into passes of at most ``most_items``, or of one unit with more."""
    ends = splits.units[:, 2] + splits.units[:, 3]
    unit = 0
    while unit < len(ends):
        before = int(splits.units[unit, 2])
        behind = max(unit + 1, int(np.searchsorted(ends, before + most_items, side="right")))
        units = splits.units[unit:behind].copy()
        units[:, 2] -= before
        yield Splits(splits.items[before : int(ends[behind - 1])], units)
        unit = behind
