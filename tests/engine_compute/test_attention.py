"""The torch backend against attention written out as a loop over tokens."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from contract.errors import SettingError
from contract.sampling import SamplingParams
from engine.attention.backend import LayerShape, create_backend
from engine.compute.batch import InputBatch
from engine.compute.inputs import PreparedInputs, prepare_inputs
from engine.compute.profiling import profile_inputs
from engine.outputs import NewRequestData, SchedulerOutput

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_BLOCKS, MAX_LEN = 4, 4, 2, 8, 64, 40
NUM_AHEAD = 2
CPU = torch.device("cpu")
SCALE = HEAD_DIM**-0.5

SINKS = torch.tensor([1.5, -1.0, 0.3, 2.0])

rows = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=6)
windows = st.one_of(st.none(), st.integers(1, 12))


def make_inputs(work: list[tuple[int, int]]) -> PreparedInputs:
    """Return inputs for requests given as (computed tokens, scheduled tokens).

    Their blocks are scattered over the pool, and each request has some unused blocks.
    """
    free = np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS)).tolist()
    scheduled = SchedulerOutput()
    for index, (computed, count) in enumerate(work):
        length = computed + count
        blocks = [free.pop() for _ in range(-(-length // BLOCK_SIZE) + NUM_AHEAD)]
        scheduled.scheduled_new_reqs.append(
            NewRequestData(str(index), [0] * length, SamplingParams(), (blocks,), computed, length)
        )
        scheduled.num_scheduled_tokens[str(index)] = count
    batch = InputBatch(len(work), MAX_LEN, BLOCK_SIZE)
    batch.update(scheduled)
    return prepare_inputs(batch, scheduled)


def random_states(inputs: PreparedInputs) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((NUM_HEADS,), (NUM_KV_HEADS,), (NUM_KV_HEADS,))
    query, key, value = (
        torch.randn((inputs.num_tokens, *heads, HEAD_DIM), generator=generator) for heads in shapes
    )
    return query, key, value


def pool_with_garbage(inputs: PreparedInputs) -> Tensor:
    """Return random KV where tokens are computed and NaN in all other blocks except the null block."""
    generator = torch.Generator().manual_seed(2)
    cache = torch.full((NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), torch.nan)
    cache[0] = 0
    for row in range(inputs.num_reqs):
        computed = int(inputs.num_computed_tokens[row])
        for position in range(-(-computed // BLOCK_SIZE) * BLOCK_SIZE):
            block = inputs.block_table[row, position // BLOCK_SIZE]
            kept = torch.randn((2, NUM_KV_HEADS, HEAD_DIM), generator=generator)
            cache[block, :, :, position % BLOCK_SIZE] = (
                kept if position < computed else torch.zeros_like(kept)
            )
    return cache


def expected_output(inputs: PreparedInputs, query: Tensor, cache: Tensor, shape: LayerShape) -> Tensor:
    """Compute attention token by token and head by head, from a cache that already holds the step's KV."""
    output, window = torch.empty_like(query), shape.sliding_window
    for token in range(inputs.num_tokens):
        row = int(np.searchsorted(inputs.query_start_loc, token, side="right")) - 1
        position = int(inputs.positions[token])
        first = 0 if window is None else max(0, position - window + 1)
        if shape.chunk_size is not None:
            first = max(first, position // shape.chunk_size * shape.chunk_size)
        places = [
            (int(inputs.block_table[row, p // BLOCK_SIZE]), p % BLOCK_SIZE)
            for p in range(first, position + 1)
        ]
        for head in range(NUM_HEADS):
            kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
            keys = torch.stack([cache[block, 0, kv_head, offset] for block, offset in places])
            values = torch.stack([cache[block, 1, kv_head, offset] for block, offset in places])
            scores = (keys @ query[token, head]) * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if shape.sinks is not None:
                scores = torch.cat((scores, shape.sinks[head, None]))
            output[token, head] = scores.softmax(0)[: len(values)] @ values
    return output


@settings(max_examples=40, deadline=None)
@given(
    work=rows,
    window=windows,
    softcap=st.sampled_from([None, 0.3]),
    chunk_size=windows,
    sinks=st.sampled_from([None, SINKS]),
)
@example(work=[(9, 1), (14, 1), (0, 3)], window=None, softcap=None, chunk_size=None, sinks=None)
@example(work=[(9, 1), (14, 1), (0, 13)], window=None, softcap=None, chunk_size=8, sinks=SINKS)
def test_mixed_batches_equal_the_loop(
    work: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    chunk_size: int | None,
    sinks: Tensor | None,
) -> None:
    """C15: chunks and decodes in any order, grouped-query heads, windows, soft caps, sinks; stale NaN has no effect."""
    inputs, shape = make_inputs(work), LayerShape(SCALE, window, softcap, chunk_size, sinks)
    query, key, value = random_states(inputs)
    cache = pool_with_garbage(inputs)
    step = create_backend("torch").plan(inputs, BLOCK_SIZE, CPU)
    step.store(key, value, cache)
    output = step.attend(shape, query, key, value, cache)
    for token, (block, offset) in enumerate(zip(inputs.block_numbers, inputs.block_offsets, strict=True)):
        assert torch.equal(cache[block, 0, :, offset], key[token])
        assert torch.equal(cache[block, 1, :, offset], value[token])
    torch.testing.assert_close(output, expected_output(inputs, query, cache, shape), atol=1e-5, rtol=1e-4)


def test_the_rest_of_a_new_block_is_cleared() -> None:
    """Data of an earlier owner is cleared from a partly filled block; other blocks are not touched."""
    inputs = make_inputs([(0, 5)])
    _, key, value = random_states(inputs)
    cache = torch.full((NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM), 7.0)
    create_backend("torch").plan(inputs, BLOCK_SIZE, CPU).store(key, value, cache)
    first, last = inputs.block_table[0, :2].tolist()
    assert not cache[last, :, :, 1:].any()
    others = [block for block in range(NUM_BLOCKS) if block not in (first, last)]
    assert bool((cache[others] == 7.0).all())


@pytest.mark.parametrize(("window", "sinks"), [(None, None), (3, None), (None, SINKS)])
def test_without_a_cache_requests_see_their_own_tokens(window: int | None, sinks: Tensor | None) -> None:
    """D8: the profile run attends within the batch and equals a run with a cache."""
    lengths = [5, 1, 9, 1]
    query, key, value = random_states(profile_inputs(lengths))
    backend, shape = create_backend("torch"), LayerShape(SCALE, window, sinks=sinks)
    bare = backend.plan(profile_inputs(lengths), BLOCK_SIZE, CPU).attend(shape, query, key, value, None)
    cached_inputs = make_inputs([(0, length) for length in lengths])
    step, cache = backend.plan(cached_inputs, BLOCK_SIZE, CPU), pool_with_garbage(cached_inputs)
    step.store(key, value, cache)
    cached = step.attend(shape, query, key, value, cache)
    torch.testing.assert_close(bare, cached)


def test_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(
        SettingError, match="'flash' is unknown; choose one of flashinfer, hybrid, torch, triton"
    ):
        create_backend("flash")
