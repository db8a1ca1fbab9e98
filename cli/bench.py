"""``kvbaton bench --profile``: measures the times of a running service, and writes the autoscaler's timing model of it.

The service splits the time of each answer (``timings``): the prompt's computation, the wait for its KV, and the steps of
its answer. So requests from outside suffice, whatever the workers run on. Nothing else may use the service meanwhile.
Answers are streamed, and each decode worker continues one while prompts are measured: as in use, where workers that share
cores slow each other down.
"""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import aiohttp

from autoscaler.routers import num_arrived, parse_counts
from autoscaler.timing_model import (
    PromptSample,
    StepSample,
    TimingModel,
    fit_prefill,
    fit_step,
    fit_transfer,
    write_timing,
)
from cli.ask import error_of, events, served_length
from cli.endpoint import Endpoint, endpoint_at, local_endpoint
from contract.addresses import local_address
from contract.errors import KvbatonError, SettingError, UnavailableError
from contract.identity import Role
from launch.arguments import parse
from launch.client_settings import BenchSettings
from launch.kept_process import Facts
from launch.local_cluster import run_local
from launch.processes import ROUTER
from launch.router_admin import RouterAdmin, admin_session
from serving import signals
from serving.logs import configure_logs

_SHORTEST = 16
_ANSWER_TOKENS = 64
_PROMPTS_IN_ROUND = 5
_LARGEST_BATCH = 64
_READY_SECONDS = 30.0
_PAUSE_SECONDS = 0.1
_AGAIN = "measure again when nothing else uses it"

S = TypeVar("S", PromptSample, StepSample)
Note = Callable[[str], None]
"""Called with a line about each measurement."""
_UNKNOWN_START_SECONDS = 60.0
"""The time of a start of a service that runs already."""


def bench(arguments: Sequence[str]) -> None:
    """Run ``kvbaton bench``."""
    settings = parse(BenchSettings, "kvbaton bench", arguments)
    settings.refuse_contradictions()
    configure_logs("bench", settings.log_level)
    if settings.url is not None:
        endpoint = endpoint_at(settings.url, settings)
        signals.run(_profile(settings, endpoint, settings.admin or "", _UNKNOWN_START_SECONDS))
        return
    begin = time.monotonic()

    async def use(facts: dict[str, Facts], _: asyncio.Event) -> None:
        seconds = time.monotonic() - begin
        admin = local_address(facts[ROUTER]["admin"])
        await _profile(settings, local_endpoint(settings, facts[ROUTER]), admin, seconds)

    run_local(settings, use)


async def _profile(settings: BenchSettings, endpoint: Endpoint, admin: str, start_seconds: float) -> None:
    """Measure the service and write the file. start_seconds: those of a start, unless the settings have them."""
    async with admin_session(settings.admin_key) as session:
        router = RouterAdmin(admin, session)
        model = await profile(
            endpoint,
            router,
            settings.start_seconds or start_seconds,
            settings.longest_prompt,
            lambda line: print(line, flush=True),
            rounds=settings.rounds,
            seed=settings.seed,
        )
    write_timing(settings.output, model)
    print(f"{settings.output} is written", flush=True)


async def profile(
    endpoint: Endpoint,
    admin: RouterAdmin,
    start_seconds: float,
    longest: int,
    note: Note,
    *,
    rounds: int = 1,
    seed: int = 0,
) -> TimingModel:
    """Measure a service that nothing else uses; see ``Profiler.measure``. admin: of one of its routers.

    Raises UnavailableError if that router has had requests of others: they and the measurement slow each other down.
    """
    pool = await _ready_pool(admin)
    before = parse_counts(await admin.metrics())
    if num_held := int(before.sums["num_requests_running"] + before.sums["num_requests_waiting"]):
        raise UnavailableError(f"the service answers {num_held} requests of others: {_AGAIN}")
    async with endpoint.open_session(max_connections=0) as session:
        profiler = Profiler(endpoint, session, pool, seed)
        measured = await profiler.measure(start_seconds, longest, rounds, note)
    after = parse_counts(await admin.metrics())
    # A router that counts fewer is one of several: the others' counts are not read, so only more of them is proof.
    num_others = int(num_arrived(before, after)) - profiler.num_asked
    if num_others > 0:
        raise UnavailableError(
            f"the service has answered {num_others} requests of others meanwhile: {_AGAIN}"
        )
    return measured


@dataclass(frozen=True)
class _Measured:
    """One answer: tokens of its prompt, the parts of its time in seconds, and when it was complete."""

    num_prompt_tokens: int
    parts: dict[str, float]
    end: float

    @property
    def begin(self) -> float:
        """The time of its second token, from which on it is decoded in steps."""
        return self.end - self.parts["decode"]


class Profiler:
    """Sends prompts to a service. pool: what its router lists about the workers."""

    def __init__(
        self, endpoint: Endpoint, session: aiohttp.ClientSession, pool: dict[str, Any], seed: int
    ) -> None:
        self._endpoint = endpoint
        self._session = session
        self._decode = _workers_for(Role.DECODE, pool)
        self._has_pairs = all(worker["role"] == Role.DECODE.value for worker in self._decode)
        self._random = random.Random(seed)
        self._tokens_per_word = 1.0
        self._model = ""
        self.num_asked = 0
        """Prompts that were sent."""

    async def measure(self, start_seconds: float, longest: int, rounds: int, note: Note) -> TimingModel:
        """Measure prompts and batches, and return the model that fits them. start_seconds: taken over as it is.

        longest: tokens of the longest prompt; half of the model's length if that is less. Each round measures everything,
        and medians of the rounds count: a machine is slow for seconds at a time. Raises KvbatonError for an error of the
        service.
        """
        self._model, length = await served_length(self._endpoint)
        if length is not None:
            longest = max(_SHORTEST, min(longest, length // 2))
        # The tokens of a word depend on the model's vocabulary: lengths are set in words, and measured in tokens.
        first = await self._ask(16, 2)
        self._tokens_per_word = first.num_prompt_tokens / 16
        found = [await self._round(longest, note) for _ in range(rounds)]
        prompts = [_median(same) for same in zip(*(prompts for prompts, _ in found), strict=True)]
        steps = [_median(same) for same in zip(*(steps for _, steps in found), strict=True)]
        most = min(worker["max_requests"] for worker in self._decode)
        return TimingModel(
            origin="measured",
            description=f"model {self._model}; prompts of {_SHORTEST} to {longest} tokens, batches up to "
            f"{max(step.num_answers for step in steps):.0f} answers",
            prefill=fit_prefill(prompts),
            decode=(fit_step(steps),),
            transfer=fit_transfer(prompts),
            kv_tokens=min(worker["max_tokens"] for worker in self._decode),
            max_answers=most,
            start_seconds=start_seconds,
        )

    async def _round(self, longest: int, note: Note) -> tuple[list[PromptSample], list[StepSample]]:
        async with self._answers_beside(longest):
            doubling = [_SHORTEST * 2**power for power in range(30) if _SHORTEST * 2**power < longest]
            prompts = [await self._prompt(tokens, note) for tokens in (*doubling, longest)]
        steps = [
            await self._step(size, tokens, note)
            for tokens in (_SHORTEST, longest // 2)
            for size in self._batches(tokens)
        ]
        return prompts, steps

    async def _prompt(self, num_tokens: int, note: Note) -> PromptSample:
        measured = [await self._ask(self._num_words(num_tokens), 2) for _ in range(_PROMPTS_IN_ROUND)]
        prefill = statistics.median(one.parts["prefill"] for one in measured)
        transfer = statistics.median(one.parts["transfer"] for one in measured)
        note(f"a prompt of {measured[0].num_prompt_tokens} tokens: {1e3 * prefill:.1f} ms")
        return PromptSample(measured[0].num_prompt_tokens, prefill, transfer)

    @asynccontextmanager
    async def _answers_beside(self, num_tokens: int) -> AsyncIterator[None]:
        """Have each decode worker continue one answer; none where the workers compute the prompts themselves.

        num_tokens: of each answer; when it ends, another one begins. Raises the error that one of them ended with.
        """

        async def answer() -> None:
            while True:
                await self._ask(self._num_words(_SHORTEST), num_tokens)

        answers = [asyncio.create_task(answer()) for _ in self._decode if self._has_pairs]
        try:
            yield
        finally:
            for task in answers:
                task.cancel()
            ends = await asyncio.gather(*answers, return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception):
                raise error

    async def _step(self, size: int, num_tokens: int, note: Note) -> StepSample:
        """Measure the steps of at most ``size`` answers on each decode worker: some begin when others have ended."""
        words = self._num_words(num_tokens)
        total = size * len(self._decode)
        answers = await asyncio.gather(*(self._ask(words, _ANSWER_TOKENS) for _ in range(total)))
        together = statistics.median(_num_beside(one, answers) for one in answers) / len(self._decode)
        # The first token is the prefill's, and the second one ends with the first step, which is timed apart.
        seconds = statistics.median(one.parts["decode"] for one in answers) / (_ANSWER_TOKENS - 2)
        context = statistics.mean(one.num_prompt_tokens for one in answers) + _ANSWER_TOKENS / 2
        note(f"a step of {together:.1f} answers of {context:.0f} tokens: {1e3 * seconds:.2f} ms")
        return StepSample(together, together * context, seconds)

    def _batches(self, num_tokens: int) -> list[int]:
        """Return sizes of batches that fit every decode worker: 1, 2, 4 and so on."""
        held = min(worker["max_tokens"] for worker in self._decode) // (2 * num_tokens + _ANSWER_TOKENS)
        most = min(_LARGEST_BATCH, held, *(worker["max_requests"] for worker in self._decode))
        return [2**power for power in range(most.bit_length())] or [1]

    def _num_words(self, num_tokens: int) -> int:
        return max(2, round(num_tokens / self._tokens_per_word))

    async def _ask(self, num_words: int, num_answer_tokens: int) -> _Measured:
        """Stream the answer to a prompt of random words, which no cache has."""
        self.num_asked += 1
        url = self._endpoint.url
        body = {
            "model": self._model,
            "prompt": " ".join(str(self._random.randrange(10)) for _ in range(num_words)),
            "max_tokens": num_answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "timings": True,
        }
        try:
            async with self._session.post(f"{url}/v1/completions", json=body) as reply:
                if reply.status != 200:
                    raise await error_of(url, reply)
                return await _measured(url, reply)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UnavailableError(f"{url} does not answer: {error}") from error


async def _measured(url: str, reply: aiohttp.ClientResponse) -> _Measured:
    timings: dict[str, Any] | None = None
    num_prompt_tokens: int | None = None
    async for event in events(url, reply):
        timings = event.get("kvbaton", {}).get("timings", timings)
        num_prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", num_prompt_tokens)
    if timings is None or num_prompt_tokens is None:
        raise KvbatonError(f"{url} sends no timings: it is no kvbaton service")
    parts = {name: float(timings[name]) for name in ("prefill", "transfer", "decode")}
    return _Measured(num_prompt_tokens, parts, time.monotonic())


async def _ready_pool(admin: RouterAdmin) -> dict[str, Any]:
    """Return what a router lists, when each decode worker accepts requests. Raises UnavailableError after half a minute."""
    end = time.monotonic() + _READY_SECONDS
    while True:
        pool = await admin.pool()
        slow = [worker["id"] for worker in _workers_for(Role.DECODE, pool) if not worker["max_requests"]]
        if not slow:
            return pool
        if time.monotonic() > end:
            raise UnavailableError(f"worker {slow[0]} accepts no requests: there is nothing to measure")
        await asyncio.sleep(_PAUSE_SECONDS)


def _num_beside(one: _Measured, answers: Sequence[_Measured]) -> float:
    """Return how many answers were decoded at a time, in the mean, while this one was; itself included."""
    seconds = one.end - one.begin
    if seconds <= 0.0:
        return 1.0
    overlaps = (min(one.end, other.end) - max(one.begin, other.begin) for other in answers)
    return max(1.0, sum(max(0.0, overlap) for overlap in overlaps) / seconds)


def _median(samples: Sequence[S]) -> S:
    """Return the medians of measurements of the same prompts or batches, one of each round."""
    return type(samples[0])(*map(statistics.median, zip(*map(astuple, samples), strict=True)))


def _workers_for(role: Role, pool: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the workers that serve legs of a role. Raises SettingError without any."""
    found = [worker for worker in pool["workers"] if worker["role"] in (role.value, Role.AGGREGATED.value)]
    if not found:
        raise SettingError(f"no {role.value} worker is attached: there is nothing to measure")
    return found
