"""The tables of ``docs/performance.md`` are those of the committed results."""

import json
from pathlib import Path

from benchmarks import gpu_tables

PAGE = "# Page\n\n<!-- h100 -->\nold\n<!-- end of h100 -->\n\nbehind\n"


def test_the_page_has_the_tables_of_the_results() -> None:
    assert gpu_tables.main(["--check"]) == 0


def test_results_of_a_call_are_taken_with_their_commit(tmp_path: Path) -> None:
    call = tmp_path / "call"
    results = tmp_path / "results"
    page = tmp_path / "page.md"
    for folder in (call, results):
        folder.mkdir()
    page.write_text(PAGE)
    rows = [_step("triton", 1, 7.5), _step("flashinfer", 1, 8.0), _step("triton", 64, 10.25)]
    ceilings = {"copy": 3e12, "read": 3e12, "matmul": 7e14, "matmul_fp8": None}
    found = {"date": "2026-11-27", "commit": "unknown", "ceilings": ceilings, "rows": rows}
    (call / "gpu_decode.json").write_text(json.dumps(found))
    assert gpu_tables.main(["--check"], page, results) == 1
    assert gpu_tables.main(["--take", str(call), "abc123"], page, results) == 0
    text = page.read_text()
    assert text.startswith("# Page\n") and text.endswith("\nbehind\n") and "\nold\n" not in text
    assert "`decode`, 2026-11-27, commit abc123; bounds by a copy of 3.00 TB/s" in text
    assert "| tiny, greedy, runs ahead | 1 | 8.00, 50 % | 7.50, 50 % |" in text
    assert "| tiny, greedy, runs ahead | 64 |  | 10.25, 50 % |" in text
    assert "`prefill`: not measured." in text
    assert "samples_ms" not in (results / "gpu_h100_decode.json").read_text()
    assert gpu_tables.main(["--check"], page, results) == 0


def _step(backend: str, batch: int, ms: float) -> dict[str, object]:
    return {
        "model": "tiny", "backend": backend, "graphs": True, "temperature": 0.0, "runs_ahead": True, "batch": batch,
        "num_tokens": 1, "ms": ms, "share_of_bound": 0.5, "samples_ms": [ms],
    }  # fmt: skip
