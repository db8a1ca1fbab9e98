"""From a scheduler's decision to the vectors that a forward pass needs.

Two tables persist between steps and hold one row per request: the token table and the block table. A step's vectors
are gathered from them with plain integer arithmetic; nothing here touches a device. Where everybody goes on by a token,
all but what the tables say is known a step ahead (``outline_next``).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.compute.batch import InputBatch
from engine.outputs import SchedulerOutput

IntVector = NDArray[np.int32]
IndexVector = NDArray[np.int64]


@dataclass(frozen=True)
class Outline:
    """Which tokens a step computes, and where these and their KV stand in the tables.

    generation: of the batch whose tables these are. rows ``[num_reqs]``: of the tables.
    Token level, ``[num_tokens]``: request_indices (row of the tables), positions (within the sequence), token_indices
    (into the flat token table), block_table_indices (into the flat block table), block_offsets.
    Request level, ``[num_reqs]``: num_scheduled_tokens, num_computed_tokens, seq_lens (their sum), num_wanted (so many of
    its last tokens' final states are read; the others' may be anything), and query_start_loc ``[num_reqs + 1]``.
    """

    req_ids: list[str]
    generation: int
    rows: IntVector
    request_indices: IntVector
    positions: IntVector
    token_indices: IndexVector
    block_table_indices: IndexVector
    block_offsets: IntVector
    num_scheduled_tokens: IntVector
    num_computed_tokens: IntVector
    seq_lens: IntVector
    num_wanted: IntVector
    query_start_loc: IntVector

    @property
    def num_reqs(self) -> int:
        """Requests in the batch."""
        return len(self.req_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests."""
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        """Most tokens of any request."""
        return int(self.num_scheduled_tokens.max())

    @property
    def mask_shape(self) -> tuple[int, int]:
        """While all requests are at their start, of one mask for each of them; else (tokens, longest sequence)."""
        if self.num_computed_tokens.any():
            return self.num_tokens, int(self.seq_lens.max())
        return self.max_query_len, self.max_query_len


@dataclass(frozen=True)
class PreparedInputs(Outline):
    """The inputs and the attention metadata of one step: its outline, and what the tables say there.

    Token level: input_ids, block_numbers, slot_mapping (block number × block size + offset: where the token's KV goes).
    Request level: block_table ``[num_reqs, max_blocks]`` (zero padded).
    """

    input_ids: IntVector
    block_numbers: IntVector
    slot_mapping: IndexVector
    block_table: IntVector


def prepare_inputs(
    batch: InputBatch, scheduled: SchedulerOutput, ahead: Outline | None = None
) -> PreparedInputs:
    """The vectors of one step, requests in the order of ``num_scheduled_tokens``.

    ``batch`` must have been updated with the same ``scheduled``. ahead: what may be this step's outline.
    """
    outline = ahead if ahead and _is_of(ahead, batch, scheduled) else _of_step(batch, scheduled)
    block_numbers = batch.block_table.ravel()[outline.block_table_indices]
    return PreparedInputs(
        **vars(outline),
        input_ids=batch.token_table.ravel()[outline.token_indices],
        block_numbers=block_numbers,
        slot_mapping=block_numbers.astype(np.int64) * batch.block_size + outline.block_offsets,
        block_table=batch.block_table[outline.rows],
    )


def outline_next(batch: InputBatch, step: Outline) -> Outline:
    """Of the step after this one, if all its requests go on by one token, and nobody else."""
    if step.num_tokens > step.num_reqs:
        counts = np.ones_like(step.num_scheduled_tokens)
        return _outline(batch, step.req_ids, step.rows, counts, step.seq_lens, counts)
    block_offsets = (step.block_offsets + np.int32(1)) % np.int32(batch.block_size)
    return Outline(
        req_ids=step.req_ids,
        generation=batch.generation,
        rows=step.rows,
        request_indices=step.request_indices,
        positions=step.seq_lens,
        token_indices=step.token_indices + 1,
        block_table_indices=step.block_table_indices + (block_offsets == 0),
        block_offsets=block_offsets,
        num_scheduled_tokens=step.num_scheduled_tokens,
        num_computed_tokens=step.seq_lens,
        seq_lens=step.seq_lens + np.int32(1),
        num_wanted=step.num_scheduled_tokens,
        query_start_loc=step.query_start_loc,
    )


def _is_of(ahead: Outline, batch: InputBatch, scheduled: SchedulerOutput) -> bool:
    counts = scheduled.num_scheduled_tokens
    is_next = ahead.generation == batch.generation and scheduled.total_num_scheduled_tokens == len(counts)
    return is_next and list(counts) == ahead.req_ids


def _of_step(batch: InputBatch, scheduled: SchedulerOutput) -> Outline:
    req_ids = list(scheduled.num_scheduled_tokens)
    counts = scheduled.num_scheduled_tokens.values()
    states = [batch.requests[req_id] for req_id in req_ids]
    return _outline(
        batch,
        req_ids,
        _vector([batch.row_of(req_id) for req_id in req_ids]),
        _vector(list(counts)),
        _vector([state.num_computed_tokens for state in states]),
        _vector([state.num_wanted(count) for state, count in zip(states, counts, strict=True)]),
    )


def _outline(
    batch: InputBatch,
    req_ids: list[str],
    rows: IntVector,
    counts: IntVector,
    computed: IntVector,
    num_wanted: IntVector,
) -> Outline:
    query_start_loc = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    num_tokens = int(query_start_loc[-1])
    request_indices = np.repeat(rows, counts)
    positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(query_start_loc[:-1] - computed, counts)
    block_indices, block_offsets = np.divmod(positions, np.int32(batch.block_size))
    wide = request_indices.astype(np.int64)
    return Outline(
        req_ids=req_ids,
        generation=batch.generation,
        rows=rows,
        request_indices=request_indices,
        positions=positions,
        token_indices=wide * batch.token_table.shape[1] + positions,
        block_table_indices=wide * batch.block_table.shape[1] + block_indices,
        block_offsets=block_offsets,
        num_scheduled_tokens=counts,
        num_computed_tokens=computed,
        seq_lens=computed + counts,
        num_wanted=num_wanted,
        query_start_loc=query_start_loc,
    )


def _vector(numbers: Sequence[int]) -> IntVector:
    return np.array(numbers, dtype=np.int32)
