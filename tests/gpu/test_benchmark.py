"""The bounds that `make gpu-check` measures against, and a dry run on any machine."""

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.facts import run_facts
from benchmarks.gpu import DRY, PARTS, Run
from benchmarks.gpu_nixl import read_protocols
from benchmarks.gpu_shapes import LLAMA, LLAMA_FP8, QWEN, Ceilings, ModelShape
from benchmarks.gpu_sums import HIDDEN_SIZE
from benchmarks.kv_overlap import QUEUE_PARTS
from tests.chaos.settings import process_environment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
H200 = Ceilings(copy=4.3e12, read=4.3e12, matmul=790e12, matmul_fp8=1580e12)


def test_parameter_counts_are_those_of_the_models() -> None:
    assert (LLAMA.num_params, LLAMA.step_params, LLAMA.kv_bytes) == (8_030_261_248, 7_504_924_672, 131_072)
    assert (LLAMA.step_bytes, LLAMA_FP8.step_bytes) == (15_009_849_344, 8_030_527_488)
    assert (QWEN.num_params, QWEN.step_params, QWEN.kv_bytes) == (1_543_714_304, 1_543_714_304, 28_672)


@pytest.mark.parametrize(
    ("shape", "batch", "milliseconds"),
    [(LLAMA, 1, 3.52), (LLAMA, 64, 5.49), (LLAMA, 256, 12.86), (QWEN, 1, 0.725), (QWEN, 64, 1.155), (QWEN, 256, 2.75),
     (LLAMA_FP8, 1, 1.90), (LLAMA_FP8, 256, 10.60)],
)  # fmt: skip
def test_bounds_of_a_decode_step(shape: ModelShape, batch: int, milliseconds: float) -> None:
    """Weights once, KV of 1,024 tokens each; from 184 requests on the products cost more than the weights."""
    assert shape.decode_seconds(batch, 1024, H200) * 1e3 == pytest.approx(milliseconds, rel=2e-3)


@pytest.mark.parametrize(("shape", "milliseconds"), [(LLAMA, 300.6), (LLAMA_FP8, 155.9), (QWEN, 58.0)])
def test_bounds_of_a_prefill(shape: ModelShape, milliseconds: float) -> None:
    assert shape.prefill_seconds(8, 2048, H200) * 1e3 == pytest.approx(milliseconds, rel=2e-3)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1500)
def test_the_calls_write_every_part(tmp_path: Path) -> None:
    """All calls, hand-over included, with a tiny shape on the CPU; the last one runs again what is named."""
    for number in range(1, 6):
        environment = process_environment() | {
            "DRY_RUN": "1",
            "OUT": str(tmp_path),
            "PYTHON": sys.executable,
            "GPU_TEST_ARGS": "-k bounds",
            "FAILED": "tests/gpu/test_benchmark.py -k bounds",
            "PARTS": "chunk",
        }
        script = BENCHMARKS / f"gpu_call{number}.sh"
        result = subprocess.run(
            ["bash", str(script)], env=environment, capture_output=True, text=True, timeout=700, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr
    parts = {part: json.loads((tmp_path / f"gpu_{part}.json").read_text()) for part in PARTS}
    for figures in parts.values():
        assert figures["ceilings"]["copy"] > 0
    for part, model in (("decode", "tiny"), ("fp8", "tiny, FP8")):
        decodes = [(row["batch"], row["temperature"], row["runs_ahead"]) for row in parts[part]["rows"]]
        assert decodes == list(itertools.product((1, 3), (0.0, 0.8), (False, True)))
        assert {row["model"] for row in parts[part]["rows"]} == {model}
    assert all(
        row["share_of_bound"] > 0
        for part in ("decode", "prefill", "long", "fp8")
        for row in parts[part]["rows"]
    )
    assert [(row["num_tokens"], row["length"]) for row in parts["long"]["rows"]] == [(1, 4200), (20, 4200)]
    assert [(row["way"], row["num_bytes"], row["is_right"]) for row in parts["sums"]["rows"]] == [
        ("gloo", 4 * HIDDEN_SIZE * num_tokens, True) for num_tokens in (1, 64, 256)
    ]
    (read,) = parts["reads"]["rows"]
    assert read["is_right"], read
    (service,) = parts["service"]["rows"]
    assert service["equal_answers"] == service["answers"] == 6, service
    handovers = parts["handover"]["rows"]
    assert [row["is_converted"] for row in handovers] == [False, True]
    for row in handovers:
        assert "error" not in row and row["ttft_ms"] > 0, row
        assert row["bytes_per_request"] == row["expected_bytes"] > 0
    (streams,) = parts["streams"]["rows"]
    assert (streams["num_errors"], streams["streams"]) == (0, 4), streams
    assert streams["elapsed_seconds"] > 2 and streams.keys() >= {f"{part}_p50_ms" for part in QUEUE_PARTS}
    assert streams["answers"] >= 4 and 0 < streams["ttft_p50_ms"] <= streams["ttft_p99_ms"]
    small = [(row["batch"], row["error"], row["error_before"]) for row in parts["small_batch"]["rows"]]
    assert [batch for batch, *errors in small if max(errors) < 0.02] == list(DRY.batches)
    assert {row["way"] for row in parts["draws"]["rows"]} == {"torch"}
    assert all(row["us"] > 0 for row in parts["draws"]["rows"])
    assert [(row["launch"], row["error"] < 0.02) for row in parts["chunk"]["rows"]] == [
        ("eager", True), ("piecewise", True), ("one graph", True),
    ]  # fmt: skip
    crosses, dies = parts["pairs"]["rows"]
    assert crosses["is_right"], crosses
    assert "could not be formed" in dies["failure"] and dies["failed_after"] < 60, dies
    assert [(row["batch"], row["num_tokens"]) for row in parts["prefill"]["rows"]] == [(2, 24), (3, 8)]
    assert (tmp_path / "log").read_text().count("11 passed") == 4
    assert (tmp_path / "failures").read_text() == ""
    assert json.loads((tmp_path / "facts.json").read_text())["torch"]


def test_rows_are_written_one_by_one(tmp_path: Path) -> None:
    """A run that is killed in the middle keeps what it has measured."""
    run = Run(DRY, tmp_path, None, None, is_brief=False)
    rows = run.rows("decode")
    seen = []

    def watched() -> Iterator[dict[str, Any]]:
        for row in rows:
            seen.append(len(json.loads((tmp_path / "gpu_decode.json").read_text())["rows"]))
            yield row

    run.write_each("decode", watched())
    assert seen == list(range(8))
    assert len(json.loads((tmp_path / "gpu_decode.json").read_text())["rows"]) == 8
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_decode.json"]


_HANGING = """
import time

def test_first():
    pass

def test_second():
    time.sleep(600)
"""


@pytest.mark.slow
def test_a_part_that_takes_too_long_loses_nothing(tmp_path: Path) -> None:
    """It is interrupted, not killed: pytest writes its results so far, and the parts behind it run."""
    (tmp_path / "test_hanging.py").write_text(_HANGING)
    results = tmp_path / "tests.xml"
    script = f"""
        source benchmarks/gpu_common.sh
        part 15 hanging "$python" -m pytest -q -p no:cacheprovider -c /dev/null --junitxml {results} {tmp_path}
        part 60 next echo the next part
        exit "$failed"
    """
    # Without plugins pytest starts long before the limit, on a busy machine too.
    environment = process_environment() | {
        "OUT": str(tmp_path),
        "PYTHON": sys.executable,
        "DRY_RUN": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    ended = subprocess.run(["bash", "-c", script], cwd=BENCHMARKS.parent, env=environment, check=False)
    assert ended.returncode == 1
    log = (tmp_path / "log").read_text()
    assert "== hanging: exit status 124" in log
    assert "the next part\n== next: exit status 0" in log
    assert 'name="test_first"' in results.read_text()


def test_facts_need_no_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_facts()["commit"] == "unknown"


def test_protocols_of_reads_are_found_in_the_log() -> None:
    """Only those of reads count: small messages go over TCP on every machine."""
    log = """
[1.1] [vm:1:0]   +-----+
[1.1] [vm:1:0]   | reader self cfg#0                     |
[1.1] [vm:1:0]   | active message by ucp_am_send* from host memory |
[1.1] [vm:1:0]   | 0..inf | short | tcp/lo |
[1.1] [vm:1:0]   | reader self cfg#1 |
[1.1] [vm:1:0]   | remote memory read by ucp_get*(multi) into cuda/GPU0 memory from cuda |
[1.1] [vm:1:0]   |   Range    | Description | Config |
[1.1] [vm:1:0]   |          0 | no data fetch | |
[1.1] [vm:1:0]   |     1..inf | zero-copy | cuda_ipc/cuda |
"""
    heading = "remote memory read by ucp_get*(multi) into cuda/GPU0 memory from cuda"
    assert read_protocols(log) == {heading: ["1..inf: zero-copy: cuda_ipc/cuda"]}


def test_the_calls_fit_into_a_lease_of_45_minutes() -> None:
    """Each takes at most ten minutes, with a minute for what is installed first; each part of the benchmark has a call."""
    limits: list[list[int]] = []
    measured: set[str] = set()
    for number in range(1, 6):
        text = (BENCHMARKS / f"gpu_call{number}.sh").read_text()
        limits.append([int(found) for found in re.findall(r"(?m)^ *part (\d+) ", text)])
        measured |= {
            part for found in re.findall(r"--parts ([a-z0-9_,]+)", text) for part in found.split(",")
        }
    assert all(sum(own) <= 540 for own in limits), limits
    assert sum(map(sum, limits)) + 5 * 20 <= 45 * 60
    assert measured == set(PARTS)


def test_failures_are_the_last_lines_of_a_call(tmp_path: Path) -> None:
    """The caller sees the end of the log only, and names them for the last call."""
    (tmp_path / "test_broken.py").write_text(
        "def test_wrong():\n    assert False\n\ndef test_right():\n    pass\n"
    )
    script = f"""
        source benchmarks/gpu_common.sh
        part 60 broken "$python" -m pytest -v -ra -p no:cacheprovider -c /dev/null {tmp_path}
        part 60 next echo the next part
        finish
    """
    environment = process_environment() | {"OUT": str(tmp_path), "PYTHON": sys.executable, "DRY_RUN": ""}
    ended = subprocess.run(
        ["bash", "-c", script],
        cwd=BENCHMARKS.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    *_, heading, part, name = ended.stdout.splitlines()
    assert heading == "== failures" and part.startswith("== broken: exit status 1")
    assert name.startswith("FAILED ") and name.endswith("test_broken.py::test_wrong")
    assert (tmp_path / "failures").read_text().splitlines() == [part, name]


@pytest.mark.parametrize("name", ["gpu_common", *(f"gpu_call{number}" for number in range(1, 6))])
def test_the_device_scripts_are_valid(name: str) -> None:
    """Each part of a call has a time limit."""
    script = BENCHMARKS / f"{name}.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = [
        line.strip() for line in script.read_text().splitlines() if "bench[@]" in line or "tests[@]" in line
    ]
    assert all(line.startswith("part ") for line in lines)
    assert bool(lines) is (name != "gpu_common")
