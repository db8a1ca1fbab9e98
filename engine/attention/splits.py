"""The division of long contexts among the programs of the split kernel: which program reads which tokens for which queries.

A unit is some packed rows of one request: row r is token ``r // group``, and within each KV head query head ``r % group``.
Its context is divided into splits, by its own lengths only, so no result depends on the batch. An item is one split of one
unit. The partial results of a pass lie in the order of its items, and a pass has no more of them than memory is reserved
for.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.compute.inputs import IntVector, PreparedInputs

DECODE_SPLIT = 512
"""Tokens per split of a decode: eight tiles, so that the results of splits are a hundredth of the KV that is read."""
CHUNK_SPLIT = 2048
"""Tokens per split of a short chunk: each of its splits writes results for many rows."""
MOST_SPLITS = 128
"""A longer context has longer splits: 128 are enough to occupy a device for one request with one KV head."""
SHORT_CHUNK = 64
LONG_CONTEXT = 4096
ITEM_FIELDS = 5
UNIT_FIELDS = 4

_Table = NDArray[np.int32]


@dataclass(frozen=True)
class Packing:
    """The form of units and splits. group: query heads per KV head. rows: packed rows of a unit.

    split: least tokens of a split. window: tokens that a query sees (None: all). tile: tokens that are read together.
    """

    group: int
    rows: int
    split: int
    window: int | None
    tile: int


@dataclass(frozen=True)
class Splits:
    """One pass, int32. items: request, first packed row, first token, the token behind the last, splits of its unit.

    units: request, first packed row, first item, splits. A split's end may lie behind the end of the sequence.
    """

    items: _Table
    units: _Table


def splits_needed(num_tokens: int, split: int = DECODE_SPLIT) -> int:
    """Return the largest number of splits of a context of up to ``num_tokens``."""
    return max(1, min(MOST_SPLITS, -(-num_tokens // split)))


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
    length = np.maximum(-(-visible // (MOST_SPLITS * packing.tile)) * packing.tile, packing.split)
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
