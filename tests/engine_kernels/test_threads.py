"""Threads that compute for long yield their cores now and then; those with little work do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from native.compiling import compiler_command

COUNTING = "int num_yields; int sched_yield(void) { return num_yields++, 0; }\n"
PROGRAM = """
import ctypes, sys, torch
from engine.kernels.binding import load_kernels
from tests.engine_kernels.test_linear import compute, packed

kernels = load_kernels()
threads = kernels.start_threads(int(sys.argv[1]))
layer = packed(kernels, threads, torch.ones(1152, 896, dtype=torch.bfloat16))
num_yields = ctypes.c_int.in_dll(ctypes.CDLL(None), "num_yields")
for num_rows in (1, 4000):
    before = num_yields.value
    compute(kernels, threads, layer, torch.ones(num_rows, 896, dtype=torch.bfloat16))
    print(num_yields.value - before)
kernels.end_threads(threads)
"""


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that replaces ``sched_yield`` and counts its calls."""
    folder = tmp_path_factory.mktemp("counter")
    (folder / "counter.c").write_text(COUNTING)
    library = folder / "counter.so"
    subprocess.run(
        [*compiler_command(), "-O2", "-shared", "-fPIC", "-o", library, folder / "counter.c"], check=True
    )
    return library


@pytest.mark.parametrize("num_threads", [1, 2])
def test_long_work_yields_the_core_to_waiting_threads(
    kernels: object, counter: Path, num_threads: int
) -> None:
    """Each of the 36 items of the long work takes longer than a thread keeps its core, on any processor."""
    environment = {**os.environ, "LD_PRELOAD": str(counter)}  # noqa: TID251 - passed on, not read
    command = [sys.executable, "-c", PROGRAM, str(num_threads)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=240)
    little, much = map(int, run.stdout.split())
    assert little <= num_threads
    assert much >= 36 - num_threads
