"""A worker's setting ``engine``: which client it starts, and where that runs the engine."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.errors import SettingError
from contract.identity import Role
from contract.requests import EngineRequest
from contract.sampling import SamplingParams
from launch.arguments import parse
from launch.machine_settings import UpSettings
from launch.processes import local_processes
from launch.service_settings import BothCommand
from roles.table import ROLES, STAGES
from tests.checkpoints import make_checkpoint
from tests.private_files import write_private
from worker.service import running_worker
from worker.settings import WorkerSettings


async def pid_and_tokens(folder: Path, model: Path, **settings: Any) -> tuple[int, list[int]]:
    """Return the process of a worker's engine, and the answer to one request."""
    secret_file = folder / "secret"
    write_private(secret_file, "a secret of the tests, of 32 or more characters")
    options = WorkerSettings(
        model=model, secret_file=secret_file, kv_cache_bytes=2**24, router="127.0.0.1:1", **settings
    )
    sampling = SamplingParams(temperature=0.8, seed=5, max_tokens=8)
    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3, 4], sampling=sampling)
    async with running_worker(Role.AGGREGATED, ROLES, STAGES, options) as (worker, _):
        pid = await worker.engine.call("pid")
        assert psutil.pid_exists(pid)
        outputs = [output async for output in worker.engine.generate(request)]
    assert pid == os.getpid() or not psutil.pid_exists(pid)
    return pid, [token for output in outputs for token in output.token_ids]


async def test_a_worker_runs_its_engine_where_it_is_set(tmp_path: Path) -> None:
    """A5, A40: in a process of its own, or in the worker's; with the same tokens."""
    model = make_checkpoint(tmp_path / "model")
    apart, wanted = await pid_and_tokens(tmp_path, model)
    here, found = await pid_and_tokens(tmp_path, model, engine="in-process")
    assert apart != os.getpid() == here
    assert found == wanted and len(found) == 8


def test_the_default_is_a_process_of_its_own(tmp_path: Path) -> None:
    """A40: the flag reaches the workers of ``up``."""
    assert WorkerSettings(model=tmp_path).engine == "process"
    up = parse(UpSettings, "kvbaton up", ["--engine", "in-process"])
    _, prefill, decode = local_processes(up, tmp_path, tmp_path / "secret")
    for spec in (prefill, decode):
        command = spec.command({"router": {"internal": "127.0.0.1:1"}})
        assert command[command.index("--engine") + 1] == "in-process"
    assert (
        parse(BothCommand, "kvbaton both", ["--model", "demo", "--engine", "in-process"]).engine
        == "in-process"
    )
    with pytest.raises(SettingError, match=r"engine is 'thread'.*process.*in-process"):
        parse(UpSettings, "kvbaton up", ["--engine", "thread"])


@pytest.mark.parametrize("command", ["up", "both"])
def test_a_group_needs_engines_that_can_be_ended(command: str) -> None:
    settings_class = UpSettings if command == "up" else BothCommand
    arguments = ["--model", "demo", "--engine", "in-process", "--data-parallel-size", "2"]
    with pytest.raises(
        SettingError, match=r"engine is 'in-process' and data_parallel_size is 2: .* set engine to 'process'"
    ):
        parse(settings_class, f"kvbaton {command}", arguments)
