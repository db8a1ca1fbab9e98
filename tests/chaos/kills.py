"""Random workers are killed under load, again and again: a stream may pause but must not change."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count as count_up
from pathlib import Path
from typing import Any

from tests.chaos.clients import (
    Answer,
    Api,
    Client,
    connected,
    mistake_in,
    pools,
)
from tests.chaos.held_resources import State, count, read_states, until_free
from tests.chaos.models import DEMO, ChaosModel
from tests.chaos.steady import steady_answers
from tests.service import Service, counter, running_service

APIS = (Api.GRPC, Api.GRPC, Api.HTTP_STREAM, Api.HTTP_WHOLE)


@dataclass
class KillReport:
    """The results of a run of kills. ``wrong`` and ``failed`` name streams; both must be empty."""

    num_kills: dict[str, int] = field(default_factory=dict)
    num_skipped: int = 0
    num_whole: int = 0
    num_tokens: int = 0
    num_replays: float = 0
    num_local_recomputes: float = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


async def run_kills(
    folder: Path,
    rng: random.Random,
    *,
    transport: str,
    seconds: float,
    model: ChaosModel = DEMO,
    num_each: int = 3,
    min_kills: int = 0,
    every_seconds: float = 6.0,
    num_streams: int = 24,
    num_questions: int = 48,
    longest_answer: int = 600,
) -> KillReport:
    """Keep ``num_streams`` clients busy for ``seconds`` while workers are killed, and compare every answer.

    num_each: the number of workers of each role. min_kills: the run goes on until so many were killed, three times as long
    at most: a pool is slow to start its workers again. Raises AssertionError if something is held after all answers.
    """
    report = KillReport()
    checkpoint = await asyncio.to_thread(model.folder, folder)
    flags = (*pools(num_each, num_each), "--model", str(checkpoint), "--transport", transport)
    async with (
        running_service(folder, *flags) as service,
        connected(service.http, service.grpc) as client,
    ):
        references = await steady_answers(
            client, rng, num_questions, checkpoint, **model.ranges(longest_answer)
        )
        stopped = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_streams):
                own = random.Random(rng.getrandbits(64))
                tasks.create_task(_keep_asking(client, references, own, number, stopped, report))
            await _kill_again_and_again(service, rng, seconds, every_seconds, min_kills, report)
            stopped.set()
        await until_free(partial(_read, service))
        metrics = await service.metrics("router")
        report.num_replays = count(metrics, "kvbaton_request_replays_total")
        report.num_local_recomputes = counter(metrics, "kvbaton_request_local_recomputes_total")
    return report


async def _keep_asking(
    client: Client,
    references: Sequence[Answer],
    rng: random.Random,
    number: int,
    stopped: asyncio.Event,
    report: KillReport,
) -> None:
    for turn in count_up():
        if stopped.is_set():
            return
        reference = rng.choice(references)
        salt = f"{number}.{turn}" if rng.random() < 0.5 else ""
        answer = await client.ask(reference.question, rng.choice(APIS), salt=salt)
        _note(report, answer, reference)


def _note(report: KillReport, answer: Answer, reference: Answer) -> None:
    if wrong := mistake_in(answer, reference):
        report.wrong.append(wrong)
    elif answer.is_whole:
        report.num_whole += 1
        report.num_tokens += len(reference.token_ids)
    else:
        report.failed.append(f"question {answer.question.number}: {answer.error_kind}: {answer.error}")


async def _kill_again_and_again(
    service: Service,
    rng: random.Random,
    seconds: float,
    every_seconds: float,
    min_kills: int,
    report: KillReport,
) -> None:
    began = time.monotonic()
    while (passed := time.monotonic() - began) < 3 * seconds:
        if passed >= seconds and sum(report.num_kills.values()) >= min_kills:
            break
        await asyncio.sleep(every_seconds)  # the interval between kills, not a wait for an event
        victim = await _victim(service, rng)
        if victim is None:
            report.num_skipped += 1
            continue
        role, pid = victim
        os.kill(pid, signal.SIGKILL)
        report.num_kills[role] = report.num_kills.get(role, 0) + 1


async def _read(service: Service) -> dict[str, State]:
    """Return the states of the router and of the workers that are attached to it now."""
    admin = _router_admin(service)
    workers = (await service.state_of(admin))["workers"]
    return await read_states(
        [("router", admin), *((worker["worker_id"], worker["admin_address"]) for worker in workers)]
    )


def _router_admin(service: Service) -> str:
    return str(next(process["admin"] for process in service.processes if process["role"] == "router"))


async def _victim(service: Service, rng: random.Random) -> tuple[str, int] | None:
    """Return a worker, or its engine's process, whose role another ready worker has too; None if there is none."""
    state = await service.state_of(_router_admin(service))
    workers = [worker for worker in state["workers"] if worker["max_requests"]]
    ready = Counter(worker["role"] for worker in workers)
    spare = [worker for worker in workers if ready[worker["role"]] > 1]
    if not spare:
        return None
    worker = rng.choice(spare)
    if rng.random() < 0.3:
        state = await service.state_of(worker["admin_address"])
        return f"engine of {worker['role']}", state["engine_process"]["pid"]
    return worker["role"], worker["pid"]
