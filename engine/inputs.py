"""From a scheduler's decision to the vectors that a forward pass needs (seed 002).

Two tables persist between steps and hold one row per request: the token table and the block table. A step's vectors
are gathered from them with plain integer arithmetic; nothing here touches a device.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.batch import InputBatch
from engine.outputs import SchedulerOutput

IntVector = NDArray[np.int32]
IndexVector = NDArray[np.int64]


@dataclass(frozen=True)
class PreparedInputs:
    """The inputs and the attention metadata of one step.

    Token level, ``[num_tokens]``: request_indices (row of the tables), positions (within the sequence), token_indices
    (into the flat token table), input_ids, block_table_indices (into the flat block table), block_numbers,
    block_offsets, slot_mapping (block number × block size + offset: where the token's KV goes).
    Request level, ``[num_reqs]``: num_scheduled_tokens, num_computed_tokens, seq_lens (their sum), num_wanted (so many of
    its last tokens' final states are read; the others' may be anything), block_table ``[num_reqs, max_blocks]`` (zero
    padded), and query_start_loc ``[num_reqs + 1]``.
    mask_shape: ``(max_query_len, max_query_len)``, shared by all requests, while all are at their start; else
    ``(num_tokens, longest sequence)``.
    """

    req_ids: list[str]
    request_indices: IntVector
    positions: IntVector
    token_indices: IndexVector
    input_ids: IntVector
    block_table_indices: IndexVector
    block_numbers: IntVector
    block_offsets: IntVector
    slot_mapping: IndexVector
    num_scheduled_tokens: IntVector
    num_computed_tokens: IntVector
    seq_lens: IntVector
    num_wanted: IntVector
    query_start_loc: IntVector
    block_table: IntVector
    max_query_len: int
    mask_shape: tuple[int, int]

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return int(self.query_start_loc[-1])


def prepare_inputs(batch: InputBatch, scheduled: SchedulerOutput) -> PreparedInputs:
    """The vectors of one step, requests in the order of ``num_scheduled_tokens``.

    ``batch`` must have been updated with the same ``scheduled``.
    """
    req_ids = list(scheduled.num_scheduled_tokens)
    rows = np.array([batch.row_of(req_id) for req_id in req_ids], dtype=np.int32)
    counts = np.array(list(scheduled.num_scheduled_tokens.values()), dtype=np.int32)
    computed = np.array([batch.requests[req_id].num_computed_tokens for req_id in req_ids], dtype=np.int32)
    query_start_loc = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])

    if num_tokens == len(counts):  # answers go on, and nothing else
        request_indices, positions, num_wanted = rows, computed, counts
    else:
        states = map(batch.requests.__getitem__, req_ids)
        num_wanted = np.array(
            [one.num_wanted(scheduled.num_scheduled_tokens[one.req_id]) for one in states], dtype=np.int32
        )
        request_indices = np.repeat(rows, counts)
        positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(query_start_loc[:-1] - computed, counts)
    block_indices, block_offsets = np.divmod(positions, np.int32(batch.block_size))
    max_len, max_blocks = batch.token_table.shape[1], batch.block_table.shape[1]
    wide = request_indices.astype(np.int64)
    token_indices = wide * max_len + positions
    block_table_indices = wide * max_blocks + block_indices
    block_numbers = batch.block_table.ravel()[block_table_indices]
    seq_lens = computed + counts
    max_query_len = int(counts.max())
    shared = (max_query_len, max_query_len)
    return PreparedInputs(
        req_ids=req_ids,
        request_indices=request_indices,
        positions=positions,
        token_indices=token_indices,
        input_ids=batch.token_table.ravel()[token_indices],
        block_table_indices=block_table_indices,
        block_numbers=block_numbers,
        block_offsets=block_offsets,
        slot_mapping=block_numbers.astype(np.int64) * batch.block_size + block_offsets,
        num_scheduled_tokens=counts,
        num_computed_tokens=computed,
        seq_lens=seq_lens,
        num_wanted=num_wanted,
        query_start_loc=query_start_loc,
        block_table=batch.block_table[rows],
        max_query_len=max_query_len,
        mask_shape=(num_tokens, int(seq_lens.max())) if computed.any() else shared,
    )
