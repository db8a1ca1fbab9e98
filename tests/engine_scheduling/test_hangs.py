"""An engine whose process is stopped, or one of whose threads hangs, ends for good and for a reason; a slow one does not."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from contract.errors import UnavailableError
from contract.layout import Side
from engine.client import ProcessClient
from engine.connecting import Transfers
from engine.connector import ConnectorPair, SingleRankConnector
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings
from roles.table import STAGES
from tests.engine_scheduling.stepping import fake_request, fake_settings
from tests.engine_scheduling.test_clients import answer_of
from tests.fakes.engine.fakes import FakeExecutor, fake_answer
from tests.fakes.engine.transfer import FakeConnector, fake_connector_factory

HANG_TOKEN, COMPUTE_TOKEN = 17, 18
COMPUTING_SECONDS = 0.8
QUICK = {"peer_timeout_seconds": 0.6, "step_timeout_seconds": 0.6}
pytestmark = pytest.mark.timeout(120)


class HangingExecutor(FakeExecutor):
    """Blocks for ever at a prompt that begins with HANG_TOKEN, computes for long at one with COMPUTE_TOKEN."""

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        first = [new.prompt_token_ids[0] for new in scheduled.scheduled_new_reqs]
        if HANG_TOKEN in first:
            threading.Event().wait()
        if COMPUTE_TOKEN in first:
            begun = time.thread_time()
            while time.thread_time() - begun < COMPUTING_SECONDS:
                pass
        return super().execute_model(scheduled)


def start_hanging(settings: EngineSettings) -> tuple[FakeExecutor, int]:
    executor = HangingExecutor(settings)
    return executor, executor.memory.num_blocks


class StuckConnector(FakeConnector):
    """One of its threads never gets anything done."""

    def progress(self) -> dict[str, int]:
        return {"thread that publishes KV": 3}


def stuck_factory(side: Side, fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
    connector = StuckConnector(wake)
    ranks = SingleRankConnector(connector.rank)
    return ConnectorPair(connector, ranks, "127.0.0.1:9", progress=connector.progress)


@asynccontextmanager
async def hanging(factory: Any = fake_connector_factory, **changes: float) -> AsyncIterator[ProcessClient]:
    settings = fake_settings(**{**QUICK, **changes})
    client = await ProcessClient.start(settings, Transfers(factory, STAGES), start=start_hanging)
    try:
        yield client
    finally:
        await client.shutdown()


async def test_a_stopped_engine_is_killed_idle_or_not() -> None:
    """P4: SIGSTOP of the engine process alone; its requests end, and it cannot wake up again."""
    async with hanging(step_timeout_seconds=60.0) as client:
        pid = await client.call("pid")
        assert client.complaint is None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="has not run for"):
            await client.call("pid")
        await client.died.wait()
        assert "died" in str(client.complaint)
        assert not psutil.pid_exists(pid)


async def test_a_step_that_hangs_ends_the_engine() -> None:
    """P4: the process runs, and a thread of it answers; but no step ends."""
    async with hanging() as client:
        _, last = await answer_of(client, fake_request("r", [HANG_TOKEN, 1]))
        assert last.error_message is not None
        assert "its step loop has made no progress" in last.error_message
        await client.died.wait()


async def test_a_thread_of_the_connector_that_hangs_ends_the_engine() -> None:
    """P4: steps go on, and the thread that publishes their KV does not."""
    async with hanging(stuck_factory) as client:
        await client.died.wait()
        with pytest.raises(UnavailableError, match="its thread that publishes KV has made no progress"):
            await client.call("pid")


async def test_a_step_that_computes_for_long_is_left_alone() -> None:
    """P4: a long step on a slow machine is no hang; an idle engine is none either."""
    async with hanging() as client:
        tokens, _ = await answer_of(client, fake_request("r", [COMPUTE_TOKEN, 1]))
        assert tokens == fake_answer([COMPUTE_TOKEN, 1], 4)
        assert not client.died.is_set()


async def test_an_engine_that_is_stopped_ends_when_it_is_asked_to_shut_down() -> None:
    """P4: SIGTERM of a worker whose engine is stopped must not wait for it."""
    async with hanging() as client:
        os.kill(await client.call("pid"), signal.SIGSTOP)
        async with asyncio.timeout(60):
            await client.shutdown()
