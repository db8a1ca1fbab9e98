"""Workers that change their roles under load: how soon they serve the new one, and what that costs."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from contract.identity import Role
from contract.membership import RoleOrder
from contract.requests import EngineRequest, SendTransfer
from router.attached_worker import AttachedWorker
from tests.chaos.held_resources import read_metrics
from tests.e2e.cells import COMPLETION
from tests.e2e.in_process import LocalService, LocalWorker, running_in_process

ROLES = [Role.PREFILL, Role.DECODE, Role.DECODE]
"""One or two of each role: requests always wait for the role that one worker has, which another one takes next."""
_MAX_SEQS = 2
_LONG_EACH = 12
_NUM_PREFIXES = 8
_NUM_TAILS = 8
_PREFIX_WORDS = 120
_WORDS = "moose lamp fox comet ginger old sat near the river".split()


class FlipRun:
    """A pool with clients that ask the same questions again and again; every answer is compared with its first one."""

    def __init__(self, service: LocalService, rng: random.Random, num_clients: int) -> None:
        self.service = service
        self.rng = rng
        self.num_answers = 0
        self.wrong: list[str] = []
        self.role_seconds: list[float] = []
        self.leg_seconds: list[float] = []
        self._num_clients = num_clients
        self._questions = [_question(rng, number) for number in range(_NUM_PREFIXES * _NUM_TAILS)]
        self._expected: dict[int, Any] = {}
        self._waiting: dict[str, Callable[[EngineRequest], None]] = {}
        for local in service.workers:
            self._watch_legs(local)

    async def ask_all(self) -> None:
        """Ask each question once, without a change; the answers are those that are expected later."""
        async with aiohttp.ClientSession() as session:
            for number in range(len(self._questions)):
                self._expected[number] = await self._ask(session, number)

    async def keep_asking(self, until: asyncio.Event) -> None:
        """Ask with all clients until the event is set, and wait for the answers."""
        await asyncio.gather(*(self._client(until) for _ in range(self._num_clients)))

    async def flip(self, num_flips: int) -> None:
        """Change the role of one worker after the other, so that each role is always offered by one."""
        for epoch in range(1, num_flips + 1):
            worker, role = await self._next()
            begun = time.monotonic()
            served = self._first_leg(worker.name, role)
            worker.flip(RoleOrder(role=role.value, epoch=epoch))
            async with asyncio.timeout(60):
                while worker.role is not role:
                    await asyncio.sleep(0.001)
                self.role_seconds.append(time.monotonic() - begun)
                self.leg_seconds.append(await served - begun)

    def hits(self) -> Counter[str]:
        """Return how many prompt tokens were looked up in the caches of the workers, and found."""
        total = Counter[str]()
        for local in self.service.workers:
            stats = local.worker.engine.stats.prefix_cache_stats
            total.update(queries=stats.queries, hits=stats.hits)
        return total

    async def metrics(self) -> dict[str, float]:
        """Return the router's counters of moves, flips and replays."""
        admin = self.service.router.addresses.admin
        families = list(text_string_to_metric_families(await read_metrics(admin)))
        kept = ("kvbaton_migrations", "kvbaton_flips", "kvbaton_request_replays")
        samples = [sample for family in families if family.name in kept for sample in family.samples]
        return {
            f"{one.name.removeprefix('kvbaton_')} {' '.join(one.labels.values())}": one.value
            for one in samples
            if one.name.endswith("_total")
        }

    async def until_calm(self) -> None:
        """Wait until every worker is settled, and nothing is held anywhere."""
        path = self.service.router._path
        async with asyncio.timeout(60):
            for worker in path.registry.workers:
                capacity = worker.capacity
                while capacity.credit.is_unsettled or capacity.num_requests or capacity.num_former:
                    await asyncio.sleep(0.01)
            for local in self.service.workers:
                while not _is_free(await local.worker.debug_state()):
                    await asyncio.sleep(0.01)
                await local.worker.engine.call("check_integrity")

    async def _client(self, until: asyncio.Event) -> None:
        async with aiohttp.ClientSession() as session:
            while not until.is_set():
                number = self.rng.randrange(len(self._questions))
                answer = await self._ask(session, number)
                self.num_answers += 1
                if answer != self._expected[number]:
                    self.wrong.append(f"question {number}: {answer}, not {self._expected[number]}")

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> Any:
        url = f"http://{self.service.http}{COMPLETION}"
        async with session.post(url, json=self._questions[number]) as response:
            body = await response.json()
            return body["choices"][0]["token_ids"] if response.status == 200 else body

    async def _next(self) -> tuple[AttachedWorker, Role]:
        """Wait until all workers are settled; return one whose role another one has, with its next role."""
        registry = self.service.router._path.registry
        while registry.views.unsettled:
            await asyncio.sleep(0.002)
        by_role = Counter(worker.role for worker in registry.workers)
        worker = self.rng.choice([worker for worker in registry.workers if by_role[worker.role] > 1])
        return worker, Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL

    def _first_leg(self, name: str, role: Role) -> "asyncio.Future[float]":
        """Return the time at which the worker accepts a leg that only this role has."""
        served = asyncio.get_running_loop().create_future()
        worker = next(one.worker for one in self.service.workers if one.worker.identity.worker_id == name)

        def on_leg(request: EngineRequest) -> None:
            is_prefill = isinstance(request.transfer, SendTransfer)
            if worker.lifecycle.role is role and is_prefill is (role is Role.PREFILL) and not served.done():
                served.set_result(time.monotonic())

        self._waiting[name] = on_leg
        return served

    def _watch_legs(self, local: LocalWorker) -> None:
        worker = local.worker
        accept = worker.accept

        async def watched(request: EngineRequest, session: str = "") -> None:
            await accept(request, session)
            if on_leg := self._waiting.get(worker.identity.worker_id):
                on_leg(request)

        worker.accept = watched  # type: ignore[method-assign]


async def run_flips(
    folder: Path, model: Path, num_flips: int, num_clients: int, rng: random.Random
) -> dict[str, Any]:
    """Run a pool of three workers, change roles ``num_flips`` times under load, and return figures."""
    async with running_in_process(folder, model, ROLES, "shm", max_num_seqs=_MAX_SEQS) as service:
        run = FlipRun(service, rng, num_clients)
        await run.ask_all()
        rate_before = await _hit_rate(run, lambda: asyncio.sleep(5.0))
        answers_before = run.num_answers
        begun = time.monotonic()
        rate = await _hit_rate(run, lambda: run.flip(num_flips))
        seconds = time.monotonic() - begun
        await run.until_calm()
        return {
            "flips": len(run.leg_seconds),
            "clients": num_clients,
            "seconds": round(seconds, 1),
            "answers": run.num_answers - answers_before,
            "wrong": run.wrong[:5],
            "num_wrong": len(run.wrong),
            "role_taken_ms": _quantiles(run.role_seconds),
            "first_leg_ms": _quantiles(run.leg_seconds),
            "hit_rate_before": rate_before,
            "hit_rate": rate,
            **await run.metrics(),
        }


async def _hit_rate(run: FlipRun, work: Callable[[], Any]) -> float:
    """Return which part of the prompts' tokens was found in a cache while ``work`` ran under load."""
    before = run.hits()
    until = asyncio.Event()
    asking = asyncio.create_task(run.keep_asking(until))
    await work()
    until.set()
    await asking
    after = run.hits()
    return round((after["hits"] - before["hits"]) / max(1, after["queries"] - before["queries"]), 3)


def _question(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a seeded request. Most answers are short, so that prompts take as long as answers; some are moved."""
    prefix = random.Random(number // _NUM_TAILS).choices(_WORDS, k=_PREFIX_WORDS)
    prompt = " ".join([*prefix, *rng.choices(_WORDS, k=6)])
    length = rng.randint(16, 32) if number % _LONG_EACH == 0 else rng.randint(2, 4)
    body = {"prompt": prompt, "max_tokens": length, "seed": number, "temperature": 1.2}
    return {**body, "return_token_ids": True, "logit_bias": {"1": -100}}


def _is_free(state: dict[str, Any]) -> bool:
    blocks = state["blocks"]
    return not (blocks["held"] or blocks["quarantined"] or state["leases"] or state["requests"])


def _quantiles(seconds: list[float]) -> dict[str, float]:
    in_order = sorted(seconds)
    at = {
        name: in_order[min(len(in_order) - 1, int(share * len(in_order)))] for name, share in _SHARES.items()
    }
    return {name: round(1000 * value, 1) for name, value in at.items()}


_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
