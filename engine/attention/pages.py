"""Block tables in FlashInfer's form: one list of blocks, and the offset of each request's blocks."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.compute.inputs import PreparedInputs
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
    num_reqs = inputs.num_reqs
    seq_lens = padded(inputs.seq_lens, num_rows, 1)
    counts = -(-seq_lens // block_size)
    starts = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    num_used = int(starts[num_reqs])
    rows = np.repeat(np.arange(num_reqs), counts[:num_reqs])
    columns = np.arange(num_used) - np.repeat(starts[:num_reqs], counts[:num_reqs])
    indices = np.zeros(int(starts[-1]), dtype=np.int32)
    indices[:num_used] = inputs.block_table[rows, columns]
    last = seq_lens - (counts - 1) * block_size
    return Pages(*(torch.from_numpy(part) for part in (starts, indices, last)))
