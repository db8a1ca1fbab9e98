"""Our Triton kernels against plain torch, under Triton's interpreter (`make test-triton`).

Its matrix product does not support bfloat16, which `make gpu-check` tests.
"""

import pytest
import torch

from engine.attention.backend import create_backend
from engine.compute.profiling import profile_inputs
from tests.attention_cases import (
    CPU,
    Case,
    assert_equals_torch,
    assert_far_blocks_are_right,
    assert_replays_are_right,
)
from tests.fakes.engine.graphs import RerunRecorder

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings(
        "ignore:Conversion of an array:DeprecationWarning"
    ),  # raised by the interpreter
]

SHAPES = {
    "llama": Case(num_heads=8, num_kv_heads=2),
    "qwen2.5-1.5b": Case(num_heads=12, num_kv_heads=2, head_dim=128),
    "qwen2.5-7b": Case(num_heads=14, num_kv_heads=2, head_dim=80),
    "one head": Case(num_heads=2, num_kv_heads=2, head_dim=96, block_size=5),
    "all heads": Case(num_heads=24, num_kv_heads=1, head_dim=16, block_size=1),
    "gemma": Case(num_heads=2, num_kv_heads=1, head_dim=256, block_size=32),
    "window": Case(window=20),
    "soft cap": Case(softcap=1.5, window=40),
    "long window": Case(window=500, block_size=8),
    "window of one": Case(window=1),
    "half": Case(dtype=torch.float16, head_dim=128),
}


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_batches_equal_torch(name: str) -> None:
    assert_equals_torch(SHAPES[name], create_backend("triton"), CPU)


@pytest.mark.parametrize("work", [((20, 1), (3, 1)), ((17, 5), (0, 9), (40, 1)), ((4096, 2),)])
def test_blocks_beyond_two_to_the_31_elements(work: tuple[tuple[int, int], ...]) -> None:
    """Offsets have 64 bits: the interpreter counts as the device does. Decodes, a mixed step, and a short chunk."""
    case = Case(head_dim=16, dtype=torch.float16, work=work)
    assert_far_blocks_are_right(case, create_backend("triton"), CPU)


def test_a_static_step_handles_one_batch_after_the_other() -> None:
    """Unused rows store nothing and do not affect others."""
    wide = Case(work=((700, 1), (9, 1), (31, 1)))
    static = create_backend("triton").plan_static(
        8, -(-wide.max_len // wide.block_size), wide.block_size, CPU
    )
    assert static is not None
    works = (wide.work, ((15, 1),), ((16, 1), (5, 1), (300, 1), (2, 1)))
    assert_replays_are_right(wide, works, static, RerunRecorder(), CPU)


def test_without_a_cache_requests_see_their_own_tokens() -> None:
    inputs, case = profile_inputs([5, 1, 9]), Case()
    states = case.states(inputs)
    output = create_backend("triton").plan(inputs, 16, CPU).attend(case.shape, *states, None)
    assert torch.equal(
        output, create_backend("torch").plan(inputs, 16, CPU).attend(case.shape, *states, None)
    )


def test_states_need_not_be_contiguous() -> None:
    """A value that is a part of a wider product is stored from its place; heads need not be adjacent either."""
    case = Case(work=((5, 1), (0, 9)))
    inputs, backend = case.inputs(), create_backend("triton")
    _, key, value = case.states(inputs)
    pools = [case.pool(inputs) for _ in range(3)]
    wide = torch.cat([torch.randn_like(key), value], dim=1)[:, key.shape[1] :]
    apart = key.transpose(0, 1).contiguous().transpose(0, 1)
    for pool, states in zip(pools, [(key, value), (key, wide), (apart, value)], strict=True):
        backend.plan(inputs, case.block_size, CPU).store(*states, pool[:, 1])
    assert not wide.is_contiguous()
    assert not apart[0].is_contiguous()
    for pool in pools[1:]:
        assert torch.equal(pool.view(torch.uint8), pools[0].view(torch.uint8))
