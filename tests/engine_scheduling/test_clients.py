"""Both clients of an engine: same tokens, same endings, and the death of a process."""

import asyncio
import atexit
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from contract.errors import InvalidRequestError, NotFoundError, SettingError, UnavailableError
from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest
from engine.client import EngineClient, InProcessClient, ProcessClient
from engine.connecting import Transfers
from engine.hosting.process import EngineProcess
from engine.hosting.running import EnginePlan
from engine.settings import EngineSettings
from roles.table import STAGES
from tests.engine_scheduling.stepping import RECEIVE, fake_request, fake_settings
from tests.fakes.engine.fakes import CRASH_TOKEN, FakeExecutor, fake_answer, start_fake_executor
from tests.fakes.engine.transfer import fake_connector_factory

KINDS = [InProcessClient, ProcessClient]
Started = Callable[..., AbstractAsyncContextManager[Any]]


class FrozenExecutor(FakeExecutor):
    """Writes at its end how many objects garbage collections left out, into the file that is its model."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._file = settings.model

    def shutdown(self) -> None:
        self._file.write_text(str(gc.get_freeze_count()))
        super().shutdown()


def start_frozen(settings: EngineSettings) -> tuple[FakeExecutor, int]:
    executor = FrozenExecutor(settings)
    return executor, executor.memory.num_blocks


@asynccontextmanager
async def started(kind: type[InProcessClient] | type[ProcessClient], **changes: Any) -> AsyncIterator[Any]:
    settings = fake_settings(**changes)
    client = await kind.start(settings, Transfers(fake_connector_factory, STAGES), start=start_fake_executor)
    try:
        yield client
    finally:
        await client.shutdown()


async def answer_of(client: EngineClient, request: EngineRequest) -> tuple[list[int], EngineOutput]:
    tokens, last = [], None
    async for output in client.generate(request):
        tokens += output.token_ids
        last = output
    assert last is not None and last.is_leg_finished
    return tokens, last


@pytest.mark.parametrize("kind", KINDS)
async def test_concurrent_requests_have_streams_of_their_own(kind: Any) -> None:
    """A5, A7, A24: both clients answer with the same tokens, each request through its own queue."""
    prompts = [[n] * n for n in range(1, 9)]
    async with started(kind, max_num_seqs=3) as client:
        assert client.info.num_blocks == 64 and client.info.control_address == "127.0.0.1:9"
        requests = [fake_request(f"r{index}", prompt, 6) for index, prompt in enumerate(prompts)]
        answers = await asyncio.gather(*(answer_of(client, request) for request in requests))
        assert [tokens for tokens, _ in answers] == [fake_answer(prompt, 6) for prompt in prompts]
        assert {last.finish_reason for _, last in answers} == {FinishReason.LENGTH}
        await client.call("check_integrity")


async def test_each_kind_runs_the_engine_where_it_says() -> None:
    """A5: in this process, or in a child of it that ends with the client."""
    async with started(InProcessClient) as here, started(ProcessClient) as apart:
        assert await here.call("pid") == os.getpid()
        engine = psutil.Process(await apart.call("pid"))
        assert engine.ppid() == os.getpid()
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("kind", KINDS)
async def test_steps_bring_one_list_per_step(kind: Any) -> None:
    """B7: requests without a stream come together, step by step; the stream ends with the engine."""
    async with started(kind) as client:
        generated = asyncio.create_task(answer_of(client, fake_request("mine", [9], 2)))
        for name, token in (("a", 1), ("b", 2)):
            await client.add_request(fake_request(name, [token], 3))
        seen: dict[str, list[int]] = {"a": [], "b": []}
        num_ended, steps = 0, client.steps()
        while num_ended < 2:
            outputs = await anext(steps)
            for output in outputs:
                seen[output.request_id] += output.token_ids
                num_ended += output.is_leg_finished
        assert seen == {"a": fake_answer([1], 3), "b": fake_answer([2], 3)}
        assert (await generated)[0] == fake_answer([9], 2)
        await client.shutdown()
        assert [outputs async for outputs in steps] == []


@pytest.mark.parametrize("kind", KINDS)
async def test_leaving_a_stream_aborts_only_that_choice(kind: Any) -> None:
    """A7: cancelling the iterator aborts; the other choice of the request goes on."""
    async with started(kind, max_model_len=250) as client:
        stream = client.generate(fake_request("r", [1], 200, choice=0))
        other = asyncio.create_task(answer_of(client, fake_request("r", [1], 200, choice=1)))
        assert (await anext(stream)).token_ids == fake_answer([1], 1)
        await stream.aclose()
        tokens, _ = await other
        assert tokens == fake_answer([1], 200)
        assert (await client.call("debug_state"))["requests"] == {}


@pytest.mark.parametrize("kind", KINDS)
async def test_abort_ends_all_choices_up_to_an_attempt(kind: Any) -> None:
    """B12: abort(request_id, attempt) spares later attempts and other requests; each aborted choice gets its last output."""
    async with started(kind) as client:
        waiting = [
            fake_request("r", [1, 2], transfer=RECEIVE, choice=choice, attempt=attempt)
            for choice, attempt in ((0, 0), (1, 0), (0, 1), (0, 2))
        ]
        tasks = [asyncio.create_task(answer_of(client, request)) for request in waiting]
        await asyncio.sleep(0)
        await client.abort("r", 1)
        ends = await asyncio.gather(*tasks[:3])
        assert {last.finish_reason for _, last in ends} == {FinishReason.ABORT}
        assert (await client.call("debug_state"))["requests"] == {"WAITING_FOR_REMOTE_KVS": 1}
        await client.abort("r")
        assert (await tasks[3])[1].finish_reason is FinishReason.ABORT
        await client.abort("unknown")


@pytest.mark.parametrize("kind", KINDS)
async def test_errors_reach_the_caller_unchanged(kind: Any) -> None:
    """A9: start-up errors, bad requests, keys in use, and wrong utilities."""
    with pytest.raises(SettingError, match="give the name of a fake") as refused:
        await kind.start(fake_settings(model=Path()), start=start_fake_executor)
    assert refused.value.param == "model"
    async with started(kind) as client:
        _, last = await answer_of(client, fake_request("bad", [10**6]))
        assert last.error_kind == "invalid_request"
        await client.add_request(fake_request("d", [1], transfer=RECEIVE))
        with pytest.raises(InvalidRequestError, match="already"):
            await client.add_request(fake_request("d", [1], transfer=RECEIVE))
        with pytest.raises(NotFoundError, match="counters"):
            await client.call("nothing")


@pytest.mark.parametrize("kind", KINDS)
async def test_shutdown_ends_what_runs(kind: Any) -> None:
    """B16: every request has its end; afterwards nothing is accepted; ``died`` is for deaths only."""
    async with started(kind) as client:
        running = asyncio.create_task(answer_of(client, fake_request("r", [1], transfer=RECEIVE)))
        await client.call("stats")
        await client.shutdown()
        assert (await running)[1].finish_reason is FinishReason.ABORT
        with pytest.raises(UnavailableError, match="shut down"):
            await client.add_request(fake_request("late", [1]))
        with pytest.raises(UnavailableError):
            await client.call("stats")
        await client.abort("r")
        assert not client.died.is_set()


@pytest.mark.parametrize("kind", KINDS)
async def test_exception_in_a_step_ends_the_engine(kind: Any) -> None:
    """Every request ends once with "internal", and the client reports that the engine died."""
    async with started(kind) as client:
        waiting = asyncio.create_task(answer_of(client, fake_request("d", [1], transfer=RECEIVE)))
        await client.call("stats")
        _, last = await answer_of(client, fake_request("crash", [CRASH_TOKEN]))
        assert last.error_kind == "internal" and "crashed" in (last.error_message or "")
        assert (await waiting)[1].error_kind == "internal"
        await asyncio.wait_for(client.died.wait(), 30)
        with pytest.raises(UnavailableError, match="crashed"):
            await client.add_request(fake_request("late", [1]))


@pytest.fixture
def with_leftovers(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, with what a killed engine has left there, and something else."""
    temporary = tmp_path_factory.mktemp("temporary")
    for name in ("kvbaton-shm-left", "kvbaton-ranks-left", "kvbaton-notes"):
        (temporary / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


async def test_a_start_that_is_given_up_leaves_no_folder(with_leftovers: Path) -> None:
    starting = asyncio.create_task(ProcessClient.start(fake_settings(), start=start_fake_executor))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    left = [path.name for path in with_leftovers.iterdir() if not path.name.startswith("kvbaton-engine-")]
    assert left == ["kvbaton-notes"]


async def test_killed_process_ends_every_request_and_call(tmp_path: Path, with_leftovers: Path) -> None:
    """A8: the client notices the death, every call ends, and the sockets' folder is gone since the handshake.

    What the process has left in the temporary folder is removed, and nothing else.
    """
    plan = EnginePlan(
        settings=fake_settings(),
        transfers=Transfers(fake_connector_factory, STAGES),
        start=start_fake_executor,
    )
    client = await ProcessClient(EngineProcess(plan, within=tmp_path)).wait_started()
    assert list(tmp_path.iterdir()) == []
    streamed = asyncio.create_task(answer_of(client, fake_request("d", [1], transfer=RECEIVE)))
    await client.add_request(fake_request("e", [1], transfer=RECEIVE))
    psutil.Process(await client.call("pid")).send_signal(signal.SIGKILL)
    assert (await streamed)[1].error_kind == "internal"
    ends = [output async for outputs in client.steps() for output in outputs]
    assert [(output.request_id, output.error_kind) for output in ends] == [("e", "internal")]
    assert client.died.is_set()
    with pytest.raises(UnavailableError, match="died"):
        await client.call("stats")
    await client.abort("d")
    await client.shutdown()
    assert [path.name for path in with_leftovers.iterdir()] == ["kvbaton-notes"]


async def test_process_that_cannot_start_reports_the_reason() -> None:
    with pytest.raises(SettingError):
        await ProcessClient.start(
            fake_settings(kv_cache_bytes=4, max_model_len=99), start=start_fake_executor
        )


async def test_folder_too_deep_for_sockets_is_refused_and_left_clean(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    with pytest.raises(SettingError, match="TMPDIR"):
        EngineProcess(EnginePlan(settings=fake_settings(), start=start_fake_executor), within=deep)
    assert list(deep.iterdir()) == []


def test_engine_dies_with_its_parent() -> None:
    """A8: no engine process survives a parent that was killed."""
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.engine_scheduling.parent_program"], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        assert engine.is_running()
        parent.kill()
    _, alive = psutil.wait_procs([engine], timeout=30)
    assert alive == [] or engine.status() == psutil.STATUS_ZOMBIE


def test_a_client_does_not_load_torch() -> None:
    code = "import sys, engine.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_garbage_collection_skips_what_an_engine_started_with(tmp_path: Path) -> None:
    """All of it takes a tenth of a second, in the middle of a step."""
    file = tmp_path / "frozen"
    client = await ProcessClient.start(fake_settings(model=file), start=start_frozen)
    await client.shutdown()
    assert int(file.read_text()) > 1000


def at_its_end_write(file: Path) -> None:
    atexit.register(file.touch)
    sys.stderr.write("an unfinished line of the log")


async def test_the_process_ends_without_the_end_of_its_interpreter(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An interpreter with torch takes longer to end than a worker to leave. No line of the log is lost."""
    file = tmp_path / "late"
    client = await ProcessClient.start(
        fake_settings(), start=start_fake_executor, prepare=partial(at_its_end_write, file)
    )
    await client.shutdown()
    assert not client.died.is_set(), "it has ended as asked, with exit code 0"
    assert not file.exists()
    assert "an unfinished line of the log" in capfd.readouterr().err
