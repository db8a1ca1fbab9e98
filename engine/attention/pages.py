"""The places of a step's KV: lists of blocks in FlashInfer's form, and what a store clears."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.compute.inputs import IntVector, PreparedInputs
from engine.compute.staging import padded

NO_SLOT = -1
"""The slot of a token whose KV is not stored."""


@dataclass(frozen=True)
class Pages:
    """The blocks of all requests, on the host, int32: ``indices[starts[i]:starts[i + 1]]`` are request i's blocks.

    last: tokens in the last block of each request.
    """

    starts: Tensor
    indices: Tensor
    last: Tensor


def pages_of(inputs: PreparedInputs, block_size: int, num_rows: int) -> Pages:
    """Return the step's pages for ``num_rows`` rows; an unused row has one token in the null block."""
    starts, indices = blocks_of(inputs, block_size, num_rows)
    last = (padded(inputs.seq_lens, num_rows, 1) - 1) % block_size + 1
    return Pages(*(torch.from_numpy(part) for part in (starts, indices, last)))


def blocks_of(inputs: PreparedInputs, block_size: int, num_rows: int) -> tuple[IntVector, IntVector]:
    """Return the blocks of all rows one after the other, and before them where each row's begin, ``[num_rows + 1]``.

    An unused row has the null block.
    """
    counts = -(-padded(inputs.seq_lens, num_rows, 1) // block_size)
    starts = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    indices = np.zeros(int(starts[-1]), dtype=np.int32)
    # Only the blocks that a request uses are read, not the width of the table.
    own = [row[:count] for row, count in zip(inputs.block_table, counts.tolist(), strict=False)]
    np.concatenate(own, out=indices[: starts[inputs.num_reqs]])
    return starts, indices


def num_cleared_behind(inputs: PreparedInputs, block_size: int) -> NDArray[np.integer[Any]]:
    """Return the slots to zero behind each token: the rest of a block whose first slot this step writes."""
    is_last = np.ones(inputs.num_tokens, dtype=bool)
    is_last[:-1] = inputs.block_offsets[:-1] + 1 != inputs.block_offsets[1:]
    is_last[inputs.query_start_loc[1:] - 1] = True
    computed = np.repeat(inputs.num_computed_tokens, inputs.num_scheduled_tokens)
    is_fresh = inputs.positions - inputs.block_offsets >= computed
    return np.where(is_last & is_fresh, block_size - 1 - inputs.block_offsets, 0)
