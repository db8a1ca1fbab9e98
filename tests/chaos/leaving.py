"""Clients that disconnect at every point of a request's life; afterwards everything must be free."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
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
from tests.chaos.footprint import Footprint
from tests.chaos.held_resources import State, read_states, until_free
from tests.chaos.pool.descriptors import processes_of
from tests.chaos.steady import steady_answers
from tests.service import Service, running_service

POOLS = pools(2, 2)
_MAX_READINGS = 20


@dataclass(frozen=True)
class Leave:
    """The point at which a client disconnects: after some seconds or some events; the name is that of the phase meant."""

    phase: str
    after_seconds: float | None = None
    after_events: int | None = None


@dataclass
class LeaveReport:
    """The results of the rounds. ``wrong`` names the streams that differ; it must be empty."""

    phases: dict[str, int] = field(default_factory=dict)
    num_left: int = 0
    num_whole: int = 0
    wrong: list[str] = field(default_factory=list)
    things_before: dict[str, dict[str, int]] = field(default_factory=dict)
    things_after: dict[str, dict[str, int]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


async def run_leaving(
    folder: Path, rng: random.Random, *, transport: str, num_streams: int, num_questions: int = 24
) -> LeaveReport:
    """Run a warm-up round and a measured one: each process must be free after both, and the second must add nothing.

    Pairs of workers may meet in the second round.
    """
    report = LeaveReport()
    async with running_service(folder, *POOLS, "--transport", transport) as service:
        async with connected(service.http, service.grpc) as client:
            references = await steady_answers(client, rng, num_questions, answers=(20, 200))
        await _round(service, references, rng, num_streams, report)
        warm = await _settled(service)
        report.things_before = warm.as_dict()
        await _round(service, references, rng, num_streams, report)
        states = await until_free(
            partial(_read, service), more=lambda states: _footprint(service, states).beyond(warm)
        )
        report.things_after = _footprint(service, states).as_dict()
    return report


async def _read(service: Service) -> dict[str, State]:
    return await read_states([(process["name"], process["admin"]) for process in service.processes])


def _footprint(service: Service, states: Mapping[str, State]) -> Footprint:
    return Footprint.of(
        states, {process["name"]: processes_of(process["pid"]) for process in service.processes}
    )


async def _settled(service: Service) -> Footprint:
    """Return what is open once two readings are equal: sockets of the clients close a little later."""
    before = None
    for _ in range(_MAX_READINGS):
        now = _footprint(service, await until_free(partial(_read, service)))
        if now == before:
            break
        before = now
        await asyncio.sleep(0.5)
    return now


async def _round(
    service: Service, references: Sequence[Answer], rng: random.Random, num_streams: int, report: LeaveReport
) -> None:
    async with connected(service.http, service.grpc) as client, asyncio.TaskGroup() as tasks:
        for number in range(num_streams):
            reference, api = rng.choice(references), rng.choice(list(Api))
            leave = _plan(rng, api, reference.question.max_tokens)
            name = leave.phase if leave else "stays"
            report.phases[name] = report.phases.get(name, 0) + 1
            salt = str(number) if rng.random() < 0.7 else ""
            tasks.create_task(_one(client, reference, api, leave, salt, report))


def _plan(rng: random.Random, api: Api, num_tokens: int) -> Leave | None:
    """Return None for one client in four, which stays; the others disconnect in all phases equally often."""
    if rng.random() < 0.25:
        return None
    by_time = [
        Leave("before anything is sent back", after_seconds=0.0),
        Leave("at once", after_seconds=rng.uniform(0.0, 0.1)),
        Leave("queued or in prefill", after_seconds=rng.uniform(0.1, 3.0)),
    ]
    if api is Api.HTTP_WHOLE:
        return rng.choice([*by_time, Leave("in mid-answer", after_seconds=rng.uniform(3.0, 10.0))])
    by_event = [
        Leave("between token 0 and 1", after_events=1),
        Leave("in mid-stream", after_events=rng.randint(2, max(2, num_tokens - 2))),
        Leave("at the last token", after_events=num_tokens),
    ]
    return rng.choice(by_time + by_event)


async def _one(
    client: Client, reference: Answer, api: Api, leave: Leave | None, salt: str, report: LeaveReport
) -> None:
    asking = client.ask(
        reference.question,
        api,
        timeout_seconds=300,
        leave_after=leave.after_events if leave else None,
        salt=salt,
    )
    try:
        async with asyncio.timeout(leave.after_seconds if leave else None):
            answer = await asking
    except TimeoutError:
        if leave is None or leave.after_seconds is None:
            raise
        report.num_left += 1
        return
    if wrong := mistake_in(answer, reference):
        report.wrong.append(wrong)
    elif answer.has_left:
        report.num_left += 1
    elif answer.is_whole:
        report.num_whole += 1
    else:
        report.wrong.append(f"question {answer.question.number}: {answer.error_kind}: {answer.error}")
