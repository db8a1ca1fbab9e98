"""Complete runs of the benchmarks at the smallest size, without checks of speed."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch

from benchmarks import engine, grpc_front, interference, router, service_speed, steps
from benchmarks.direct_worker import DirectWorker, direct_worker
from benchmarks.engine import OURS, PEERS, measure_engines
from benchmarks.interference import AGGREGATED, measure_interference
from benchmarks.load import Load, run_load
from benchmarks.peers import kvbaton_engine, transformers_generate
from benchmarks.peers.work import Load as EngineLoad
from benchmarks.rows import ROWS, Sizes
from benchmarks.runners import Order, Program, Runner, RunnerError
from benchmarks.servers import Server, ServerError, Start, kvbaton_server
from benchmarks.service_speed import measure_service
from benchmarks.streams import StreamError, stream
from contract.errors import SettingError
from contract.identity import Role
from engine.kernels.binding import load_kernels
from protos import worker_pb2 as pb
from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.fakes.router.script import Script
from tests.router.cluster import MODEL, running_cluster

COUNTING = "tests.benchmarks.counting_engine"
SIZES = Sizes(vocab_size=VOCAB_SIZE, long_prompt=24, prompt=6, answer=4)


def engine_load(folder: Path, model: str = "any") -> EngineLoad:
    return EngineLoad(model, 1, 64, 4, str(folder))


def new_children(before: list[psutil.Process]) -> list[psutil.Process]:
    """Return the children of this process beside those of ``before``, which other tests may have left."""
    return [child for child in psutil.Process().children() if child not in before]


@pytest.fixture
def children() -> list[psutil.Process]:
    """The children of this process before the test."""
    return psutil.Process().children()


@pytest.fixture
def runner(children: list[psutil.Process], tmp_path: Path) -> Iterator[Runner]:
    started = Runner(
        Program("counting", COUNTING), engine_load(tmp_path, "short"), tmp_path / "log", (0,), 30.0
    )
    yield started
    started.close()


def test_an_engine_answers_in_its_turn_and_is_stopped_between_turns(
    children: list[psutil.Process], runner: Runner
) -> None:
    (process,) = new_children(children)
    assert process.status() == psutil.STATUS_STOPPED
    with runner.turn():
        answer = runner.run(Order([[[1, 2], [5]], [[7]]], 2, wants_tokens=True))
    assert process.status() == psutil.STATUS_STOPPED
    assert answer["token_ids"] == [[[3, 4], [6, 7]], [[8, 9]]]
    assert runner.facts["facts"]["computes_with"] == "counting"
    assert runner.peak_bytes > 0
    runner.close()
    assert not process.is_running()


def test_an_engine_that_answers_too_little_ends(runner: Runner) -> None:
    with pytest.raises(RunnerError, match="counting ended"), runner.turn():
        runner.run(Order([[[1]]], 3))


def test_an_engine_that_says_nothing_is_killed(runner: Runner, tmp_path: Path) -> None:
    runner.time_limit = 0.2
    with pytest.raises(RunnerError, match=r"took over 0\.2 s"):
        runner.run(Order([[[1]]], 1))  # out of its turn: it is stopped


@pytest.mark.slow
def test_engines_side_by_side(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    plan = engine.Plan(
        model=folder,
        programs=(
            Program(OURS.name, COUNTING),
            Program("transformers", COUNTING),
            Program("vllm", "tests.benchmarks.nowhere"),
        ),
        sizes=SIZES,
        rounds=2,
        max_repeats=0,
        artefacts=tmp_path / "artefacts",
        probe_bytes=2**20,
    )
    found = measure_engines(plan, 1)
    assert set(found["left_out"]) == {"vllm"}
    assert set(found["rows"]) == {row.name for row in ROWS}
    for row in found["rows"].values():
        assert {name: len(one["samples"]) for name, one in row["engines"].items()} == {
            "kvbaton": 2,
            "transformers": 2,
        }
        assert row["best_peer"] == "transformers"
    assert found["engines"]["kvbaton"]["share_equal_to_transformers"] == 1.0
    assert len(found["packed_linears_of_onednn"]["8 at once"]["samples"]) == 2
    text = engine.table({"threads": {"1": json.loads(json.dumps(found))}})
    assert "| equal greedy tokens | 100% | 100% |" in text
    assert "vllm is omitted: vllm ended" in text
    assert set(PEERS) == {"vllm", "openvino", "llama", "transformers"}


def test_our_engine_and_the_reference_answer_alike(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen2", dtype=torch.bfloat16)
    load = engine_load(tmp_path, str(folder))
    prompts = [[5, 6, 7, 8], [90, 80, 70, 60]]
    ours, about = kvbaton_engine.start(load)
    reference, about_reference = transformers_generate.start(load)
    answers, others = ours(prompts, 3), reference(prompts, 3)
    assert [len(answer) for answer in answers] == [3, 3]
    assert [answer[0] for answer in answers] == [answer[0] for answer in others]
    assert "the model" in about["computes_with"][0]
    assert about_reference["computes_with"] == "sdpa"


@asynccontextmanager
async def scripted(_: Path, role: Role = Role.AGGREGATED) -> AsyncIterator[Server]:
    """A real router with scripted workers in this process."""
    roles = (Role.PREFILL, Role.DECODE) if role is Role.PREFILL else (role,)

    def answer(task: pb.Task) -> Script:
        return Script(tokens=[97] * task.sampling.max_tokens)

    async with running_cluster(answer, roles) as cluster:
        yield Server(cluster.url(""), MODEL, psutil.Process().pid, {"router": psutil.Process().pid})


async def test_the_front_of_grpc_beside_the_port_behind_it() -> None:
    plan = grpc_front.Plan(rounds=1, num_calls=3, num_messages=4, num_streams=2, step_seconds=0.001)
    found = await grpc_front.measure(plan)
    assert set(found["microseconds"]) == {"call", "message of one stream", "message of 2 streams"}
    assert all(figure > 0 for doors in found["microseconds"].values() for figure in doors.values())
    assert all(len(figures) == 1 for doors in found["rounds"].values() for figures in doors.values())


async def test_a_stream_counts_its_tokens() -> None:
    async with scripted(Path()) as server, aiohttp.ClientSession() as session:
        found = await stream(session, server.url, MODEL, [1, 2, 3], 5, with_timings=True)
        assert (found.num_tokens, len(found.arrivals)) == (5, 5)
        assert found.timings is not None
        assert len(found.gaps) == 4
        with pytest.raises(StreamError, match="HTTP 404"):
            await stream(session, server.url, "unknown", [1], 5)


@pytest.mark.slow
async def test_interference(tmp_path: Path) -> None:
    load = Load(
        250, rate=20.0, seconds=0.15, num_chats=2, chat_prompt=5, chat_answer=4, long_prompt=20, long_answer=3
    )
    plan = interference.Plan(
        load, shares=(0.001,), chunks=(8, 16), search_seconds=0.1, max_repeats=0, rounds=2
    )
    asked: list[int] = []

    def aggregated(chunk: int) -> Start:
        asked.append(chunk)
        return scripted

    starts: dict[str, Callable[..., Start]] = {
        interference.OURS: lambda: partial(scripted, role=Role.PREFILL),
        AGGREGATED: aggregated,
    }
    found, runs = await measure_interference(plan, starts, tmp_path)
    assert asked == [8, 16, found["chunk_search"]["best"]]
    assert set(runs) == set(starts)
    assert [set(each) for each in found["rounds"]] == 3 * [set(starts)]
    rates = [run["load"]["rate"] for run in found["runs"][AGGREGATED]]
    assert len(rates) == 3
    assert {0.0, 20.0} < set(rates)
    at_rate = found["runs"][interference.OURS][rates.index(20.0)]
    assert at_rate["long_prompts"]["num_prompts"] == 3
    assert at_rate["chats"]["num_chats"] >= 2
    assert {"client", "router", "server"} == set(at_rate["cores"])
    text = interference.table(json.loads(json.dumps(found)))
    assert text.count("| both 1") == 3
    assert "prefill 1, decode 1 over both 1: itl_p999" in text


async def test_a_load_fails_where_the_server_does(tmp_path: Path) -> None:
    load = Load(250, rate=0.0, seconds=0.2, num_chats=1, chat_prompt=500)
    async with scripted(tmp_path) as server:
        with pytest.raises(ExceptionGroup) as raised:
            await run_load(server, load)
    assert raised.group_contains(StreamError, match="HTTP 400")


async def test_a_server_that_does_not_start_is_an_error(
    children: list[psutil.Process], tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match=r"took too long to start; see .*kvbaton\.log"):
        async with kvbaton_server(tmp_path, tmp_path, time_limit=0.01):
            pass
    assert not new_children(children)


@pytest.mark.slow
async def test_the_service_beside_the_engine(children: list[psutil.Process], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", dtype=torch.bfloat16)
    plan = service_speed.Plan(
        folder, VOCAB_SIZE, 1, rounds=1, max_repeats=0, at_once=3, prompt=8, answer=5, num_single=2
    )
    arguments = ("--both", "1", "--num-threads", "1", "--kv-cache-bytes", str(2**24))

    def start(logs: Path) -> AbstractAsyncContextManager[Server]:
        return kvbaton_server(logs, folder, *arguments, time_limit=60.0)

    def start_direct(logs: Path) -> AbstractAsyncContextManager[DirectWorker]:
        return direct_worker(logs, folder, *arguments[2:], time_limit=60.0)

    found = await measure_service(plan, Program("counting", COUNTING), start, start_direct, tmp_path)
    assert len(found["offline"]["samples"]) == len(found["service"]["samples"]) == 1
    waits = found["wait_for_first_token_ms"]
    assert [len(waits[way]["samples"]) for way in ("service", "worker")] == [2, 2]
    assert all(sample > 0 for way in ("service", "worker") for sample in waits[way]["samples"])
    text = service_speed.table({**found, "command": "", "model": ""})
    assert "| 3 at once, 8 + 5 tokens | |" in text
    assert not new_children(children)


@pytest.mark.slow
def test_steps_without_the_kernels_are_refused(tmp_path: Path) -> None:
    small = make_checkpoint(tmp_path / "small", dtype=torch.bfloat16, hidden_size=64, intermediate_size=64)
    with pytest.raises(SettingError, match="the kernels do not support this model here"):
        steps.measure_steps(small, 1, num_steps=6, rounds=1, vocab_size=VOCAB_SIZE)


@pytest.mark.slow
def test_what_a_step_spends_outside_the_model(tmp_path: Path) -> None:
    if load_kernels() is None:
        pytest.skip("this processor has no avx512_bf16")
    folder = make_checkpoint(tmp_path / "model", dtype=torch.bfloat16, head_dim=32)
    found = steps.measure_steps(folder, 1, num_steps=6, rounds=2, vocab_size=VOCAB_SIZE)
    for one in found.values():
        assert len(one["step_ms"]["samples"]) == 2
        assert 0 < one["still_ms"]["median"] <= one["step_ms"]["median"]
        assert one["python_ms"]["median"] > 0
    drawing = [one["drawing_ms"]["median"] for one in found.values()]
    assert drawing[:3] == [0.0] * 3
    assert 0 < drawing[3] < found["32 at once, temperature 0.8, top-p 0.95"]["still_ms"]["median"]
    assert "| 32 at once | " in steps.table({"num_threads": 1, "cases": found})


@pytest.mark.slow
async def test_a_router_alone(children: list[psutil.Process]) -> None:
    plan = router.Plan(
        num_streams=3,
        num_tokens=80,
        step_seconds=0.001,
        num_completions=40,
        few=4,
        many=8,
        num_idle=20,
        fan_in=(1, 2),
        rounds=1,
    )
    found = await router.measure_router(plan)
    answers = [rate for ways in found["completions"].values() for rate in ways.values()]
    rates = [*found["streams"].values(), *answers, *found["workers"].values(), *found["two"].values()]
    assert len(rates) == 11 and all(rate["median"] > 0 for rate in rates)
    idle = found["idle"]
    assert idle["descriptors_during"] >= idle["descriptors_before"] + 20 > idle["descriptors_after"]
    assert "| tokens of 3 streams, chats |" in router.table(found)
    assert "| tokens of 3 streams, 2 aggregated workers |" in router.table(found)
    assert "| tokens over two routers |" in router.table(found)
    assert not new_children(children)
