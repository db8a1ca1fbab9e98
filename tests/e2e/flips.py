"""Workers that change their roles under load: how soon they serve the new one, and what that costs."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from contract.identity import Role
from contract.membership import RoleOrder
from router.service import RouterService
from router.workers.attached_worker import AttachedWorker
from tests.chaos.clients import VOCABULARY, Answer, Api, Question
from tests.chaos.fleet import Fleet
from tests.chaos.held_resources import read_metrics, read_states, until_free
from tests.chaos.local_router import running_workers
from tests.chaos.steady import is_steady, noisy_models
from tests.e2e.cells import COMPLETION
from tests.e2e.flip_clients import Answers, ask, asking, write_questions
from tests.e2e.flip_times import FirstLegs, FlipTimes, quantiles_ms, watch_first_leg

WORKERS = ("prefill-0", "decode-1", "decode-2")
"""One or two of each role: another one takes the role that one worker has."""
MAX_NUM_SEQS = 4
"""The requests of each worker: so few that the others wait for a worker, and not for the cores."""
_UNDISTURBED_SECONDS = 5.0
_FLIP_SECONDS = 60.0
_LONG_EACH = 12
_NUM_PREFIXES = 8
_NUM_TAILS = 8
_PREFIX_TOKENS = 160
_MOST_UNSTEADY = 64
"""The number of questions that may be replaced, since their answers depend on rounding."""


class FlipRun:
    """A pool with clients that ask the same questions again and again; every answer is compared with its first one.

    Workers and clients run in processes of their own, and the router here.
    """

    def __init__(
        self, router: RouterService, fleet: Fleet, folder: Path, num_clients: int, rng: random.Random
    ) -> None:
        self.times: list[FlipTimes] = []
        self._path = router._path
        self._router = router
        self._fleet = fleet
        self._rng = rng
        self._num_clients = num_clients
        self._questions = folder / "questions"
        self._legs = {worker.name: FirstLegs(worker) for worker in self._path.registry.workers}

    @property
    def _url(self) -> str:
        return f"http://{self._router.addresses.http}{COMPLETION}"

    async def ask_all(self) -> None:
        """Ask each question once, without a change; the answers are those that are expected later.

        A question whose answer depends on rounding is replaced: its batch would decide on the answer.
        """
        models = await asyncio.to_thread(noisy_models)
        steady: list[Answer] = []
        async with aiohttp.ClientSession() as session:
            for _ in range(_NUM_PREFIXES * _NUM_TAILS + _MOST_UNSTEADY):
                question = _question(self._rng, len(steady))
                tokens = await ask(session, self._url, _body(question))
                assert isinstance(tokens, list), tokens
                answer = Answer(question, Api.HTTP_WHOLE, tokens)
                if await asyncio.to_thread(is_steady, answer, models):
                    steady.append(answer)
                if len(steady) == _NUM_PREFIXES * _NUM_TAILS:
                    break
            else:
                raise AssertionError(f"only {len(steady)} questions do not depend on rounding")
        bodies = [_body(answer.question) for answer in steady]
        write_questions(self._questions, bodies, [answer.token_ids for answer in steady])

    async def under_load(self, work: Callable[[], Awaitable[None]]) -> tuple[Answers, float]:
        """Do ``work`` under load; return the answers, and which part of the prompts' tokens was found in a cache."""
        before = self._hits()
        async with asking(self._url, self._questions, self._num_clients) as answers:
            await work()
        after = self._hits()
        queries = after["queries"] - before["queries"]
        return answers, round((after["hits"] - before["hits"]) / max(1, queries), 3)

    async def flip(self, num_flips: int) -> None:
        """Change the role of one worker after the other, so that each role is always offered by one."""
        for epoch in range(1, num_flips + 1):
            worker, role = await self._next()
            async with asyncio.timeout(_FLIP_SECONDS):
                await self._flip(worker, role, epoch)

    async def metrics(self) -> dict[str, float]:
        """Return the router's counters of moves, flips and replays."""
        families = list(text_string_to_metric_families(await read_metrics(self._router.addresses.admin)))
        kept = ("kvbaton_migrations", "kvbaton_flips", "kvbaton_request_replays")
        samples = [sample for family in families if family.name in kept for sample in family.samples]
        return {
            f"{one.name.removeprefix('kvbaton_')} {' '.join(one.labels.values())}": one.value
            for one in samples
            if one.name.endswith("_total")
        }

    async def until_calm(self) -> None:
        """Wait until every worker is settled, and nothing is held anywhere."""
        async with asyncio.timeout(_FLIP_SECONDS):
            while self._path.registry.views.unsettled:
                await asyncio.sleep(0.01)
        admins = [(name, facts["admin"]) for name, facts in self._fleet.facts.items()]
        await until_free(
            lambda: read_states([*admins, ("router", self._router.addresses.admin)]), _FLIP_SECONDS
        )

    async def _flip(self, worker: AttachedWorker, role: Role, epoch: int) -> None:
        capacity = worker.capacity
        times = FlipTimes()
        served = self._legs[worker.name].next(role)
        begun = time.monotonic()
        worker.flip(RoleOrder(role=role.value, epoch=epoch))
        await self._path.wait_until(lambda: worker.role is role and not capacity.ordered)
        times.taken = time.monotonic() - begun
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        await watch_first_leg(self._path, other, times, served)
        times.first_leg = served.result()[1] - begun
        while capacity.credit.is_unsettled:
            await asyncio.sleep(0.001)
        times.settled = time.monotonic() - begun
        self.times.append(times)

    async def _next(self) -> tuple[AttachedWorker, Role]:
        """Return a worker whose role another one has, with its next role."""
        workers = self._path.registry.workers
        by_role = Counter(worker.role for worker in workers)
        worker = self._rng.choice([worker for worker in workers if by_role[worker.role] > 1])
        return worker, Role.DECODE if worker.role is Role.PREFILL else Role.PREFILL

    def _hits(self) -> Counter[str]:
        """Return how many prompt tokens were looked up in the caches of the workers, and found, by the last reports."""
        total = Counter[str]()
        for worker in self._path.registry.workers:
            load = worker.capacity.load
            total.update(queries=load.prefix_cache_queries or 0, hits=load.prefix_cache_hits or 0)
        return total


async def run_flips(
    folder: Path, num_flips: int, num_clients: int, rng: random.Random, max_num_seqs: int = MAX_NUM_SEQS
) -> dict[str, Any]:
    """Run a pool of three workers of the demo model, change roles ``num_flips`` times under load, and return figures."""
    async with running_workers(folder, WORKERS, transport="shm", max_num_seqs=max_num_seqs) as (
        router,
        fleet,
    ):
        await router.wait_ready()
        run = FlipRun(router, fleet, folder, num_clients, rng)
        await run.ask_all()
        before, rate_before = await run.under_load(lambda: asyncio.sleep(_UNDISTURBED_SECONDS))
        begun = time.monotonic()
        answers, rate = await run.under_load(lambda: run.flip(num_flips))
        seconds = time.monotonic() - begun
        await run.until_calm()
        wrong = before.wrong + answers.wrong
        return {
            "flips": len(run.times),
            "clients": num_clients,
            "max_num_seqs": max_num_seqs,
            "seconds": round(seconds, 1),
            "answers": answers.num_answers,
            "answers_per_second": {
                "before": round(before.num_answers / _UNDISTURBED_SECONDS, 1),
                "with_flips": round(answers.num_answers / seconds, 1),
            },
            "wrong": wrong[:5],
            "num_wrong": len(wrong),
            **{
                f"{field.name}_ms": quantiles_ms([getattr(times, field.name) for times in run.times])
                for field in fields(FlipTimes)
            },
            "hit_rate_before": rate_before,
            "hit_rate": rate,
            **await run.metrics(),
        }


def _question(rng: random.Random, number: int) -> Question:
    """Return a seeded request. Most answers are short, so that prompts take as long as answers; some are moved."""
    prefix = random.Random(number // _NUM_TAILS).choices(VOCABULARY, k=_PREFIX_TOKENS)
    prompt = (*prefix, *rng.choices(VOCABULARY, k=6))
    length = rng.randint(8, 16) if number % _LONG_EACH == 0 else rng.randint(2, 4)
    return Question(number, prompt, length, temperature=1.2, seed=rng.getrandbits(40))


def _body(question: Question) -> dict[str, Any]:
    body = question.as_body(stream=False)
    del body["model"]
    return {**body, "return_token_ids": True}
