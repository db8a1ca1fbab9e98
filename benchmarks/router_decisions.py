"""Measures how long a router takes to choose workers for a request, with up to 1,000 workers.

    python -m benchmarks.router_decisions [--rounds 5]

The workers are scripted: nothing is sent to them. Half of them prefill, the others decode. Between two requests 20 of
them report a new load, as workers do after a step, and one of the older requests ends. Each figure is the median over
requests: of the decision alone (``place``, over the views of the workers), and of everything from a request's arrival in
the queue until its credit is held, the new views of changed workers among it.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import deque
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

from benchmarks.facts import RESULTS, command_line, write_result
from contract.identity import Role
from contract.layout import KVLayout
from contract.membership import Credit, Load, Registration
from protos import WORKER_PROTOCOL_MAX
from router.admission.admission_queue import AdmissionQueue
from router.admission.fair_queue import QueueOrder
from router.admission.unreachable_pairs import UnreachablePairs
from router.concurrency import ChangeSignal
from router.routing.policy import PlacementRequest, place
from router.routing.running_shares import RunningShares
from router.workers.attached_worker import AttachedWorker
from router.workers.order_stream import OrderStream
from router.workers.registry import Registry
from tests.fakes.router.worker import kv_layout
from wire.messages import from_proto

_NUM_WORKERS = (2, 100, 1000)
_REQUESTS = 400
_RUNNING_PER_WORKER = 3
_REPORTS = 20
"""Workers that report a load between two requests: a step's tokens and its load are one message."""
_CREDIT = Credit(max_requests=64, max_tokens=200_000)
_LENGTH = 32_768


class Pool:
    """A router's admission queue with scripted workers."""

    def __init__(self, num_workers: int, seed: int) -> None:
        changes = ChangeSignal()
        self.random = random.Random(seed)
        self.registry = Registry(changes)
        self.queue = AdmissionQueue(
            self.registry, changes, UnreachablePairs(), RunningShares(1.0), wait_seconds=30.0
        )
        self.workers = [self._attach(number) for number in range(num_workers)]
        self.running: deque[AsyncExitStack] = deque()

    def _attach(self, number: int) -> AttachedWorker:
        role = (Role.PREFILL, Role.DECODE)[number % 2]
        registration = Registration(
            protocol_min=WORKER_PROTOCOL_MAX,
            protocol_max=WORKER_PROTOCOL_MAX,
            worker_id=f"{role.value}-{number}",
            boot_id="boot",
            role=role.value,
            address="a:1",
            control_address="a:2",
            model_fingerprint="m@float32",
            kv_layout=from_proto(KVLayout, kv_layout()),
            max_model_len=_LENGTH,
        )
        worker = self.registry.new_worker(
            registration, cast(Any, "nothing is called"), OrderStream(registration.worker_id, 10.0)
        )
        self.registry.attach(worker)
        worker.capacity.grant(_CREDIT)
        return worker

    def report_loads(self) -> None:
        """Let some workers report a load."""
        for worker in self.random.sample(self.workers, min(_REPORTS, len(self.workers))):
            running = self.random.randrange(16)
            worker.capacity.report_load(Load(num_running=running, kv_cache_usage=self.random.random() * 0.9))

    def request(self) -> PlacementRequest:
        """Return a request of random lengths."""
        prompt = self.random.randrange(1, 4000)
        answer = self.random.randrange(1, 500)
        return PlacementRequest(
            num_prompt_tokens=prompt, num_answer_tokens=answer, max_length=prompt + answer
        )

    async def begin(self) -> None:
        """Reserve workers for one request, which ends when it is the oldest of those that run."""
        stack = AsyncExitStack()
        stack.enter_context(await self.queue.reserve(self.request(), QueueOrder(tenant="t")))
        self.running.append(stack)

    async def end_all(self) -> None:
        """End all requests."""
        while self.running:
            await self.running.popleft().aclose()
        self.queue.close()


async def measure(num_workers: int, seed: int) -> dict[str, float]:
    """Return the medians of one run, in microseconds."""
    pool = Pool(num_workers, seed)
    for _ in range(_RUNNING_PER_WORKER * num_workers):
        await pool.begin()
        await asyncio.sleep(0)
    decisions: list[float] = []
    reservations: list[float] = []
    for turn in range(_REQUESTS):
        pool.report_loads()
        views = pool.registry.views
        request = pool.request()
        begin = time.perf_counter()
        assert place(views, request, turn)
        decisions.append(time.perf_counter() - begin)
        pool.report_loads()
        begin = time.perf_counter()
        await pool.begin()
        reservations.append(time.perf_counter() - begin)
        await pool.running.popleft().aclose()
        await asyncio.sleep(0)
    await pool.end_all()
    return {
        "decision_us": 1e6 * statistics.median(decisions),
        "reservation_us": 1e6 * statistics.median(reservations),
    }


async def measure_all(rounds: int) -> dict[str, Any]:
    """Return the medians over several runs for each number of workers."""
    figures: dict[str, Any] = {}
    for num_workers in _NUM_WORKERS:
        runs = [await measure(num_workers, seed) for seed in range(rounds)]
        figures[str(num_workers)] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return figures


def table(figures: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    found_for = figures["workers"]
    rows = [
        f"| {int(num_workers):,} | {found['decision_us']:,.0f} µs | {found['reservation_us']:,.0f} µs |"
        for num_workers, found in found_for.items()
    ]
    return "\n".join(
        ["| workers | choice of workers | arrival until the credit is held |", "| --- | --- | --- |", *rows]
    )


def main() -> None:
    """Measure, print the table and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the figures")
    given = parser.parse_args()
    figures = {
        "command": command_line("benchmarks.router_decisions"),
        "workers": asyncio.run(measure_all(given.rounds)),
    }
    print(table(figures))
    write_result("decisions_router", figures, given.results)


if __name__ == "__main__":
    main()
