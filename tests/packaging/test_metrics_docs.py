"""docs/metrics.md is made from the declared metrics."""

import subprocess
import sys
from pathlib import Path

import pytest

from serving.metric_names import ROUTER_METRICS, WORKER_METRICS
from tools.generate_metrics_docs import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_page_is_in_sync() -> None:
    command = [sys.executable, "-m", "tools.generate_metrics_docs", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_stale_or_missing_page_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "metrics.md"
    assert main(["--check"], page) == 1
    assert main([], page) == 0
    assert main(["--check"], page) == 0
    page.write_text(page.read_text().replace("Tokens delivered.", "Tokens.", 1))
    assert main(["--check"], page) == 1
    assert "run `make metrics-docs`" in capsys.readouterr().err


def test_a_row_has_name_type_labels_and_meaning(tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    main([], page)
    text = page.read_text()
    assert "| `kvbaton_workers` | gauge | `pool`, `state` | Attached workers, by role and state. |" in text
    assert "| `kvbaton_transfer_seconds` | histogram | – |" in text
    assert "| `vllm:nixl_xfer_time_seconds` | `kvbaton_transfer_seconds` |" in text
    assert all(f"| `kvbaton_{name}` |" in text for name in {**ROUTER_METRICS, **WORKER_METRICS})
