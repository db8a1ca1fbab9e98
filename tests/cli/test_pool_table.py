"""The table of workers that ``kvbaton top`` and ``kvbaton workers`` draw."""

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from cli.pool_table import pool_view


def row_of(name: str, text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.split()


def figures(name: str, role: str, **given: Any) -> dict[str, Any]:
    names = (
        *("num_running", "num_waiting", "queued_prompt_tokens", "kv_cache_usage", "prefix_hit_rate"),
        *("num_leases", "num_fetches", "ttft_seconds", "itl_seconds", "step_seconds", "build"),
    )
    own = {"id": name, "role": role, "state": "serving", "num_legs": 3, "max_requests": 256}
    return {**dict.fromkeys(names), **own, **given}


def drawn(width: int, *workers: dict[str, Any], **more: Any) -> list[str]:
    console = Console(file=StringIO(), width=width, highlight=False)
    head: dict[str, Any] = {
        "version": "1.2.3",
        "model": None,
        "num_requests_waiting": 0,
        "num_requests_running": 0,
        "routers": [],
    }
    console.print(pool_view({**head, **more, "workers": list(workers)}, console))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_figure_is_cut_off_in_a_narrow_terminal(width: int) -> None:
    """The least important columns are left out instead, and the heading continues on another line."""
    busy = figures(
        "decode-0",
        "decode",
        num_running=12,
        kv_cache_usage=0.961,
        itl_seconds=0.0123,
        queued_prompt_tokens=123456,
    )
    lines = drawn(width, figures("prefill-0", "prefill", ttft_seconds=1.25), busy)
    assert all("…" not in line and len(line) <= width for line in lines)
    assert "1 prefill + 1 decode" in " ".join(line.strip() for line in lines)
    assert "decode-0" in "".join(lines) and "serving" in "".join(lines)
    if width >= 100:
        assert {"3/256", "12", "96"} <= set(row_of("decode-0", "\n".join(lines)))
        assert "1.2 s" in "\n".join(lines) and "12 ms" in "\n".join(lines)


def test_control_characters_of_a_worker_are_not_printed() -> None:
    assert "\x1b" not in "".join(drawn(120, figures("w", "both", build="\x1b[31mred")))


@pytest.mark.parametrize(
    ("known", "shown"),
    [({"gpu_used_bytes": 61 * 2**30, "gpu_bytes": 80 * 2**30}, "61/80"), ({}, "–"), ({"gpu_bytes": 1}, "–")],
)
def test_the_memory_of_a_workers_gpus_is_a_column(known: dict[str, int], shown: str) -> None:
    """A worker of an earlier release reports none."""
    titles, *rows = [
        line for line in drawn(250, figures("w", "both", **known)) if "GPU GiB" in line or "w " in line
    ]
    at = titles.index("GPU GiB")
    assert rows[-1][at : at + len("GPU GiB")].strip() == shown
