"""Runs a load on a service whose pools scale themselves, and records what both do."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from autoscaler.policy import Goals
from autoscaler.signals import POOLS
from benchmarks.simulation.load import Arrival
from benchmarks.streams import Stream, StreamError, stream
from contract.errors import KvbatonError
from contract.identity import Role
from launch.router_admin import RouterAdmin

_SAMPLE_SECONDS = 1.0
_ANSWER_SECONDS = 120.0
_SETTLE_SECONDS = 120.0
_TOKEN_IDS = range(3, 200)


@dataclass(frozen=True)
class Sample:
    """The pools at one time. desired: None before the first decision. existing: attached workers in any state."""

    time: float
    serving: dict[Role, int]
    desired: dict[Role, int | None]
    existing: dict[Role, int]
    num_waiting: int


@dataclass
class Recording:
    """Everything that was seen. errors: of the requests without a whole answer. decisions: the logged lines.

    num_unread: samples that are missing, since the router did not answer.
    """

    begin: float = field(default_factory=time.perf_counter)
    answers: list[Stream] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    decisions: list[tuple[float, str]] = field(default_factory=list)
    num_flips: int = 0
    num_unread: int = 0

    @property
    def now(self) -> float:
        """The seconds since the begin of the load."""
        return time.perf_counter() - self.begin

    def attainment(self, goals: Goals) -> float:
        """Return the share of the requests that met both goals; one without an answer has missed them."""
        num_good = sum(one.ttft <= goals.ttft and one.tpot <= goals.itl for one in self.answers)
        return num_good / max(1, len(self.answers) + len(self.errors))

    def worker_hours(self, role: Role, until: float = math.inf) -> float:
        """Return the hours up to ``until`` of the workers that existed, or were ordered and not attached yet."""
        numbers = [max(one.existing[role], one.desired[role] or 0) for one in self.samples]
        times = [min(one.time, until) for one in self.samples]
        spans = zip(numbers, times, times[1:], strict=False)
        return sum(number * (end - start) for number, start, end in spans) / 3600.0

    def most(self, role: Role) -> int:
        """Return the greatest number of workers of a pool that served at once."""
        return max((one.serving[role] for one in self.samples), default=0)

    def starts(self) -> list[float]:
        """Return how long each growth of both pools together took, from the decision until all of their workers served."""
        desired = [
            sum(one.serving[role] if number is None else number for role, number in one.desired.items())
            for one in self.samples
        ]
        found = []
        for number, (before, after) in enumerate(pairwise(desired), 1):
            ready = [one.time for one in self.samples[number:] if sum(one.serving.values()) >= after]
            if before < after and ready:
                found.append(round(ready[0] - self.samples[number].time, 1))
        return found

    def seconds_to_grow(self, role: Role, begin: float) -> float | None:
        """Return the time from ``begin`` to the first worker more that serves; None if the pool has not grown since."""
        before = [one.serving[role] for one in self.samples if one.time < begin]
        later = [one for one in self.samples if one.time >= begin]
        number = before[-1] if before else 0
        return next((one.time - begin for one in later if one.serving[role] > number), None)


class _DecisionLines(logging.Handler):
    """Keeps the decisions that the controller logs."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(logging.INFO)
        self._recording = recording

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO and " | " in (line := record.getMessage()):
            self._recording.decisions.append((round(self._recording.now, 1), line))


async def record(base: str, model: str, router: RouterAdmin, load: Sequence[Arrival], seed: int) -> Recording:
    """Send the load to a service, wait until the pools are as they should be, and return what happened.

    base: the address of its HTTP API. router: any of its routers. Decisions are recorded if they are made in this process.
    """
    recording = Recording()
    lines = _DecisionLines(recording)
    controller = logging.getLogger("autoscaler.controller")
    controller.addHandler(lines)
    watching = asyncio.create_task(_watch(router, recording))
    try:
        await _send(base, model, load, random.Random(seed), recording)
        await _until_settled(recording)
        recording.num_flips = _flips(await router.metrics())
    finally:
        controller.removeHandler(lines)
        watching.cancel()
        await asyncio.wait({watching})
    return recording


async def _send(
    base: str, model: str, load: Sequence[Arrival], numbers: random.Random, recording: Recording
) -> None:
    """Send each request at its time, whatever the others do, and wait for all answers."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as tasks:

        async def ask(arrival: Arrival) -> None:
            prompt = numbers.choices(_TOKEN_IDS, k=arrival.prompt_tokens)
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    recording.answers.append(
                        await stream(session, base, model, prompt, arrival.answer_tokens)
                    )
            except (StreamError, aiohttp.ClientError, TimeoutError) as error:
                recording.errors.append(repr(error))

        for arrival in load:
            await asyncio.sleep(max(0.0, arrival.time - recording.now))
            tasks.create_task(ask(arrival))


async def _watch(router: RouterAdmin, recording: Recording) -> None:
    while True:
        try:
            recording.samples.append(_sample(recording.now, await router.pool()))
        except KvbatonError:
            recording.num_unread += 1
        await asyncio.sleep(_SAMPLE_SECONDS)


def _sample(now: float, pool: dict[str, Any]) -> Sample:
    loads = pool["pools"]
    return Sample(
        time=now,
        serving={role: loads[role.value]["num_serving"] for role in POOLS},
        desired={role: loads[role.value].get("desired_workers") for role in POOLS},
        existing={role: loads[role.value]["num_workers"] for role in POOLS},
        num_waiting=pool["num_requests_waiting"],
    )


async def _until_settled(recording: Recording) -> None:
    """Wait until every pool has the desired number of serving workers, or for two minutes."""
    end = recording.now + _SETTLE_SECONDS
    while recording.now < end:
        await asyncio.sleep(_SAMPLE_SECONDS)
        last = recording.samples[-1]
        if all(last.serving[role] == last.desired[role] for role in POOLS):
            return


def _flips(metrics: str) -> int:
    lines = [line for line in metrics.splitlines() if line.startswith("kvbaton_flips_total{")]
    return round(sum(float(line.rpartition(" ")[2]) for line in lines))
