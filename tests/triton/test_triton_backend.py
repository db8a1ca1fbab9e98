"""Our Triton kernels beside plain torch, under Triton's interpreter (`make test-triton`).

Its matrix product takes no bfloat16: that is for `make gpu-check`.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention.backend import create_backend
from engine.models.loading import load
from engine.profiling import profile_inputs
from engine.testing_graphs import RerunRecorder
from tests.attention_cases import CPU, Case, assert_equals_torch, assert_replays_are_right, run
from tests.checkpoints import make_checkpoint
from tests.graph_rig import CASE, Rig

pytestmark = [
    pytest.mark.triton,
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),  # the interpreter's own
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


@pytest.mark.parametrize("computed", [1, 255, 256, 4095, 4096, 4097])
def test_a_context_of_any_number_of_splits(computed: int) -> None:
    """One to all of them, their edges included."""
    assert_equals_torch(Case(num_kv_heads=1, work=((computed, 1),)), create_backend("triton"), CPU)


def test_a_row_does_not_depend_on_the_batch() -> None:
    together = Case(work=((300, 1), (40, 1), (0, 9)))
    alone = replace(together, work=((300, 1),))
    backend = create_backend("triton")
    inputs = together.inputs()
    batch, _ = run(together, backend.plan(inputs, together.block_size, CPU), inputs, CPU)
    own = alone.inputs()
    query, key, value = (states[:1] for states in together.states(inputs))
    step = backend.plan(own, alone.block_size, CPU)
    cache = alone.pool(own)[:, 1]
    step.store(key, value, cache)
    assert torch.equal(step.attend(alone.shape, query, key, value, cache), batch[:1])


def test_a_static_step_takes_one_batch_after_the_other() -> None:
    """Rows that are not in use store nothing, and stand in nobody's way."""
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


def test_a_model_computes_with_the_kernels(tmp_path: Path) -> None:
    """Chunks and decodes, eager and replayed, equal the model by plain torch."""
    make_checkpoint(tmp_path, "mistral", sliding_window=20)
    rig = Rig(load(tmp_path, "float32", None, CPU), create_backend("triton"))
    rig.compare(replace(CASE, work=((3, 1), (0, 9), (17, 5))))
    rig.compare(CASE)
    rig.compare(replace(CASE, work=CASE.work[:3]))
    assert rig.replays() == {8: 1, 4: 1}
