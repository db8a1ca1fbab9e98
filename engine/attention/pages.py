"""Block tables in FlashInfer's form: one list of blocks, and the offset of each request's blocks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.compute.inputs import IntVector, PreparedInputs
from engine.compute.staging import padded


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

    Only the blocks that a request uses are read, not the width of the table. An unused row has the null block.
    """
    counts = -(-padded(inputs.seq_lens, num_rows, 1) // block_size)
    starts = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    indices = np.zeros(int(starts[-1]), dtype=np.int32)
    own = [row[:count] for row, count in zip(inputs.block_table, counts.tolist(), strict=False)]
    np.concatenate(own, out=indices[: starts[inputs.num_reqs]])
    return starts, indices
