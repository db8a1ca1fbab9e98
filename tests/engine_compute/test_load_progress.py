"""The progress that is shown while weights are read."""

import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from engine.models.load_progress import LoadProgress
from engine.models.loading import load
from tests.checkpoints import make_checkpoint
from tests.clock import Clock

GIB = 2**30


def test_without_a_terminal_a_line_is_logged_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, written = Clock(), io.StringIO()
    with LoadProgress(8 * GIB, Console(file=written), clock) as progress:
        for _ in range(8):
            clock.now += 2
            progress.advance(GIB)
    assert caplog.messages == [
        "weights: 3.00 GiB of 8.00 GiB, 0.50 GiB/s",
        "weights: 6.00 GiB of 8.00 GiB, 0.50 GiB/s",
        "weights: 8.00 GiB in 16.0 s, 0.50 GiB/s",
    ]
    assert written.getvalue() == ""


def test_a_terminal_shows_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock, written = Clock(), io.StringIO()
    with LoadProgress(
        8 * GIB, Console(file=written, force_terminal=True, _environ={"TERM": "xterm"}), clock
    ) as progress:
        clock.now += 60
        progress.advance(3 * GIB)
    assert "3.0/8.0 GiB" in written.getvalue()
    assert caplog.messages == ["weights: 3.00 GiB in 60.0 s, 0.05 GiB/s"]


def test_a_supervised_process_shows_no_bar() -> None:
    """A process in the foreground has a terminal; one in a session of its own, as a worker is, has none."""
    tell = "from engine.models.load_progress import has_terminal; print(has_terminal(), file=sys.stderr)"
    again = f"subprocess.run([sys.executable, '-c', 'import sys; {tell}'], start_new_session=True)"
    start = f"import subprocess, sys; {tell}; {again}"
    done = subprocess.run(
        [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", sys.executable, "-c", start],
        check=True,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.split() == ["True", "False"]


def test_all_weights_are_counted_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model of 8 MiB in bfloat16, computed in float32: 16 MiB are counted."""
    caplog.set_level(logging.INFO)
    folder = make_checkpoint(tmp_path, dtype=torch.bfloat16, intermediate_size=2**15)
    loaded = load(folder, "float32", None, torch.device("cpu"))
    num_bytes = sum(parameter.nbytes for parameter in loaded.model.parameters())
    assert any(f"weights: {num_bytes / GIB:.2f} GiB in" in message for message in caplog.messages)
    assert num_bytes > 2**24
