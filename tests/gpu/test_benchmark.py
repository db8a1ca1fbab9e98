"""The bounds that `make gpu-check` measures against, and a dry run on any machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_shapes import LLAMA, QWEN, Ceilings, ModelShape
from tests.chaos.settings import process_environment

H200 = Ceilings(copy=4.3e12, read=4.3e12, matmul=790e12)


def test_parameter_counts_are_those_of_the_models() -> None:
    assert (LLAMA.num_params, LLAMA.step_params, LLAMA.kv_bytes) == (8_030_261_248, 7_504_924_672, 131_072)
    assert (QWEN.num_params, QWEN.step_params, QWEN.kv_bytes) == (1_543_714_304, 1_543_714_304, 28_672)


@pytest.mark.parametrize(
    ("shape", "batch", "milliseconds"),
    [(LLAMA, 1, 3.52), (LLAMA, 64, 5.49), (LLAMA, 256, 12.86), (QWEN, 1, 0.725), (QWEN, 64, 1.155), (QWEN, 256, 2.75)],
)  # fmt: skip
def test_bounds_of_a_decode_step(shape: ModelShape, batch: int, milliseconds: float) -> None:
    """Weights once, KV of 1,024 tokens each; from 184 requests on the products cost more than the weights."""
    assert shape.decode_seconds(batch, 1024, H200) * 1e3 == pytest.approx(milliseconds, rel=2e-3)


@pytest.mark.parametrize(("shape", "milliseconds"), [(LLAMA, 300.6), (QWEN, 58.0)])
def test_bounds_of_a_prefill(shape: ModelShape, milliseconds: float) -> None:
    assert shape.prefill_seconds(8, 2048, H200) * 1e3 == pytest.approx(milliseconds, rel=2e-3)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_dry_run_writes_every_part(tmp_path: Path) -> None:
    """The whole run, hand-over included, with a tiny shape on the CPU."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path)]
    result = subprocess.run(
        command, env=process_environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    parts = {
        part: json.loads((tmp_path / f"gpu_{part}.json").read_text())
        for part in ("decode", "prefill", "handover")
    }
    for figures in parts.values():
        assert figures["ceilings"]["copy"] > 0
    decodes = [(row["batch"], row["temperature"]) for row in parts["decode"]["rows"]]
    assert decodes == [(1, 0.0), (1, 0.8), (3, 0.0), (3, 0.8)]
    assert all(row["share_of_bound"] > 0 for part in ("decode", "prefill") for row in parts[part]["rows"])
    (handover,) = parts["handover"]["rows"]
    assert "error" not in handover, handover
    assert handover["ttft_ms"] > 0


@pytest.mark.parametrize("name", ["gpu_common", "gpu_call1", "gpu_call2", "gpu_call3"])
def test_the_device_scripts_are_valid(name: str) -> None:
    """Each part of a call has a time limit."""
    script = Path(__file__).parents[2] / "benchmarks" / f"{name}.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = [line for line in script.read_text().splitlines() if "python3 -m" in line]
    known = ("part ", "python3 -m pip", "python3 -m zipfile")
    assert all(line.strip().startswith(known) for line in lines)
