"""Tests replace code in the listed files only, and not more often than listed.

A replaced function proves nothing about the code that runs. What is listed replaces a device that is not here (GPU, RDMA),
a clock or a constant of time, or counts the calls of a function that still runs. The list may only get shorter: a new test
takes a public fake or a real service.
"""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
_PATCHES = ("setattr", "setitem")
ALLOWED = {
    "benchmarks/test_figures.py": 1,
    "conftest.py": 1,
    "engine_compute/test_graphs.py": 4,
    "engine_compute/test_kv_memory.py": 4,
    "engine_compute/test_runner.py": 3,
    "engine_compute/test_running_ahead.py": 2,
    "engine_grammar/test_memory.py": 1,
    "engine_parallel/test_ranks_handover.py": 1,
    "engine_parallel/test_ranks_run_ahead.py": 4,
    "engine_parallel/test_symmetric.py": 1,
    "engine_scheduling/test_clients.py": 1,
    "engine_scheduling/test_next_step.py": 5,
    "engine_scheduling/test_grammars.py": 1,
    "engine_scheduling/test_mailbox.py": 1,
    "gpu/test_modules.py": 1,
    "kept_templates.py": 1,
    "kv_transfer/test_asked_together.py": 1,
    "kv_transfer/test_auto.py": 3,
    "kv_transfer/test_device_copies.py": 2,
    "kv_transfer/test_device_pools.py": 4,
    "kv_transfer/test_digests.py": 1,
    "kv_transfer/test_flat_pools.py": 1,
    "kv_transfer/test_measured_probe.py": 2,
    "kv_transfer/test_nixl_engines.py": 2,
    "kv_transfer/test_shm_folder.py": 2,
    "kv_transfer/test_whole_allocations.py": 1,
    "launch/test_supervisor.py": 1,
    "protocol/test_routers.py": 1,
    "protocol/test_shared_hand_over.py": 1,
    "router/test_bodies.py": 3,
    "router/test_bursts.py": 2,
    "router/test_move_preparation.py": 2,
    "router/test_moving_failures.py": 2,
    "router/test_order_stream.py": 2,
    "router/test_reservations.py": 1,
    "triton/test_flashinfer_plans.py": 2,
    "triton/test_fold.py": 1,
    "triton/test_fused_decoder.py": 2,
    "triton/test_splits.py": 1,
    "worker/test_niceness.py": 4,
    "worker/test_several_routers.py": 3,
}


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file, which two tests walk."""
    return ast.parse(path.read_text())


def patches_in(path: Path) -> int:
    """Return the number of calls of ``monkeypatch`` that replace code; changed variables and folders do not count."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _PATCHES
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in ("monkeypatch", "patch", "patched")
        for node in ast.walk(parsed(path))
    )


def test_code_is_replaced_only_where_it_is_listed() -> None:
    found = Counter({path.relative_to(TESTS).as_posix(): patches_in(path) for path in TESTS.rglob("*.py")})
    assert +found == Counter(ALLOWED)


def test_no_test_uses_mock() -> None:
    """Its objects accept every call, so a test passes after the real one has changed."""
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not any(name == "mock" or name.startswith("unittest.mock") for name in names), path


def test_a_replaced_function_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(
        'def test(monkeypatch):\n    monkeypatch.setattr("a.b", 1)\n    monkeypatch.setenv("A", "1")\n'
    )
    assert patches_in(path) == 1
