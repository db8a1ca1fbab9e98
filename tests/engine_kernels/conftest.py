"""The compiled kernels, and checkpoints that they can compute."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.binding import Kernels, load_kernels
from tests.checkpoints import make_checkpoint

MakeCheckpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    """The compiled library. It must load on every processor that has the instructions."""
    processor = Path("/proc/cpuinfo")
    if not processor.exists() or "avx512_bf16" not in processor.read_text():
        pytest.skip("this processor has no avx512_bf16")
    loaded = load_kernels()
    assert loaded is not None, "the kernels do not compile on this machine"
    return loaded


@pytest.fixture
def threads(kernels: Kernels) -> Iterator[int]:
    """More threads than a small piece of work needs."""
    pool = kernels.start_threads(3)
    yield pool
    kernels.end_threads(pool)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> MakeCheckpoint:
    """Writes a small bfloat16 checkpoint with head_dim 32 of a family; equal arguments give the same checkpoint."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        name = repr((family, sorted(overrides.items())))
        if name not in made:
            folder = tmp_path_factory.mktemp(family)
            made[name] = make_checkpoint(
                folder, family, dtype=torch.bfloat16, **{"head_dim": 32, **overrides}
            )
        return made[name]

    return make
