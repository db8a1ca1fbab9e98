"""Rank processes: calls to all of them, errors with the rank's name, and detection of dead and silent ranks."""

import logging
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from contract.cache_layout import CacheLayout
from contract.errors import ErrorKind, InternalError, KvbatonError, SettingError, WorkerLostError
from contract.layout import KVLayout
from contract.requests import PoolingParams
from engine.connector import SingleRankConnector
from engine.distributed.channel import SLOT_BYTES
from engine.distributed.messages import Raised, cause_of
from engine.executor import Executor, InProcessExecutor, RanksExecutor, create_executor
from engine.kv_cache.startup import KVCacheConfig, KVCacheSpec, initialize_kv_cache
from engine.kv_tiers.storage import BlockCopy
from engine.outputs import NewRequestData, SchedulerOutput
from engine.settings import EngineSettings
from tests.checkpoints import load_reference, make_checkpoint, reference_greedy, replace_weights
from tests.engine_compute.driver import greedy
from tests.engine_compute.test_runner import RecordingConnector
from tests.engine_parallel.echoing_half import EchoingRanks

pytestmark = pytest.mark.timeout(300)
"""Each of several processes loads torch, perhaps while other tests run."""

STOPPED_SECONDS = 2.0
SILENT_SECONDS = 15.0
HOST_KV_BYTES = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def ranks(model: Path) -> Iterator[RanksExecutor]:
    """Two ranks, for tests that do not break them."""
    executor = start(model, host_kv_bytes=HOST_KV_BYTES)
    yield executor
    executor.shutdown()


def start(model: Path, **settings: float) -> RanksExecutor:
    small = EngineSettings(model=model, kv_cache_bytes=2**20, tensor_parallel_size=2, **settings)  # type: ignore[arg-type]
    executor = create_executor(small)
    assert isinstance(executor, RanksExecutor)
    initialize_kv_cache(executor)
    return executor


def prompt_step(num_tokens: int = 9) -> SchedulerOutput:
    new = NewRequestData("a", list(range(num_tokens)), greedy(), ([1],), 0, num_tokens)
    return SchedulerOutput(
        [new], num_scheduled_tokens={"a": num_tokens}, total_num_scheduled_tokens=num_tokens
    )


def assert_ended(pids: list[int]) -> None:
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []


@pytest.mark.parametrize(
    ("device", "num_ranks", "kind"),
    [("cpu", 1, InProcessExecutor), ("auto", 1, InProcessExecutor), ("cpu", 2, RanksExecutor)],
)
def test_the_executor_follows_from_device_and_ranks(
    ranks: RanksExecutor, model: Path, device: str, num_ranks: int, kind: type[Executor]
) -> None:
    """A11: one rank runs in this process, several run in a process each."""
    before = set(psutil.Process().children())
    if num_ranks == 1:
        executor = create_executor(EngineSettings(model=model, device=device))
        assert set(psutil.Process().children()) == before
    else:
        executor = ranks  # as ``create_executor`` returned it
        assert len({process.pid for process in before} & set(ranks.pids)) == num_ranks
    assert type(executor) is kind
    assert executor.collective_rpc("get_model_info") == [executor.model_info] * num_ranks
    if executor is not ranks:
        executor.shutdown()


@pytest.mark.parametrize(("device", "num_ranks"), [("tpu", 1), ("cuda:99", 1), ("cuda:99", 2)])
def test_no_executor_has_a_device_that_is_not_there(model: Path, device: str, num_ranks: int) -> None:
    """A11: in this process and in several."""
    before = set(psutil.Process().children(recursive=True))
    settings = EngineSettings(model=model, device=device, tensor_parallel_size=num_ranks)
    with pytest.raises(SettingError, match=f"device is '{device}'") as refused:
        create_executor(settings)
    assert refused.value.param == "device"
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_call_reaches_all_ranks_and_results_are_in_rank_order(ranks: RanksExecutor) -> None:
    """D2, D4: results have the types of the method's annotations; the model is whole, the KV cache is one rank's share."""
    specs = ranks.collective_rpc("get_kv_cache_specs")
    spec = KVCacheSpec(block_size=16, num_kv_heads=1, head_size=16, dtype="float32")
    assert specs == [{f"model.layers.{layer}.self_attn": spec for layer in range(2)}] * 2
    assert ranks.collective_rpc("get_model_info") == [ranks.model_info] * 2
    assert ranks.model_info.vocab_size == 264 and isinstance(ranks.layout, KVLayout)
    assert len(set(ranks.pids)) == 2 and os.getpid() not in ranks.pids


def test_an_embedding_is_pooled_by_the_first_rank(ranks: RanksExecutor, model: Path) -> None:
    """Pooling parameters and embeddings are sent between processes."""
    step = prompt_step()
    for pooling in (
        PoolingParams("last"),
        PoolingParams("mean", normalize=False),
        PoolingParams("max", normalize=False),
    ):
        new = replace(step.scheduled_new_reqs[0], sampling_params=None, pooling_params=pooling)
        output = ranks.execute_model(replace(step, scheduled_new_reqs=[new], finished_req_ids={"a"}))
        assert output.sampled_token_ids == [[]]
        with torch.no_grad():
            states = load_reference(model).model(torch.tensor([new.prompt_token_ids])).last_hidden_state[0]
        last = torch.nn.functional.normalize(states[-1], dim=0)
        exact = {"last": last, "mean": states.mean(dim=0), "max": states.amax(dim=0)}[
            pooling.pooling_type or ""
        ]
        torch.testing.assert_close(torch.tensor(output.pooler_output[0]), exact, rtol=1e-3, atol=1e-4)


def test_results_of_different_ranks_are_in_rank_order(ranks: RanksExecutor) -> None:
    """D2: only the first rank has embeddings."""
    step = prompt_step()
    new = replace(step.scheduled_new_reqs[0], sampling_params=None, pooling_params=PoolingParams("last"))
    for _ in range(3):
        again = replace(step, scheduled_new_reqs=[new], finished_req_ids={"a"})
        first, second = ranks.collective_rpc("execute_model", again)
        assert first.pooler_output[0] and not any(second.pooler_output)


@pytest.mark.parametrize("num_bytes", [0, 1, SLOT_BYTES // 2, SLOT_BYTES - 4096, SLOT_BYTES, 11_000_000])
def test_small_and_large_payloads(ranks: RanksExecutor, num_bytes: int) -> None:
    """D3: up to 10 MB through shared memory, above it over a socket, in both directions and any order."""
    payload = os.urandom(num_bytes)
    assert ranks.collective_rpc("echo", payload) == [payload] * 2
    assert ranks.collective_rpc("echo", b"after") == [b"after"] * 2


def test_arguments_are_given_by_position_or_by_name(ranks: RanksExecutor) -> None:
    """D2: in any order."""
    step = replace(prompt_step(), finished_req_ids={"a"})
    expected = ranks.execute_model(step).sampled_token_ids
    assert ranks.collective_rpc("echo", payload=b"named") == [b"named"] * 2
    ranks.collective_rpc("begin_step", masks=None, scheduled=step)
    ended = ranks.collective_rpc("finish_step", masks=None)
    assert [output.sampled_token_ids for output in ended] == [expected] * 2
    ranks.collective_rpc("begin_step", step, masks=None)
    assert ranks.collective_rpc("finish_step", None)[0].sampled_token_ids == expected


def test_all_ranks_reload_their_weights(ranks: RanksExecutor, model: Path) -> None:
    """B16: each its part."""
    step = replace(prompt_step(), finished_req_ids={"a"})
    prompt = step.scheduled_new_reqs[0].prompt_token_ids
    info = ranks.model_info
    for seed in (5, 0):  # 0 is that of the other tests
        replace_weights(model, seed)
        assert ranks.collective_rpc("check_reload") == [None, None]
        assert ranks.collective_rpc("reload_weights") == [ranks.model_info] * 2
        assert (ranks.model_info == info) == (seed == 0)
        golden = reference_greedy(load_reference(model), prompt, 1)
        assert ranks.execute_model(step).sampled_token_ids == [golden]


def test_orders_for_kv_tiers_travel_with_steps_or_at_once(ranks: RanksExecutor, model: Path) -> None:
    """A17: each rank has its part of the memory; a step does not wait for a copy, and none is lost."""
    settings = EngineSettings(model=model, tensor_parallel_size=2)
    assert ranks.open_kv_tiers(settings) == []
    (tier,) = ranks.open_kv_tiers(settings.model_copy(update={"host_kv_bytes": HOST_KV_BYTES}))
    assert tier.slot_bytes == 2 * ranks.layout.block_bytes
    assert tier.num_slots == HOST_KV_BYTES // tier.slot_bytes
    copy = BlockCopy(1, 0, b"0123456789abcdef")
    stored = tier.store([copy])
    assert (tier.has_orders, stored.done()) == (True, False)
    ranks.execute_model(replace(prompt_step(), finished_req_ids={"a"}))
    assert (tier.has_orders, stored.result(30)) == (False, 1)
    loaded = tier.load([copy._replace(block_id=2)])
    assert tier.settle(60) and loaded.result() == 1


def test_an_invalid_call_is_rejected_by_the_executor(ranks: RanksExecutor, model: Path) -> None:
    """D2: both executors reject it without sending anything to the ranks."""
    for executor in (ranks, InProcessExecutor(EngineSettings(model=model))):
        wrong: list[tuple[tuple[object, ...], dict[str, object]]] = [
            ((), {}),
            ((1, 2), {}),
            ((1,), {"config": 1}),
            ((), {"configs": 1}),
        ]
        for args, named in wrong:
            with pytest.raises(InternalError, match="'initialize_from_config' cannot be called"):
                executor.collective_rpc("initialize_from_config", *args, **named)
        for method in ("fly", "_draw", "device"):
            with pytest.raises(InternalError, match=f"no method '{method}'"):
                executor.collective_rpc(method)
    with pytest.raises(InternalError, match="cannot be sent"):
        ranks.collective_rpc("echo", object())
    with pytest.raises(SettingError, match="one rank only"):
        ranks.set_connector(SingleRankConnector(RecordingConnector()))
    assert ranks.collective_rpc("echo", b"still") == [b"still"] * 2


def test_an_error_of_all_ranks_keeps_its_type(ranks: RanksExecutor, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the traceback with the rank's name; ranks that have answered continue."""
    with pytest.raises(KvbatonError) as raised, caplog.at_level(logging.ERROR):
        ranks.collective_rpc("finish_step", None)
    assert raised.value.kind is ErrorKind.INTERNAL and "pop from an empty deque" in raised.value.message
    texts = [record.getMessage() for record in caplog.records]
    assert [text.startswith(f"rank {rank} of 2") for rank, text in enumerate(texts)] == [True, True]
    assert all("Traceback" in text and "finish_step" in text for text in texts)
    config = KVCacheConfig((2**60,), CacheLayout.of(ranks.layout, [None] * 2))
    with pytest.raises(KvbatonError):
        ranks.collective_rpc("initialize_from_config", config)
    assert ranks.collective_rpc("echo", b"still") == [b"still"] * 2


def test_an_error_of_a_known_kind_counts_among_several() -> None:
    """A rank whose connections break because another one gave up does not hide the reason."""
    broken = Raised(ErrorKind.INTERNAL, "connection closed", None, "")
    refused = Raised(ErrorKind.INVALID_SETTING, "all_reduce is symmetric", "all_reduce", "")
    assert cause_of([broken, refused]) == cause_of([refused, broken]) == refused
    assert cause_of([broken]) == broken


def test_a_model_without_its_weights_is_rejected(tmp_path: Path) -> None:
    """An error that all ranks raise alike is raised once, with the setting's name; no process is left."""
    folder = make_checkpoint(tmp_path / "model")
    save_file({"model.norm.weight": torch.ones(64)}, folder / "model.safetensors")
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(SettingError, match=r"^model: the checkpoint misses") as refused:
        start(folder)
    assert refused.value.param == "model"
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
def test_shutdown_leaves_nothing(model: Path, tmp_path: Path) -> None:
    """No process, descriptor or file is left, neither in the temporary folder nor in /dev/shm.

    The executor has a connector and a KV tier. Threads of other tests open and close descriptors in this process: the
    executor runs in one of its own.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        alone.submit(_run_and_leave_nothing, model, tmp_path).result()


def _run_and_leave_nothing(model: Path, folder: Path) -> None:
    tempfile.tempdir = str(folder)
    before = _things(folder)
    executor = start(model, host_kv_bytes=HOST_KV_BYTES)
    (tier,) = executor.open_kv_tiers(EngineSettings(model=model, host_kv_bytes=HOST_KV_BYTES))
    stored = tier.store([BlockCopy(1, 0, b"0123456789abcdef")])
    assert executor.execute_model(prompt_step()).sampled_token_ids[0]
    assert stored.result(60) == 1
    pids = executor.pids
    assert _things(folder)[0] == before[0]
    assert_halves_are_opened(executor)
    executor.shutdown()
    assert_ended(pids)
    assert _things(folder) == before
    with pytest.raises(WorkerLostError, match="shut down"):
        executor.collective_rpc("echo", b"")


def _things(folder: Path) -> tuple[set[Path], dict[str, str]]:
    """Return the files of this process's executors, and what each of its descriptors points at."""
    descriptors = {}
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which the folder is read
            descriptors[each.name] = str(each.readlink())
    return {*folder.iterdir(), *Path("/dev/shm").glob("kvbaton-ranks*")}, descriptors


def assert_halves_are_opened(executor: RanksExecutor) -> None:
    """Each rank opens its half with its own settings and pool; orders reach all after the step; all are closed."""
    connector = EchoingRanks()
    executor.set_connector(connector)
    started = [["start", pid] for pid in executor.pids]
    assert [[report[1], report[3]] for report in connector.reports] == started
    output = executor.execute_model(SchedulerOutput(kv_connector_metadata={"orders": [1, 2**64 - 1]}))
    assert (output.finished_sending, output.finished_recving) == ({"sent"}, None)
    connector.receive()
    executor.shutdown()
    assert [report for report in connector.reports if report[1] != "start"] == [
        *([f"half {rank}", "execute", {"orders": [1, 2**64 - 1]}] for rank in range(2)),
        *([f"half {rank}", "close"] for rank in range(2)),
    ]


def test_a_killed_rank_breaks_the_group_by_name(model: Path) -> None:
    """Between two calls: the watcher wakes the engine, and the next call raises; the other rank is ended too."""
    woken = threading.Semaphore(0)
    with closing(_Ended(start(model, host_kv_bytes=HOST_KV_BYTES))) as ended:
        executor = ended.executor
        executor.watch(woken.release)
        settings = EngineSettings(model=model, host_kv_bytes=HOST_KV_BYTES)
        (tier,) = executor.open_kv_tiers(settings)
        stored = tier.store([BlockCopy(1, 0, b"0123456789abcdef")])
        os.kill(executor.pids[1], signal.SIGKILL)
        assert stored.result(60) == 0, "no copy is waited for"
        message = rf"rank 1 of 2 \(process {executor.pids[1]}\) was killed by signal 9"
        assert woken.acquire(timeout=60)
        with pytest.raises(WorkerLostError, match=message):
            executor.execute_model(prompt_step())
        with pytest.raises(WorkerLostError, match=message):
            executor.collective_rpc("echo", b"")
    assert not woken.acquire(blocking=False)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_killed_within_a_step(model: Path, rank: int) -> None:
    """P4: after peer_timeout_seconds without processor time, long before rank_timeout_seconds."""
    with closing(_Ended(start(model, peer_timeout_seconds=STOPPED_SECONDS))) as ended:
        os.kill(ended.executor.pids[rank], signal.SIGSTOP)
        message = rf"rank {rank} of 2 \(process \d+\) was killed by signal 9: its process has not run for"
        with pytest.raises(WorkerLostError, match=message):
            ended.executor.execute_model(prompt_step())


@pytest.mark.slow
def test_a_rank_that_is_stopped_in_an_idle_engine_wakes_it(model: Path) -> None:
    """P4: without any call to the ranks."""
    woken = threading.Semaphore(0)
    with closing(_Ended(start(model, peer_timeout_seconds=STOPPED_SECONDS))) as ended:
        ended.executor.watch(woken.release)
        os.kill(ended.executor.pids[1], signal.SIGSTOP)
        assert woken.acquire(timeout=120)
        with pytest.raises(WorkerLostError, match="its process has not run for"):
            ended.executor.execute_model(prompt_step())


@pytest.mark.slow
def test_a_running_rank_that_does_not_answer_is_detected(model: Path) -> None:
    """Silence within a step is an error after rank_timeout_seconds, not a hang; the stopped process is killed too."""
    seconds = {"rank_timeout_seconds": SILENT_SECONDS, "peer_timeout_seconds": 1000.0}
    with closing(_Ended(start(model, **seconds))) as ended:
        os.kill(ended.executor.pids[1], signal.SIGSTOP)
        message = r"rank 1 of 2 \(process \d+\) has not answered execute_model; rank 0 of 2"
        with pytest.raises(WorkerLostError, match=message):
            ended.executor.execute_model(prompt_step())


class _Ended:
    """Ends an executor and checks that its ranks have ended."""

    def __init__(self, executor: RanksExecutor) -> None:
        self.executor = executor

    def close(self) -> None:
        pids = self.executor.pids
        self.executor.shutdown()
        assert_ended(pids)
