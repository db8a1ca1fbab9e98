"""Derive the inputs of a forward pass from the scheduler's decision.

Two tables persist between steps and hold one row per request: the token table and the block table. A step's vectors are
gathered from them with integer arithmetic; nothing here touches a device. If every request continues by one token, all but
the tables' contents can be prepared one step ahead (``outline_next``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from contract.state_layout import NO_SLOT
from engine.compute.batch import InputBatch
from engine.models.recurrent_layers import StateKey, StateStep
from engine.outputs import SchedulerOutput

IntVector = NDArray[np.int32]
IndexVector = NDArray[np.int64]


@dataclass(frozen=True)
class Outline:
    """The tokens that a step computes, and the places of them and their KV in the tables.

    generation: that of the batch. rows ``[num_reqs]``: rows of the tables.
    Token level, ``[num_tokens]``: request_indices (row of the tables), positions (within the sequence), token_indices
    (into the flat token table), block_table_indices (into the flat block table), block_offsets.
    Request level, ``[num_reqs]``: num_scheduled_tokens, num_computed_tokens, seq_lens (their sum), num_wanted (the
    number of last tokens whose final states are read; the others may be arbitrary), and query_start_loc ``[num_reqs + 1]``.
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
        """The number of requests in the batch."""
        return len(self.req_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all requests."""
        return int(self.query_start_loc[-1])

    @property
    def max_query_len(self) -> int:
        """The largest number of tokens of one request."""
        return int(self.num_scheduled_tokens.max())


@dataclass(frozen=True)
class GroupTables:
    """The blocks of a step's tokens and requests in one group of layers; see PreparedInputs for the tensors."""

    layers: tuple[int, ...]
    block_numbers: IntVector
    slot_mapping: IndexVector
    block_table: IntVector


@dataclass(frozen=True)
class PreparedInputs(Outline):
    """The inputs and attention metadata of one step: its outline and the tables' contents.

    Token level: input_ids, block_numbers, slot_mapping (block number × block size + offset: the slot of the token's KV).
    Request level: block_table ``[num_reqs, blocks of the longest sequence]`` (zero padded; zero where no token of the step
    sees a block). others: the same of the layers that have tables of their own: those of other groups than the first.
    fed: int64 ``[num_reqs]``, the tokens of a step that runs ahead, on the device. Its ``input_ids`` are not known yet.
    state_slots, states, drafted: see StateStep; empty, and None, without slots.
    """

    input_ids: IntVector
    block_numbers: IntVector
    slot_mapping: IndexVector
    block_table: IntVector
    others: tuple[GroupTables, ...] = ()
    fed: Tensor | None = None
    state_slots: Sequence[int] = ()
    states: Mapping[StateKey, Tensor] | None = None
    drafted: Sequence[int] = ()

    @cached_property
    def state_step(self) -> StateStep:
        """The step as recurrent layers see it."""
        slots = self.state_slots or [NO_SLOT] * self.num_reqs
        starts = self.num_computed_tokens.tolist()
        return StateStep(slots, starts, self.num_scheduled_tokens.tolist(), self.states, self.drafted)

    def of_group(self, tables: GroupTables) -> "PreparedInputs":
        """Return the inputs of the layers of one of ``others``."""
        return replace(
            self,
            block_numbers=tables.block_numbers,
            slot_mapping=tables.slot_mapping,
            block_table=tables.block_table,
            others=(),
        )


def prepare_inputs(
    batch: InputBatch, scheduled: SchedulerOutput, ahead: Outline | None = None
) -> PreparedInputs:
    """Prepare the vectors of one step, requests in the order of ``num_scheduled_tokens``.

    ``batch`` must have been updated with the same ``scheduled``. ahead: an outline that may be this step's.
    """
    counts = scheduled.num_scheduled_tokens
    drafts = scheduled.scheduled_spec_decode_tokens
    # An outline that was made ahead holds if the same requests continue by one token each, in the same rows.
    is_decode = scheduled.total_num_scheduled_tokens == len(counts)
    is_next = ahead is not None and ahead.generation == batch.generation and is_decode
    req_ids = list(counts)
    if ahead and is_next and req_ids == ahead.req_ids:
        outline = ahead
    else:
        states = [batch.requests[req_id] for req_id in req_ids]
        outline = _outline(
            batch,
            req_ids,
            _vector([batch.row_of(req_id) for req_id in req_ids]),
            _vector(list(counts.values())),
            _vector([state.num_computed_tokens for state in states]),
            _vector([one.num_wanted(counts[one.req_id], len(drafts.get(one.req_id, ()))) for one in states]),
        )
    num_used = -(-int(outline.seq_lens.max(initial=1)) // batch.block_size)
    first, *others = [_tables_of(batch, outline, num_used, index) for index in range(len(batch.block_tables))]
    slots = batch.tables.of_states
    return PreparedInputs(
        **vars(outline),
        input_ids=batch.token_table.ravel()[outline.token_indices],
        block_numbers=first.block_numbers,
        slot_mapping=first.slot_mapping,
        block_table=first.block_table,
        others=tuple(others),
        state_slots=[] if slots is None else slots[outline.rows, 0].tolist(),
        drafted=[place for place, key in enumerate(req_ids) if key in drafts] if slots is not None else (),
    )


def _tables_of(batch: InputBatch, outline: Outline, num_used: int, index: int) -> GroupTables:
    """Return the tables of a group, without blocks that no token of the step sees: they may be another request's by now."""
    group = None if batch.cache is None else batch.cache.groups[index]
    block_numbers = batch.block_tables[index].ravel()[outline.block_table_indices]
    block_table = np.take(batch.block_tables[index][:, :num_used], outline.rows, axis=0)
    if group is not None and group.window is not None:
        num_passed = np.maximum(outline.num_computed_tokens - (group.window - 1), 0) // batch.block_size
        block_table[np.arange(num_used) < num_passed[:, None]] = 0
    return GroupTables(
        layers=() if group is None else group.layers,
        block_numbers=block_numbers,
        slot_mapping=block_numbers.astype(np.int64) * batch.block_size + outline.block_offsets,
        block_table=block_table,
    )


def outline_next(batch: InputBatch, step: Outline) -> Outline:
    """Return the outline of the next step if exactly this step's requests continue by one token each."""
    if len(step.positions) > len(step.req_ids):
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
