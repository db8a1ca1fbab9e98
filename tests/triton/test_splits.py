"""Long contexts in splits, under Triton's interpreter: decodes, and short chunks with packed heads."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention import triton_sizes
from engine.attention.backend import StaticDecode, create_backend
from engine.attention.splits import RUN_FIELDS, UNIT_FIELDS, splits_needed
from engine.attention.splits import SHORT_DECODE_SPLIT as SPLIT
from engine.attention.triton_backend import TritonBackend
from engine.attention.triton_sizes import num_multiprocessors, splits_joined
from engine.compute.forward_graphs import capture_sizes
from engine.compute.inputs import PreparedInputs
from tests.attention_cases import CPU, Case, assert_close, assert_equals_torch, reference, run

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning"
    ),  # raised by the interpreter
]

SMALL = Case(num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16, block_size=64)
CHUNKS = {
    "a question in a chat": Case(work=((4096, 20), (9, 1), (0, 33), (600, 1)), dtype=torch.float16),
    "float32": Case(work=((4500, 3),), num_kv_heads=1),
    "units that divide a token": Case(num_heads=7, num_kv_heads=1, work=((4100, 20),), dtype=torch.float16),
    "window": Case(window=3000, work=((5000, 64),), dtype=torch.float16),
    "window of one split": Case(window=50, softcap=1.5, work=((4200, 7),), dtype=torch.float16),
}


@pytest.mark.parametrize("length", [1, 255, 256, 257, 2048, 2049, 4097, 8192, 8193])
def test_decodes_of_any_length(length: int) -> None:
    """Up to 2,048 tokens, splits have 256 tokens; longer contexts have splits of 512. 8 and 16 are combined at once."""
    assert_equals_torch(replace(SMALL, work=((length - 1, 1),)), create_backend("triton"), CPU)


@pytest.mark.slow
def test_a_context_with_longer_splits() -> None:
    assert_equals_torch(replace(SMALL, work=((66_000, 1),)), create_backend("triton"), CPU)


@pytest.mark.parametrize("name", CHUNKS)
def test_short_chunks_on_long_contexts(name: str) -> None:
    assert_equals_torch(CHUNKS[name], create_backend("triton"), CPU)


@pytest.mark.parametrize("work", [(700, 1), (4096, 5)])
@pytest.mark.parametrize("window", [None, 600])
def test_a_row_is_equal_alone_and_in_a_batch(work: tuple[int, int], window: int | None) -> None:
    """Bit for bit, whatever the other rows are and however many programs share the work."""
    together = replace(SMALL, window=window, num_heads=4, num_kv_heads=2, work=(work, (1500, 1), (4200, 9)))
    inputs = together.inputs()
    backend = create_backend("triton")
    query, key, value = together.states(inputs)
    pool = together.pool(inputs)
    step = backend.plan(inputs, together.block_size, CPU)
    step.store(key, value, pool[:, 1])
    batch = step.attend(together.shape, query, key, value, pool[:, 1])
    assert_close(batch, reference(together, inputs)[0])
    alone = replace(replace(together, work=(work,)).inputs(together.max_len), block_table=inputs.block_table)
    own = slice(0, work[1])
    step = backend.plan(alone, together.block_size, CPU)
    assert torch.equal(step.attend(together.shape, query[own], key[own], value[own], pool[:, 1]), batch[own])


def test_steps_with_many_partial_results_take_several_passes() -> None:
    """The memory of partial results is bounded, and the rows do not change."""
    case = replace(SMALL, work=((1500, 1), (4096, 40), (600, 1), (3, 1), (5000, 2)))
    inputs = case.inputs()
    limit = 3 * 4 * 64 * 17
    whole = TritonBackend(pass_bytes=100 * limit)
    expected, _ = run(case, whole.plan(inputs, case.block_size, CPU), inputs, CPU)
    divided = TritonBackend(pass_bytes=limit)
    step = divided.plan(inputs, case.block_size, CPU)
    output, _ = run(case, step, inputs, CPU)
    assert torch.equal(output, expected)
    assert_close(output, reference(case, inputs)[0])
    assert (divided.workspace_bytes, whole.workspace_bytes) == (limit, 100 * limit)


def test_a_replayed_step_reads_the_splits_of_the_newest_lengths() -> None:
    """The list of splits changes when a row begins another one, and is kept when none does; rows equal eager ones."""
    case = replace(SMALL, num_heads=4, num_kv_heads=2)
    works = [
        ((SPLIT - 2, 1), (2 * SPLIT - 1, 1)),
        ((SPLIT - 1, 1), (2 * SPLIT, 1)),
        ((SPLIT, 1), (2 * SPLIT + 1, 1)),
        ((3, 1),),
        ((3 * SPLIT - 1, 1), (0, 1)),
    ]
    longest = replace(case, work=((3 * SPLIT - 1, 1), (2 * SPLIT + 1, 1)))
    backend = TritonBackend()
    static = backend.plan_static(4, -(-longest.max_len // case.block_size), case.block_size, CPU)
    for work in works:
        own = replace(case, work=work)
        inputs = own.inputs(longest.max_len)
        states = [
            torch.cat([part, part.new_zeros(4 - len(part), *part.shape[1:])]) for part in own.states(inputs)
        ]
        pool = own.pool(inputs)
        static.refill(inputs)
        static.store(states[1], states[2], pool[:, 1])
        output = static.attend(case.shape, states[0], states[1], states[2], pool[:, 1])
        eager, eager_pool = run(own, backend.plan(inputs, case.block_size, CPU), inputs, CPU)
        assert torch.equal(output[: inputs.num_reqs], eager)
        assert torch.equal(pool.view(torch.uint8), eager_pool.view(torch.uint8))


def replayed(case: Case, static: StaticDecode, num_rows: int, inputs: PreparedInputs) -> Tensor:
    """Load a step and attend, as a graph of ``num_rows`` rows that is replayed; its kernels read what was loaded."""
    states = [
        torch.cat([part, part.new_zeros(num_rows - len(part), *part.shape[1:])])
        for part in case.states(inputs)
    ]
    pool = case.pool(inputs)
    assert static.refill(inputs)
    static.store(states[1], states[2], pool[:, 1])
    return static.attend(case.shape, states[0], states[1], states[2], pool[:, 1])[: inputs.num_reqs]


def test_static_steps_of_all_sizes_share_tables_and_lists() -> None:
    """Bytes of the largest alone; each replay reads its own step, although another size has overwritten its list since."""
    case = replace(SMALL, num_heads=4, num_kv_heads=2)
    works = {
        4: ((SPLIT - 2, 1), (2 * SPLIT, 1), (9, 1), (3 * SPLIT, 1)),
        2: ((3 * SPLIT, 1), (5, 1)),
        1: ((2 * SPLIT, 1),),
    }
    longest = max(replace(case, work=work).max_len for work in works.values())
    max_blocks = -(-longest // case.block_size)
    backend = TritonBackend()
    steps = {size: backend.plan_static(size, max_blocks, case.block_size, CPU) for size in works}
    table_bytes = 4 * 4 * max_blocks
    assert backend.static_bytes == table_bytes
    for size in (4, 2, 1, 4, 1, 4, 4, 2):
        own = replace(case, work=works[size])
        inputs = own.inputs(longest)
        output = replayed(own, steps[size], size, inputs)
        eager, _ = run(own, backend.plan(inputs, case.block_size, CPU), inputs, CPU)
        assert torch.equal(output, eager)
    list_bytes = 4 * (4 * splits_needed(max_blocks * case.block_size) * RUN_FIELDS + 4 * UNIT_FIELDS + 1)
    assert backend.static_bytes == table_bytes + list_bytes


def test_tables_of_all_graphs_take_34_megabytes() -> None:
    """1,024 requests of 131,072 tokens: a table for each graph would take 2.4 GB with the lists."""
    backend, device = TritonBackend(), torch.device("meta")
    for size in reversed(capture_sizes(1024)):
        backend.plan_static(size, 131_072 // 16, 16, device)
    assert backend.static_bytes == 4 * 1024 * 8192 < 34e6


def test_results_of_a_graph_are_bounded() -> None:
    """A step with more splits than fit is not loaded; the next one that fits is."""
    case = replace(SMALL, num_heads=4, num_kv_heads=2)
    short, long = ((40, 1), (2 * SPLIT - 1, 1)), ((3 * SPLIT - 1, 1), (3 * SPLIT - 1, 1))
    longest = replace(case, work=long).max_len
    item_bytes = 4 * 2 * 2 * 17
    backend = TritonBackend(pass_bytes=4 * item_bytes, graph_bytes=4 * item_bytes)
    static = backend.plan_static(2, -(-longest // case.block_size), case.block_size, CPU)
    for work in (short, long, short):
        own = replace(case, work=work)
        inputs = own.inputs(longest)
        if work is long:
            assert not static.refill(inputs)
            continue
        eager, _ = run(own, backend.plan(inputs, case.block_size, CPU), inputs, CPU)
        assert torch.equal(replayed(own, static, 2, inputs), eager)
    assert backend.workspace_bytes == 4 * item_bytes


@pytest.mark.parametrize(
    ("window", "dtype", "most"),
    [(None, torch.float16, 2), (600, torch.float16, 2), (None, torch.float32, 2), (None, torch.float16, 3)],
)
def test_joined_splits_have_the_results_of_single_ones(
    window: int | None, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, where a program reads some splits in one loop: an odd number of them, a whole one, and longer ones."""
    monkeypatch.setattr(triton_sizes, "JOINED_SPLITS", most)
    case = replace(
        SMALL,
        num_heads=4,
        num_kv_heads=2,
        window=window,
        dtype=dtype,
        work=((2300, 1), (2 * SPLIT + 30, 1), (2 * SPLIT - 1, 1), (5, 1)),
    )
    inputs = case.inputs()
    assert splits_joined(4 * case.num_kv_heads, 4 * num_multiprocessors(CPU)) == most
    static = TritonBackend().plan_static(4, -(-case.max_len // case.block_size), case.block_size, CPU)
    static.refill(inputs)
    output, _ = run(case, static, inputs, CPU)
    single, _ = run(case, TritonBackend().plan(inputs, case.block_size, CPU), inputs, CPU)
    assert torch.equal(output, single)
    assert_close(output, reference(case, inputs)[0])


@pytest.mark.parametrize(
    ("num_units", "num_programs", "expected"),
    [(128, 528, 1), (263, 528, 1), (264, 528, 2), (2048, 528, 2), (1, 1, 2)],
)
def test_splits_are_joined_where_runs_of_them_occupy_all_programs(
    num_units: int, num_programs: int, expected: int
) -> None:
    assert splits_joined(num_units, num_programs) == expected
