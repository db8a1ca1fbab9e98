"""`make gpu-check`: attention backends on CUDA against plain torch on the CPU, exact in float32, else by tolerance."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from contract.errors import SettingError
from engine.attention.backend import Needs, choose_backend, create_backend
from engine.compute.inputs import PreparedInputs
from engine.compute.recording import CudaRecorder
from tests.attention_cases import (
    Case,
    assert_close,
    assert_equals_torch,
    assert_replays_are_right,
    reference,
    run,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CUDA = torch.device("cuda", 0)
HALF = torch.bfloat16
SHAPES = {
    "llama-3.1-8b": Case(num_heads=32, num_kv_heads=8, head_dim=128),
    "qwen2.5-1.5b": Case(num_heads=12, num_kv_heads=2, head_dim=128),
    "qwen2.5-7b": Case(num_heads=28, num_kv_heads=4, head_dim=128),
    "no groups": Case(num_heads=3, num_kv_heads=3, head_dim=128, block_size=32),
    "decodes": Case(num_heads=32, num_kv_heads=8, head_dim=128, work=((4000, 1), (0, 1), (511, 1), (512, 1), (70_000, 1))),
    "short chunks": Case(num_heads=28, num_kv_heads=4, head_dim=128, work=((8000, 20), (4096, 64), (600, 1), (9, 30))),
    "long prompts": Case(num_heads=8, num_kv_heads=2, head_dim=128, work=((0, 2048), (1000, 513), (3, 1))),
}  # fmt: skip
WINDOW = Case(num_heads=32, num_kv_heads=8, head_dim=128, dtype=HALF, window=500)
NAMES = ("hybrid", "flashinfer", "triton", "torch")


def backends(dtype: str, head_dim: int, window: int | None = None) -> list[str]:
    """Return the backends that can compute it on this machine; Triton must be among them."""
    usable = []
    for name in NAMES:
        try:
            usable.append(choose_backend(name, CUDA, Needs(dtype, head_dim, windows=frozenset({window}))))
        except SettingError as error:
            logging.getLogger(__name__).warning("not tested: %s", error)
    assert "triton" in usable
    return usable


@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16_is_near_the_reference(name: str) -> None:
    for backend in backends("bfloat16", SHAPES[name].head_dim):
        assert_equals_torch(replace(SHAPES[name], dtype=HALF), create_backend(backend), CUDA)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton_supports_every_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    case = Case(num_heads=6, num_kv_heads=1, head_dim=head_dim, dtype=dtype)
    assert_equals_torch(case, create_backend("triton"), CUDA)


@pytest.mark.parametrize("name", SHAPES)
def test_float32_equals_the_reference(name: str) -> None:
    for backend in backends("float32", SHAPES[name].head_dim):
        assert_equals_torch(SHAPES[name], create_backend(backend), CUDA)


def test_triton_supports_a_window() -> None:
    for case in (WINDOW, replace(WINDOW, dtype=torch.float32), replace(WINDOW, window=1)):
        assert_equals_torch(case, create_backend("triton"), CUDA)


def test_flashinfer_supports_a_window() -> None:
    """Its modules for windows are others; without them and a compiler, a model with windows takes Triton."""
    if "flashinfer" not in backends("bfloat16", WINDOW.head_dim, WINDOW.window):
        pytest.skip("FlashInfer cannot attend with a window here")
    assert_equals_torch(WINDOW, create_backend("flashinfer"), CUDA)


@pytest.mark.parametrize("group", [1, 4, 6, 7, 8])
def test_a_replayed_graph_computes_the_newest_step(group: int) -> None:
    """Captured once for eight requests, replayed for others and for other numbers of them."""
    wide = Case(num_heads=2 * group, num_kv_heads=2, head_dim=128, dtype=HALF, work=((2000, 1), (9, 1)))
    works = (wide.work, ((15, 1),), tuple((length, 1) for length in (0, 16, 700, 1999, 3, 255, 256, 257)))
    captured = []
    for name in backends("bfloat16", 128):
        static = create_backend(name).plan_static(
            8, -(-wide.max_len // wide.block_size), wide.block_size, CUDA
        )
        if static is not None:
            assert_replays_are_right(wide, works, static, CudaRecorder(CUDA), CUDA)
            captured.append(name)
    assert "triton" in captured


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_joined_splits_have_the_results_of_single_ones(dtype: torch.dtype) -> None:
    """Bit for bit: many requests, where a program reads two splits in one loop, and the same step without a graph."""
    work = tuple((length, 1) for length in (1023, 2047, 2048, 700, 5, 255, 256, 513))
    case = Case(num_heads=12, num_kv_heads=2, head_dim=128, dtype=dtype, work=32 * work)
    inputs = case.inputs()
    backend = create_backend("triton")
    static = backend.plan_static(len(case.work), -(-case.max_len // case.block_size), case.block_size, CUDA)
    assert static is not None
    static.refill(inputs)
    output, _ = run(case, static, inputs, CUDA)
    single, _ = run(case, backend.plan(inputs, case.block_size, CUDA), inputs, CUDA)
    assert torch.equal(output, single)
    assert_close(output, reference(case, inputs)[0])


def test_a_row_does_not_depend_on_the_batch() -> None:
    """Bit for bit, with our own kernels."""
    together = Case(num_heads=8, num_kv_heads=2, head_dim=128, dtype=HALF, work=((3000, 1), (40, 1), (0, 90)))
    backend, inputs = create_backend("triton"), together.inputs()
    pool = together.pool(inputs).to(CUDA)
    query, key, value = (states.to(CUDA) for states in together.states(inputs))
    step = backend.plan(inputs, together.block_size, CUDA)
    step.store(key, value, pool[:, 1])
    batch = step.attend(together.shape, query, key, value, pool[:, 1])
    alone = replace(together, work=together.work[:1]).inputs(together.max_len)
    own = backend.plan(replace(alone, block_table=inputs.block_table[:1]), together.block_size, CUDA)
    assert torch.equal(own.attend(together.shape, query[:1], key[:1], value[:1], pool[:, 1]), batch[:1])


@pytest.mark.parametrize("num_chunks", [1, 5])
def test_steps_may_be_launched_long_before_they_run(num_chunks: int) -> None:
    """Chunks of a prompt whose outputs are not read: the host plans all of them while the device is busy with other work."""
    whole = Case(num_heads=32, num_kv_heads=8, head_dim=128, dtype=HALF, work=((0, 1280),))
    inputs = whole.inputs()
    expected, _ = reference(whole, inputs)
    query, key, value = (states.to(CUDA) for states in whole.states(inputs))
    for name in backends("bfloat16", 128):
        backend = create_backend(name)
        for _ in range(20):
            pool = whole.pool(inputs).to(CUDA)
            keep_busy()
            outputs = []
            for chunk, start, end in chunks_of(whole, inputs, num_chunks):
                step = backend.plan(chunk, whole.block_size, CUDA)
                step.store(key[start:end], value[start:end], pool[:, 1])
                own = (query[start:end], key[start:end], value[start:end])
                outputs.append(step.attend(whole.shape, *own, pool[:, 1]))
            assert_close(torch.cat(outputs).cpu(), expected)


def chunks_of(whole: Case, inputs: PreparedInputs, num_chunks: int) -> list[tuple[PreparedInputs, int, int]]:
    """Divide a step of one prompt into equal steps; return each with its first token and the one behind its last."""
    size = inputs.num_tokens // num_chunks
    found = []
    for start in range(0, inputs.num_tokens, size):
        end = start + size
        alone = replace(whole, work=((start, size),)).inputs(whole.max_len)
        own = replace(
            alone,
            block_table=inputs.block_table,
            block_numbers=inputs.block_numbers[start:end],
            slot_mapping=inputs.slot_mapping[start:end],
        )
        found.append((own, start, end))
    return found


def keep_busy() -> None:
    """Launch work of some milliseconds: what is launched behind it begins late."""
    cuda: Any = torch.cuda
    cuda._sleep(30_000_000)
