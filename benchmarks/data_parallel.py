"""``python -m benchmarks.data_parallel``: what keeping in step costs, beside the scheme of waves.

Groups of engines with fake runners, whose passes wait for each other as those of a mixture of experts do. Both schemes get
the same requests at the same ranks. Counted are passes with and without tokens, calls between the ranks (announcements, and
the coordinator's to each rank), messages that the front end must send beside each request, and collectives that the scheme
adds. Also measured: the time of one announcement, by calls and in shared memory, and until a group is down after the end of
one process.
"""

import argparse
import asyncio
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.facts import run_facts, write_result
from data_parallel.member import Member
from engine.hosting.messages import AddRequest, FromEngine, Ready, Shutdown, StepOutputs
from engine.hosting.running import EnginePlan, run_engine
from engine.mailbox import Mailbox
from engine.settings import EngineSettings
from engine.stepping.gate import StepGate, Work
from engine.stepping.loop import Inbox, Put
from tests.checkpoints import make_foreign_checkpoint
from tests.data_parallel.group import Collective, MeetingRunner, group_plans, running_group, until
from tests.data_parallel.test_experts import running_engines
from tests.engine_scheduling.stepping import fake_request, fake_settings
from tests.fakes.engine.fakes import FakeExecutor

SIZE = 4
_STEPS_BETWEEN_QUESTIONS = 32
"""vLLM's ranks ask each other after so many steps of a wave whether one has work left."""


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes after the one before, at which rank, and how many tokens it gets."""

    pause_seconds: float
    rank: int
    num_tokens: int


LOADS: dict[str, list[Arrival]] = {
    "one request of 60 tokens": [Arrival(0.0, 0, 60)],
    "20 short ones, each alone": [Arrival(0.15, number % SIZE, 8) for number in range(20)],
    "60 at random ranks, overlapping": [
        Arrival(drawn.choice((0.0, 0.002, 0.01)), drawn.randrange(SIZE), drawn.randrange(4, 40))
        for drawn in [random.Random(5)]
        for _ in range(60)
    ],
}


@dataclass
class Costs:
    """The costs of a load under one scheme."""

    passes: int = 0
    dummy_passes: int = 0
    calls: int = 0
    messages_of_front_end: int = 0
    collectives: int = 0

    def as_row(self) -> dict[str, float]:
        """Return the counts, and the sum of calls and messages per pass with tokens."""
        busy = max(1, self.passes - self.dummy_passes)
        sent = self.calls + self.messages_of_front_end
        return {**self.__dict__, "sent_per_busy_pass": round(sent / busy, 3)}


class Wave(Collective):
    """Shared by the ranks of a wave: their passes, and the question whether one has work left."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.num_collectives = 0
        self._alive = [False] * size

    def is_one_alive(self, rank: int, *, is_alive: bool) -> bool:
        """Return whether any rank has work, for which each gives its own. All ranks call it after the same pass."""
        self._alive[rank] = is_alive
        if self.barrier.wait() == 0:
            self.num_collectives += 1
        answer = any(self._alive)
        self.barrier.wait()
        return answer


class WaveGate(StepGate):
    """Starts steps from the start of a wave on, until no rank has work after ``_STEPS_BETWEEN_QUESTIONS`` of them."""

    def __init__(self, wave: Wave, rank: int) -> None:
        self.is_running = False
        self._wave = wave
        self._rank = rank
        self._num_steps = 0
        self._has_work: Callable[[], bool] = lambda: False

    def seconds_to_start(self, work: Work) -> float | None:
        """See StepGate."""
        self._has_work = work.needs_step
        return 0.0 if self.is_running or work.needs_step() else None

    def may_continue(self, work: Work) -> bool:
        """See StepGate."""
        return False

    def may_run_ahead(self, work: Work) -> bool:
        """See StepGate."""
        return False

    def may_interrupt(self) -> bool:
        """See StepGate."""
        return False

    def must_compute(self) -> bool:
        """See StepGate."""
        return self.is_running

    def on_start(self, *, is_empty: bool) -> float:
        """See StepGate."""
        self.is_running |= not is_empty
        return 0.0

    def on_end(self, *, is_empty: bool) -> None:
        """See StepGate. An empty step was made with a dummy pass, if the wave goes on."""
        if not self.is_running:
            return
        self._num_steps += 1
        if self._num_steps % _STEPS_BETWEEN_QUESTIONS == 0:
            self.is_running = self._wave.is_one_alive(self._rank, is_alive=self._has_work())

    def on_interrupt(self) -> None:
        """See StepGate."""


@dataclass
class WaveRank:
    """An engine of a wave."""

    inbox: Inbox = field(default_factory=Inbox)
    gate: WaveGate | None = None
    runner: MeetingRunner | None = None
    num_finished: int = 0
    is_ready: threading.Event = field(default_factory=threading.Event)

    def emit(self, message: FromEngine) -> None:
        """Note a message of the engine."""
        if isinstance(message, Ready):
            self.is_ready.set()
        if isinstance(message, StepOutputs):
            self.num_finished += sum(output.is_leg_finished for output in message.outputs)


@contextmanager
def running_waves(size: int) -> Iterator[tuple[list[WaveRank], Wave]]:
    """Run engines under the scheme of waves within the block."""
    wave = Wave(size)
    ranks = [WaveRank() for _ in range(size)]

    def run(index: int) -> None:
        rank = ranks[index]

        def start(given: EngineSettings) -> tuple[FakeExecutor, int]:
            executor = FakeExecutor(given)
            executor.runner = rank.runner = MeetingRunner(executor.memory, wave)
            return executor, executor.memory.num_blocks

        def gate(_: Put) -> WaveGate:
            rank.gate = WaveGate(wave, index)
            return rank.gate

        run_engine(EnginePlan(settings=fake_settings(), start=start, gate=gate), rank.inbox, rank.emit)

    threads = [threading.Thread(target=partial(run, index), daemon=True) for index in range(size)]
    for thread in threads:
        thread.start()
    for rank in ranks:
        rank.is_ready.wait()
    try:
        yield ranks, wave
    finally:
        for rank in ranks:
            rank.inbox.put(Shutdown())
        for thread in threads:
            thread.join(10)


def by_waves(load: list[Arrival]) -> Costs:
    """Give a load to engines in waves: the front end wakes all other ranks for each request."""
    costs = Costs()
    with running_waves(SIZE) as (ranks, wave):
        for number, arrival in enumerate(load):
            time.sleep(arrival.pause_seconds)
            request = fake_request(f"r{number}", [1, 2, 3], max_tokens=arrival.num_tokens)
            ranks[arrival.rank].inbox.put(AddRequest(request))
            for index, rank in enumerate(ranks):
                if index != arrival.rank:
                    costs.messages_of_front_end += 1
                    rank.inbox.put(partial(setattr, rank.gate, "is_running", True))
        until(lambda: sum(rank.num_finished for rank in ranks) == len(load))
        until(lambda: not any(rank.gate and rank.gate.is_running for rank in ranks))
        time.sleep(0.2)
        count_passes(costs, [rank.runner for rank in ranks if rank.runner])
        costs.collectives = wave.num_collectives
    return costs


def by_announcements(load: list[Arrival], look_ahead: int) -> Costs:
    """Give a load to a group: a request is submitted to its own rank only."""
    costs = Costs()
    with running_group(SIZE, look_ahead=look_ahead, num_sharing=0) as ranks:
        for number, arrival in enumerate(load):
            time.sleep(arrival.pause_seconds)
            ranks[arrival.rank].add(fake_request(f"r{number}", [1, 2, 3], max_tokens=arrival.num_tokens))
        until(lambda: sum(output.is_leg_finished for rank in ranks for output in rank.outputs) == len(load))
        until(lambda: len({rank.steps for rank in ranks}) == 1 and len(set(ranks[0].steps)) == 1)
        time.sleep(0.2)
        count_passes(costs, [rank.runner for rank in ranks if rank.runner])
        for rank in ranks:
            assert rank.member is not None
            costs.calls += (
                rank.member.counts["sent start_step"] + rank.member.counts["sent start_step to all"]
            )
    return costs


def count_passes(costs: Costs, runners: list[MeetingRunner]) -> None:
    """Count the passes of all ranks."""
    costs.passes = sum(len(runner.passes) for runner in runners)
    costs.dummy_passes = sum(runner.passes.count("dummy") for runner in runners)


def announcement_seconds(*, shares_memory: bool, num_steps: int = 300) -> dict[str, float]:
    """Return the median times of an announcement: for the rank that makes it, and until the input of another one has it."""
    inputs = [Mailbox[Callable[[], None]]() for _ in range(2)]
    plans = group_plans(2, look_ahead=0, num_sharing=2 if shares_memory else 0)
    with ThreadPoolExecutor(2) as pool:
        joining = [
            pool.submit(Member, plan, mine.put, lambda: 1) for plan, mine in zip(plans, inputs, strict=True)
        ]
        other, member = (each.result() for each in joining)
    while inputs[0].num_waiting:  # where it reads the memory for the first time
        inputs[0].get()
    own = []
    until_there = []
    for _ in range(num_steps):
        began = time.perf_counter()
        member.new_step()
        own.append(time.perf_counter() - began)
        inputs[0].get(10.0)
        until_there.append(time.perf_counter() - began)
        time.sleep(0.002)  # as a step's pass would take
    for each in (member, other):
        each.leave()
    until(lambda: member.is_over and other.is_over)
    member.close()
    other.close()
    return {"of_the_rank": median(own), "until_another_has_it": median(until_there)}


async def seconds_until_down(model: Path, number: signal.Signals) -> dict[str, float]:
    """Return how long after the end of each rank's process the others take to end, the last of them."""
    found = {}
    for victim in range(3):
        async with running_engines(model, 3) as engines:
            pids = [await engine.call("pid") for engine in engines]
            began = time.monotonic()
            os.kill(pids[victim], number)
            await asyncio.gather(
                *(engine.died.wait() for index, engine in enumerate(engines) if index != victim)
            )
            found[f"rank {victim}"] = round(time.monotonic() - began, 2)
            if number is signal.SIGSTOP:
                os.kill(pids[victim], signal.SIGKILL)
    return found


def main() -> None:
    """Measure everything, and write the figures."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    figures: dict[str, Any] = {"size": SIZE, "loads": {}}
    for name, load in LOADS.items():
        rows = {"waves": by_waves(load).as_row()}
        for look_ahead in (0, 8, 24):
            rows[f"announced, look-ahead {look_ahead}"] = by_announcements(load, look_ahead).as_row()
        figures["loads"][name] = rows
    figures["announcement_seconds"] = {
        "calls": announcement_seconds(shares_memory=False),
        "memory": announcement_seconds(shares_memory=True),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = make_foreign_checkpoint(Path(folder), "qwen3_moe", seed=3)
        figures["seconds_until_down"] = {
            kind.name: asyncio.run(seconds_until_down(model, kind))
            for kind in (signal.SIGKILL, signal.SIGSTOP)
        }
    print(figures, f"written to {write_result('data_parallel', figures)}", run_facts()["commit"], sep="\n")


if __name__ == "__main__":
    main()
