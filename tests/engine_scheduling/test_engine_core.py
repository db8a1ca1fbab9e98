"""The core: order of start-up, limits, utilities, and the loop around it."""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.errors import NotFoundError, SettingError, TransferError
from contract.layout import Side
from contract.outputs import FinishReason
from contract.requests import EngineRequest
from engine.connecting import Transfers
from engine.connector import ConnectorPair, SingleRankConnector
from engine.core import EngineCore
from engine.hosting.messages import (
    AddRequest,
    Call,
    CallResult,
    FromEngine,
    Health,
    Ready,
    Shutdown,
    StartFailed,
    StepOutputs,
    Stopped,
)
from engine.hosting.running import EnginePlan, run_engine
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings
from engine.startup import ExecutorStart
from engine.stepping.loop import Inbox
from roles.table import STAGES
from tests.clock import Clock
from tests.engine_scheduling.gates import GATES, STARTS, DeviceExecutor, MakeGate
from tests.engine_scheduling.stepping import RECEIVE, SteppedEngine, fake_request, fake_settings, scheduler_of
from tests.fakes.engine.fakes import (
    CRASH_TOKEN,
    FAKE_EOS,
    FAKE_VOCAB_SIZE,
    FakeExecutor,
    fake_answer,
    start_fake_executor,
)
from tests.fakes.engine.transfer import FakeConnector, fake_connector_factory


def test_start_up_order() -> None:
    """A10: executor with weights and KV cache, then the connector on its layout, then the scheduler."""
    happened = []

    class WatchedExecutor(FakeExecutor):
        def set_connector(self, connector: Any) -> None:
            happened.append("rank started")
            super().set_connector(connector)

    def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
        happened.append("executor, weights, KV cache")
        return WatchedExecutor(settings), 20

    def connect(side: Side, fingerprint: str, wake: Any) -> ConnectorPair:
        happened.append(f"connector for {side.layout.block_size} tokens of {fingerprint}")
        return fake_connector_factory(side, fingerprint, wake)

    core = EngineCore(fake_settings(), Transfers(connect, STAGES), start=start)
    assert happened == ["executor, weights, KV cache", "connector for 4 tokens of fake:fake", "rank started"]
    assert core.info.num_blocks == 20 and scheduler_of(core).pool.num_blocks == 20
    assert (core.info.vocab_size, core.info.eos_token_ids) == (FAKE_VOCAB_SIZE, (FAKE_EOS,))
    assert core.info.control_address == "127.0.0.1:9"


def test_the_time_of_the_whole_start_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """D13: from the weights to the connector."""
    clock = Clock()

    def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
        clock.now += 40.0
        return start_fake_executor(settings)

    def connect(side: Side, fingerprint: str, wake: Any) -> ConnectorPair:
        clock.now += 2.5
        return fake_connector_factory(side, fingerprint, wake)

    caplog.set_level(logging.INFO, logger="engine.startup")
    EngineCore(fake_settings(), Transfers(connect, STAGES), start=start, clock=clock)
    lines = [text for text in caplog.messages if "has started" in text]
    assert [line.partition(":")[0] for line in lines] == ["the engine has started in 42.500 s"]


def test_failed_start_ends_the_executor() -> None:
    made: list[FakeExecutor] = []

    def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
        made.append(FakeExecutor(settings))
        return made[0], 20

    def connect(side: Side, fingerprint: str, wake: Any) -> ConnectorPair:
        raise TransferError("port taken")

    with pytest.raises(TransferError, match="port taken"):
        EngineCore(fake_settings(), Transfers(connect, STAGES), start=start)
    assert made[0].is_shut_down


def test_length_that_was_set_must_fit_the_pool() -> None:
    """Law 10: a set length is refused with sizes, the model's own is lowered."""
    with pytest.raises(SettingError, match=r"200 tokens need more than the 12"):
        EngineCore(fake_settings(kv_cache_bytes=4, max_model_len=200), start=start_fake_executor)
    core = EngineCore(fake_settings(kv_cache_bytes=4), start=start_fake_executor)
    assert core.info.max_model_len == 12


def test_utilities_return_plain_data() -> None:
    """B14, B15: stats, debug_state, counters and check_integrity by name; a wrong name gets the right ones."""
    engine = SteppedEngine()
    engine.add(fake_request("a", [1, 2, 3, 4, 5]), fake_request("d", [1, 2], transfer=RECEIVE))
    engine.step()
    stats = engine.core.call("stats", [])
    assert (stats["num_running_reqs"], stats["num_waiting_reqs"]) == (1, 1)
    assert stats["kv_cache_usage"] == pytest.approx(2 / 63)
    state = engine.core.call("debug_state", [])
    assert state["blocks"] == {"null": 1, "free": 61, "held": 2, "quarantined": 0}
    assert state["requests"] == {"RUNNING": 1, "WAITING_FOR_REMOTE_KVS": 1}
    assert state["connector"] == {"sends": 0, "fetches": {"d#0.0": "asked"}}
    assert engine.core.call("check_integrity", []) is None
    assert engine.core.call("counters", [])["transfer_leases"] == 0.0
    with pytest.raises(NotFoundError, match="debug_state"):
        engine.core.call("start_over", [])


def loop_with(inbox: Inbox, settings: EngineSettings, **options: Any) -> list[FromEngine]:
    heard: list[FromEngine] = []
    plan = EnginePlan(settings=settings, start=start_fake_executor, **options)
    has_ended_well = run_engine(plan, inbox, heard.append)
    assert isinstance(heard[-1], StartFailed) or heard[-1] == Stopped() or not has_ended_well
    return heard


@GATES
@STARTS
def test_loop_drains_input_steps_and_sends_outputs(make_gate: MakeGate, start: ExecutorStart) -> None:
    """A8, A9: all input that is there is taken before a step; outputs of a step are one message."""
    inbox = Inbox()
    for name, prompt in (("a", [1]), ("b", [2]), ("bad", [-5])):
        inbox.put(AddRequest(fake_request(name, prompt, max_tokens=2)))
    inbox.put(Call(7, "stats", []))
    heard: list[FromEngine] = []

    def hear(message: FromEngine) -> None:
        heard.append(message)
        if isinstance(message, StepOutputs) and all(o.is_leg_finished for o in message.outputs):
            inbox.put(Shutdown())

    plan = EnginePlan(settings=fake_settings(), start=start, gate=make_gate(inbox))
    assert run_engine(plan, inbox, hear)
    ready, result, first, second, stopped = heard
    assert isinstance(ready, Ready) and ready.info.num_blocks == 64
    assert isinstance(result, CallResult) and result.result["num_waiting_reqs"] == 2
    assert isinstance(first, StepOutputs) and isinstance(second, StepOutputs)
    assert sorted(output.request_id for output in first.outputs) == ["a", "b", "bad"]
    assert [output.token_ids for output in second.outputs] == [[fake_answer([n], 2)[1]] for n in (1, 2)]
    assert stopped == Stopped()


def test_outputs_are_sent_while_the_next_step_is_computed() -> None:
    """Sending tokens delays no step; those of the last step are sent before the loop waits."""
    inbox, happened = Inbox(), list[str]()

    class WatchedExecutor(FakeExecutor):
        def begin(self, scheduled: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
            happened.append(f"{scheduled.total_num_scheduled_tokens} begin")
            finish = super().begin(scheduled)

            def watched() -> ModelRunnerOutput:
                happened.append("end")
                return finish()

            return watched

    def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
        return WatchedExecutor(settings), 20

    def hear(message: FromEngine) -> None:
        if isinstance(message, StepOutputs):
            happened.append("sent")
            if message.outputs[0].is_leg_finished:
                inbox.put(Shutdown())

    inbox.put(AddRequest(fake_request("a", [1, 2, 3], max_tokens=3)))
    assert run_engine(EnginePlan(settings=fake_settings(), start=start), inbox, hear)
    assert happened[:8] == ["3 begin", "end", "1 begin", "sent", "end", "1 begin", "sent", "end"]
    assert happened.count("sent") == 3


@GATES
@STARTS
def test_idle_loop_reports_health_at_each_timeout(
    make_gate: MakeGate, start: ExecutorStart, caplog: pytest.LogCaptureFixture
) -> None:
    """A8: if idle, block on input with a timeout; on each timeout reply to the client and log stats."""
    inbox = Inbox()
    heard: list[FromEngine] = []

    def hear(message: FromEngine) -> None:
        heard.append(message)
        if sum(isinstance(m, Health) for m in heard) == 2:
            inbox.put(Shutdown())

    gate = make_gate(inbox)
    plan = EnginePlan(settings=fake_settings(), start=start, idle_seconds=0.01, gate=gate)
    with caplog.at_level(logging.INFO, logger="engine.stepping.loop"):
        assert run_engine(plan, inbox, hear)
    assert [type(message) for message in heard] == [Ready, Health, Health, Stopped]
    assert sum("idle: 0 running" in record.message for record in caplog.records) == 2


@GATES
@STARTS
def test_deadline_wakes_an_idle_loop(make_gate: MakeGate, start: ExecutorStart) -> None:
    """A request that waits for remote KV ends in time although nothing arrives and nothing else runs."""
    inbox = Inbox()
    inbox.put(AddRequest(fake_request("d", [1, 2], transfer=RECEIVE)))
    heard: list[FromEngine] = []

    def hear(message: FromEngine) -> None:
        heard.append(message)
        if isinstance(message, StepOutputs):
            inbox.put(Shutdown())

    settings = fake_settings(remote_kv_timeout_seconds=0.02)
    plan = EnginePlan(
        settings=settings,
        transfers=Transfers(fake_connector_factory, STAGES),
        start=start,
        idle_seconds=60.0,
        gate=make_gate(inbox),
    )
    assert run_engine(plan, inbox, hear)
    (outputs,) = [message for message in heard if isinstance(message, StepOutputs)]
    assert [output.error_kind for output in outputs.outputs] == ["deadline"]


class WatchedConnector(FakeConnector):
    """Records when the scheduler has asked and when it has reserved."""

    def __init__(self, wake: Callable[[], None]) -> None:
        super().__init__(wake)
        self.has_asked, self.has_reserved = threading.Event(), threading.Event()

    def start_fetch(self, request: EngineRequest) -> None:
        super().start_fetch(request)
        self.has_asked.set()

    def receive_into(
        self,
        key: str,
        block_ids: list[int],
        num_cached_blocks: int,
        other_groups: Sequence[Sequence[int]] = (),
    ) -> None:
        super().receive_into(key, block_ids, num_cached_blocks, other_groups)
        self.has_reserved.set()


@GATES
@STARTS
def test_connector_wakes_an_idle_loop(make_gate: MakeGate, start: ExecutorStart) -> None:
    """B8: events and completions reach an idle core through its input queue."""
    inbox, connectors, heard = Inbox(), list[WatchedConnector](), list[FromEngine]()

    def connect(side: Side, fingerprint: str, wake: Callable[[], None]) -> ConnectorPair:
        connectors.append(WatchedConnector(wake))
        return ConnectorPair(connectors[0], SingleRankConnector(connectors[0].rank), "127.0.0.1:9")

    is_up = threading.Event()

    def hear(message: FromEngine) -> None:
        heard.append(message)
        is_up.set()
        if isinstance(message, StepOutputs) and message.outputs[-1].is_leg_finished:
            inbox.put(Shutdown())

    plan = EnginePlan(
        settings=fake_settings(),
        transfers=Transfers(connect, STAGES),
        start=start,
        idle_seconds=60.0,
        gate=make_gate(inbox),
    )
    inbox.put(AddRequest(fake_request("d", [1, 2], 3, transfer=RECEIVE)))
    engine = threading.Thread(target=run_engine, args=(plan, inbox, hear))
    engine.start()
    assert is_up.wait(30) and connectors[0].has_asked.wait(30)
    connectors[0].publish_peer("d#0.0")
    assert connectors[0].has_reserved.wait(30)
    connectors[0].land("d#0.0")
    engine.join(30)
    assert not engine.is_alive()
    tokens = [t for m in heard if isinstance(m, StepOutputs) for o in m.outputs for t in o.token_ids]
    assert tokens == fake_answer([1, 2], 3)[1:]


@GATES
def test_exception_in_a_step_ends_every_request_once(
    make_gate: MakeGate, caplog: pytest.LogCaptureFixture
) -> None:
    """The broad boundary: it is logged, every request ends with "internal", and the loop returns False."""
    inbox = Inbox()
    inbox.put(AddRequest(fake_request("ok", [1, 2])))
    inbox.put(AddRequest(fake_request("crash", [CRASH_TOKEN])))
    heard = loop_with(inbox, fake_settings(), gate=make_gate(inbox))
    (step,) = [message for message in heard if isinstance(message, StepOutputs)]
    assert [(o.request_id, o.finish_reason, o.error_kind) for o in step.outputs] == [
        ("ok", FinishReason.ERROR, "internal"),
        ("crash", FinishReason.ERROR, "internal"),
    ]
    assert heard[-1] == Stopped("RuntimeError('the forward pass crashed')")
    assert "the engine failed" in caplog.text


def test_start_errors_are_reported_unchanged() -> None:
    """A SettingError arrives with its kind and the name of the setting."""
    heard = loop_with(Inbox(), fake_settings(model=Path()))
    assert heard == [StartFailed("invalid_setting", "model is '.'; give the name of a fake", "model")]


def test_the_last_report_of_an_engine_whose_step_failed_can_be_sent() -> None:
    """A step fails that starts early, when the answers in it count as computed further than they are known.

    A worker cannot send numbers below zero, and would lose the errors that come with them.
    """
    inbox, said = Inbox(), list[FromEngine]()

    def start(settings: EngineSettings) -> tuple[FakeExecutor, int]:
        def fail(number: int) -> None:
            if number == 6:
                raise RuntimeError("it cannot start")

        executor = DeviceExecutor(settings, fail)
        executor.runs_ahead = False
        return executor, executor.memory.num_blocks

    for number in range(5):
        inbox.put(AddRequest(fake_request(f"a{number}", [1, 2, number], max_tokens=50)))
    assert not run_engine(EnginePlan(settings=fake_settings(), start=start), inbox, said.append)
    last = [message for message in said if isinstance(message, StepOutputs)][-1]
    assert len(last.outputs) == 5
    assert (last.stats.num_running_reqs, last.stats.num_waiting_reqs) == (0, 0)
    assert last.stats.num_queued_prompt_tokens == 0
