"""A group of engines with fake runners in one process, each in a thread of its own, joined by real RPC on 127.0.0.1."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from data_parallel.gate import GroupGate
from data_parallel.member import Member
from data_parallel.options import GroupPlan
from engine.hosting.messages import AddRequest, FromEngine, Ready, Shutdown, StepOutputs, Stopped
from engine.hosting.running import EnginePlan, run_engine
from engine.outputs import ModelRunnerOutput, SchedulerOutput
from engine.settings import EngineSettings
from engine.stepping.loop import Inbox, Put
from tests.engine_scheduling.stepping import fake_settings
from tests.fakes.engine.fakes import FakeExecutor, FakeRunner
from tests.fakes.engine.memory import FakeMemory

SECRET = "a secret of at least thirty-two characters"
_SECONDS = 30.0


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def until(predicate: Callable[[], bool], seconds: float = _SECONDS) -> None:
    """Wait until something holds. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not predicate():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.01)


class Collective:
    """The exchange within forward passes: the n-th pass of a rank ends when all others are in their n-th."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)

    def meet(self) -> None:
        """Wait for the others. Raises threading.BrokenBarrierError if one of them does not come, or would be dead."""
        self.barrier.wait(_SECONDS)


class MeetingRunner(FakeRunner):
    """A runner whose forward passes wait for those of the other ranks. passes: "real" and "dummy", in order."""

    def __init__(self, memory: FakeMemory, collective: Collective) -> None:
        super().__init__(memory)
        self.passes: list[str] = []
        self.collective = collective

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        if scheduled.total_num_scheduled_tokens:
            self.passes.append("real")
            self.collective.meet()
        return super().execute_model(scheduled)

    def execute_dummy_batch(self) -> None:
        self.passes.append("dummy")
        self.collective.meet()


@dataclass
class Rank:
    """One engine of a group. ended: the outcome of its loop. deaths: why it would have ended its process."""

    inbox: Inbox = field(default_factory=Inbox)
    member: Member | None = None
    runner: MeetingRunner | None = None
    outputs: list[EngineOutput] = field(default_factory=list)
    said: list[FromEngine] = field(default_factory=list)
    deaths: list[str] = field(default_factory=list)
    ended: bool | None = None
    changed: threading.Condition = field(default_factory=threading.Condition)

    def emit(self, message: FromEngine) -> None:
        with self.changed:
            self.said.append(message)
            if isinstance(message, StepOutputs):
                self.outputs += message.outputs
            self.changed.notify_all()

    def die(self, reason: str) -> None:
        with self.changed:
            self.deaths.append(reason)
            self.changed.notify_all()
        assert self.runner is not None
        self.runner.collective.barrier.abort()  # as the end of a process breaks the connections of its collectives

    def wait(self, predicate: Callable[["Rank"], bool]) -> None:
        """Wait until something holds. Raises TimeoutError."""
        with self.changed:
            if not self.changed.wait_for(lambda: predicate(self), _SECONDS):
                raise TimeoutError(f"{self.said[-3:]}, {self.deaths}")

    def tokens_of(self, key: str) -> list[int]:
        return [token for output in self.outputs if output.key == key for token in output.token_ids]

    def add(self, request: EngineRequest) -> None:
        self.inbox.put(AddRequest(request))

    @property
    def steps(self) -> tuple[int, int]:
        """(local_step, coord_step)."""
        assert self.member is not None
        return self.member.steps.local_step, self.member.steps.coord_step


def group_plans(
    size: int, look_ahead: int, num_sharing: int, timeout_seconds: float = 2.0
) -> Iterator[GroupPlan]:
    """Yield the plan of each rank of a group on 127.0.0.1. num_sharing: see ``running_group``."""
    address = f"127.0.0.1:{free_port()}"
    for rank in range(size):
        yield GroupPlan(
            dp_rank=rank,
            dp_size=size,
            address=address,
            listen_host="127.0.0.1",
            host="127.0.0.1",
            secret=SECRET,
            look_ahead=look_ahead,
            timeout_seconds=timeout_seconds,
            join_seconds=_SECONDS,
            shares_memory=rank < num_sharing,
        )


@contextmanager
def running_group(
    size: int,
    look_ahead: int = 24,
    timeout_seconds: float = 2.0,
    settings: EngineSettings | None = None,
    num_sharing: int | None = None,
) -> Iterator[list[Rank]]:
    """Run a group within the block; at its end all ranks are asked to end.

    num_sharing: ranks, the first ones, that can announce steps in shared memory, which is used if all can; None: all.
    """
    ranks = [Rank() for _ in range(size)]
    collective = Collective(size)
    plans = group_plans(size, look_ahead, size if num_sharing is None else num_sharing, timeout_seconds)

    def run(rank: Rank, plan: GroupPlan) -> None:
        def gate(put: Put) -> GroupGate:
            rank.member = Member(plan, put, lambda: 1, rank.die)
            return GroupGate(rank.member)

        def start(given: EngineSettings) -> tuple[FakeExecutor, int]:
            executor = FakeExecutor(given)
            executor.runner = rank.runner = MeetingRunner(executor.memory, collective)
            return executor, executor.memory.num_blocks

        # An idle engine wakes by its input alone.
        engine_plan = EnginePlan(
            settings=settings or fake_settings(), start=start, gate=gate, idle_seconds=3600.0
        )
        rank.ended = run_engine(engine_plan, rank.inbox, rank.emit)

    threads = [
        threading.Thread(target=partial(run, rank, plan), daemon=True)
        for rank, plan in zip(ranks, plans, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        for rank in ranks:
            rank.wait(lambda it: bool(it.said))
            assert isinstance(rank.said[0], Ready), rank.said
        yield ranks
    finally:
        for rank in ranks:
            rank.inbox.put(Shutdown())
        for thread in threads:
            thread.join(_SECONDS)
        assert not any(thread.is_alive() for thread in threads)


def has_stopped(rank: Rank) -> bool:
    """Return whether the engine has sent its last message."""
    return isinstance(rank.said[-1], Stopped)
