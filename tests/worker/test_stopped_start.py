"""A signal ends a worker while its engine loads the model, however long that takes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.checkpoints import make_checkpoint


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_worker_that_loads_its_model(tmp_path: Path, number: signal.Signals) -> None:
    """The engine is frozen in the middle of its start, so that it would never be ready."""
    secret_file = tmp_path / "secret"
    secret_file.write_text("a secret of the tests, of 32 or more characters")
    secret_file.chmod(0o600)
    model = make_checkpoint(tmp_path / "model")
    worker = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "cli.main", "both", "--model", str(model), "--secret-file", str(secret_file)),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        engines: list[psutil.Process] = []
        while not engines:
            await asyncio.sleep(0.05)
            children = psutil.Process(worker.pid).children()
            engines = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
        engines[0].suspend()
        worker.send_signal(number)
        assert await asyncio.wait_for(worker.wait(), 60) == 0
        assert not [one for one in engines if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    finally:
        if worker.returncode is None:
            worker.kill()
            await worker.wait()
        for pid in (one.pid for one in engines if one.is_running()):
            os.kill(pid, signal.SIGKILL)
