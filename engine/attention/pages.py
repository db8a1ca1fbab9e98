"""Block tables in FlashInfer's form: one list of blocks, and the offset of each request's blocks."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.compute.inputs import PreparedInputs


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
    num_unused = num_rows - inputs.num_reqs
    seq_lens = np.pad(inputs.seq_lens, (0, num_unused), constant_values=1)
    counts = -(-seq_lens // block_size)
    tables: NDArray[np.int32] = np.pad(inputs.block_table, ((0, num_unused), (0, 0)))
    is_used = np.arange(tables.shape[1]) < counts[:, None]
    starts = np.concatenate(([0], np.cumsum(counts)))
    last = seq_lens - (counts - 1) * block_size
    return Pages(*(torch.from_numpy(part.astype(np.int32)) for part in (starts, tables[is_used], last)))
