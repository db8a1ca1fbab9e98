"""Several ranks begin a step before the tokens of the one before are read, on devices that are played by the host."""

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contract.errors import KvbatonError, WorkerLostError
from engine.compute import runner
from engine.core import EngineCore
from engine.distributed import rank_pool
from engine.executor import Executor, RanksExecutor
from engine.kv_cache.startup import initialize_kv_cache
from engine.outputs import SchedulerOutput
from engine.settings import EngineSettings
from tests.checkpoints import make_checkpoint
from tests.engine_compute.test_running_ahead import DEVICES, NUM_TOKENS, Stepped, engine, requests
from tests.engine_parallel.test_ranks_executor import prompt_step
from tests.engine_scheduling.stepping import scheduler_of
from tests.fakes.engine.graphs import FakeDeviceGraphs
from tests.fakes.engine.local_ranks import LocalRanksExecutor

pytestmark = pytest.mark.timeout(300)
"""Each of several processes loads torch, perhaps while other tests run."""

SETTINGS = {"kv_cache_bytes": 8 * 2**20, "block_size": 4, "max_num_seqs": 16, "dtype": "float32"}
ON_FAKE_DEVICES = rank_pool._PROGRAM.replace(
    "from engine.distributed.rank_program import main",
    "from engine.compute import runner; from tests.fakes.engine.graphs import FakeDeviceGraphs; "
    "runner.forward_pass = FakeDeviceGraphs; from engine.distributed.rank_program import main",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed=3)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    """The answers of one rank on the CPU, whose steps do not run ahead."""
    with pytest.MonkeyPatch.context() as patched:
        reference = engine(model, None, patched)
    return answers(reference)


def settings_of(model: Path) -> EngineSettings:
    return EngineSettings(model=model, tensor_parallel_size=2, **SETTINGS)  # type: ignore[arg-type]


def stepped_by(model: Path, start: Callable[[EngineSettings], tuple[Executor, int]]) -> Stepped:
    woken = threading.Semaphore(0)
    return Stepped(EngineCore(settings_of(model), wake=woken.release, start=start), woken)


def with_threads(model: Path) -> tuple[Stepped, LocalRanksExecutor]:
    """Return an engine whose ranks are threads."""
    ranks = LocalRanksExecutor(settings_of(model))
    return stepped_by(model, lambda _: (ranks, initialize_kv_cache(ranks)[0])), ranks


def answers(stepped: Stepped) -> dict[str, list[int]]:
    """Answer all kinds of requests together; the engine is shut down."""
    try:
        for request in requests():
            stepped.core.add_request(request)
        stepped.run()
        return stepped.tokens()
    finally:
        stepped.core.shutdown()


def assert_ran_ahead(stepped: Stepped) -> None:
    """Assert that most steps had begun when the one before was read, and never two."""
    begun = {number: place for place, (name, number) in enumerate(stepped.happened) if name == "begin"}
    read = {number: place for place, (name, number) in enumerate(stepped.happened) if name == "read"}
    last = stepped.num_begun - 1
    assert sum(begun[number + 1] < read[number] for number in range(last)) > NUM_TOKENS / 2
    assert all(read[number] < begun[number + 2] for number in range(last - 1))


@pytest.mark.parametrize("device", DEVICES)
def test_ranks_that_run_ahead_give_the_answers_of_one(
    model: Path, expected: dict[str, list[int]], device: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are drawn go from rank 0's device to the other ones, before any host has read them."""
    monkeypatch.setattr(runner, "forward_pass", device)
    stepped, ranks = with_threads(model)
    forwards: list[Any] = [each._model.forward for each in ranks.runners]
    assert answers(stepped) == expected
    assert_ran_ahead(stepped)
    first, second = (forward.fed for forward in forwards)
    assert first == second and sum(first) > NUM_TOKENS / 2


def test_rows_that_are_not_numbers_have_no_token_on_any_rank(
    model: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 5: rank 0 alone has whole logits, and shares what it finds; the other request is not disturbed."""
    monkeypatch.setattr(runner, "forward_pass", FakeDeviceGraphs)
    stepped, ranks = with_threads(model)
    for request in requests()[2:4]:
        stepped.core.add_request(request)
    for _ in range(5):
        stepped.step()
    assert stepped.core.step_in_flight
    table = scheduler_of(stepped.core).pool.table_of("nucleus#0.0")
    for each in ranks.runners:
        each.memory.pool[table[0]] = math.nan
    stepped.run()
    assert stepped.outputs["nucleus.0"][-1].error_kind == "internal"
    assert stepped.tokens()["seeded.0"] == expected["seeded.0"]
    stepped.core.shutdown()


@pytest.fixture
def processes(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RanksExecutor]:
    """Two rank processes that play a device each."""
    monkeypatch.setattr(rank_pool, "_PROGRAM", ON_FAKE_DEVICES)
    executor = RanksExecutor(settings_of(model))
    yield executor
    executor.shutdown()


def test_rank_processes_that_run_ahead_give_the_answers_of_one(
    model: Path, expected: dict[str, list[int]], processes: RanksExecutor
) -> None:
    """Masks of grammars are sent to a step that has begun without them."""
    stepped = stepped_by(model, lambda _: (processes, initialize_kv_cache(processes)[0]))
    assert processes.runs_ahead
    assert answers(stepped) == expected
    assert_ran_ahead(stepped)


def test_a_step_that_cannot_begin_is_an_error_of_its_rank_when_it_is_waited_for(
    processes: RanksExecutor,
) -> None:
    """Calls until then are not carried out, and the ranks take further ones."""
    initialize_kv_cache(processes)
    unknown = SchedulerOutput(num_scheduled_tokens={"unknown": 1}, total_num_scheduled_tokens=1)
    failing = processes.begin(unknown)
    following = processes.begin(prompt_step())
    with pytest.raises(KvbatonError, match="unknown"):
        failing()
    with pytest.raises(KvbatonError):
        following()
    assert processes.collective_rpc("echo", b"still") == [b"still"] * 2
    assert processes.execute_model(prompt_step()).sampled_token_ids[0]


def test_a_rank_that_is_killed_while_a_step_runs_ahead_is_named(processes: RanksExecutor) -> None:
    initialize_kv_cache(processes)
    finish = processes.begin(prompt_step())
    os.kill(processes.pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"rank 1 of 2 \(process \d+\) was killed by signal 9"):
        finish()


def test_it_can_be_turned_off(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "forward_pass", FakeDeviceGraphs)
    settings = settings_of(model).model_copy(update={"enable_run_ahead": False})
    executor = LocalRanksExecutor(settings)
    assert not executor.runs_ahead
    executor.shutdown()
