"""The router's role: each question is sent to both workers, and again as a new attempt when one fails."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from contract.errors import ErrorKind
from contract.identity import Role
from contract.outputs import EngineOutput, FinishReason
from contract.requests import EngineRequest, SendTransfer
from contract.sampling import SamplingParams
from tests.fakes.engine.fakes import CRASH_TOKEN, fake_answer
from tests.transfer_faults.pool import LAYOUT
from tests.transfer_faults.workers import Worker

MAX_PROMPT_BLOCKS = 8
MAX_ANSWER = 10
_DEADLINE_SECONDS = 60.0
_MAX_PAUSE_SECONDS = 0.1
_LOST_SHARE = 0.03
_NOTIFIED = ((Role.PREFILL, Role.DECODE), (Role.PREFILL, Role.DECODE), (Role.PREFILL,), (Role.DECODE,))
_BUGS = frozenset({ErrorKind.INTERNAL, ErrorKind.INVALID_REQUEST})
"""Kinds of errors that no external fault may cause."""


@dataclass(frozen=True)
class Question:
    """A prompt and the one right answer.

    keeps_transfer: every attempt has the same transfer id. notified: the workers that get the end of an abandoned
    attempt; others have to detect it. lost: the worker whose leg of the first attempt never arrives.
    """

    request_id: str
    prompt: list[int]
    answer: list[int]
    keeps_transfer: bool
    notified: tuple[Role, ...]
    lost: Role | None

    def transfer_id(self, attempt: int) -> str:
        """Return the transfer id of this attempt."""
        return f"t-{self.request_id}" if self.keeps_transfer else f"t-{self.request_id}.{attempt}"


def draw_questions(rng: random.Random, schedule: int) -> list[Question]:
    """Draw a few prompts, many with a common prefix."""
    families = [_tokens(rng, MAX_PROMPT_BLOCKS * LAYOUT.block_size) for _ in range(2)]
    return [_draw_question(rng, families, f"{schedule}-{number}") for number in range(rng.randint(1, 6))]


def _draw_question(rng: random.Random, families: Sequence[list[int]], name: str) -> Question:
    length = rng.randint(1, MAX_PROMPT_BLOCKS * LAYOUT.block_size)
    shared = rng.choice((0, length // 2, length))
    prompt = rng.choice(families)[:shared] + _tokens(rng, length - shared)
    return Question(
        request_id=name,
        prompt=prompt,
        answer=fake_answer(prompt, rng.randint(1, MAX_ANSWER)),
        keeps_transfer=rng.random() < 0.5,
        notified=rng.choice(_NOTIFIED),
        lost=rng.choice((Role.PREFILL, Role.DECODE)) if rng.random() < _LOST_SHARE else None,
    )


def _tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(CRASH_TOKEN) for _ in range(num)]


@dataclass
class Tally:
    """The results of all requests. ``broken`` describes each violated promise."""

    num_whole: int = 0
    num_cancelled: int = 0
    num_attempts: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, other: "Tally", where: str) -> None:
        """Add another tally; ``where`` is appended to its violations."""
        self.num_whole += other.num_whole
        self.num_cancelled += other.num_cancelled
        self.num_attempts += other.num_attempts
        self.errors += other.errors
        self.broken += [f"{what} ({where})" for what in other.broken]


@dataclass
class _Attempt:
    """The result of one attempt. ``over``: set after an error, or when all its tokens have come."""

    number: int
    tokens: dict[int, int] = field(default_factory=dict)
    error: str | None = None
    over: asyncio.Event = field(default_factory=asyncio.Event)


class RequestClient:
    """Sends one question until it is answered or cancelled, or its deadline has passed.

    ``delivered``: the beginning of the answer that the client has. Legs of old attempts stay in ``legs`` until they end.
    """

    def __init__(self, question: Question, prefill: Worker, decode: Worker, tally: Tally) -> None:
        self.question, self.tally = question, tally
        self.delivered: list[int] = []
        self.attempt = 0
        self.is_cancelled = asyncio.Event()
        self.is_over = False
        self.legs: set[asyncio.Task[None]] = set()
        self._prefill, self._decode = prefill, decode

    async def ask(self) -> None:
        """Run until the question has ended."""
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                await self._until_answered()
        except TimeoutError:
            self._break(f"no end after {self.attempt + 1} attempts; {len(self.delivered)} tokens came")
        self.is_over = True
        if self.is_cancelled.is_set():
            self.tally.num_cancelled += 1
        elif self.delivered == self.question.answer:
            self.tally.num_whole += 1

    async def cancel(self) -> None:
        """Disconnect the client, and notify the workers."""
        self.is_cancelled.set()
        await self._abort(None)

    async def _until_answered(self) -> None:
        for self.attempt in count():
            await asyncio.sleep(min(_MAX_PAUSE_SECONDS, 0.005 * self.attempt))
            await self._until_workers_are_up()
            if self.is_cancelled.is_set():
                return
            if self._prefill.has_failed or self._decode.has_failed:
                self._break("a worker has ended by itself")
                return
            attempt = _Attempt(self.attempt)
            self._send(attempt)
            await self._unless_cancelled(attempt.over)
            self._deliver(attempt)
            if self.is_cancelled.is_set() or self.delivered == self.question.answer:
                return
            await self._abort(self.attempt)

    async def _until_workers_are_up(self) -> None:
        while down := [one for one in (self._prefill, self._decode) if not one.is_up.is_set()]:
            await self._unless_cancelled(down[0].is_up)
            if self.is_cancelled.is_set():
                return

    async def _unless_cancelled(self, event: asyncio.Event) -> None:
        waits = [asyncio.create_task(one.wait()) for one in (event, self.is_cancelled)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _send(self, attempt: _Attempt) -> None:
        question, num_known = self.question, len(self.delivered)
        transfer_id = question.transfer_id(attempt.number)
        sampling = SamplingParams(max_tokens=len(question.answer), temperature=0.0, ignore_eos=True)
        self.tally.num_attempts += 1
        for worker, transfer, first_index in (
            (self._prefill, SendTransfer(transfer_id), num_known),
            (self._decode, self._prefill.source(transfer_id), num_known + 1),
        ):
            if attempt.number == 0 and worker.role is question.lost:
                continue
            request = EngineRequest(
                request_id=question.request_id,
                prompt_token_ids=question.prompt + self.delivered,
                sampling=sampling,
                attempt=attempt.number,
                first_index=first_index,
                transfer=transfer,
            )
            leg = asyncio.create_task(worker.run(request, lambda output: self._take(attempt, output)))
            self.legs.add(leg)
        if attempt.number == 0 and question.lost is Role.DECODE:
            attempt.over.set()

    def _take(self, attempt: _Attempt, output: EngineOutput) -> None:
        for index, token in enumerate(output.token_ids, start=output.first_index):
            if index >= len(self.question.answer) or self.question.answer[index] != token:
                self._break(f"token {index} of attempt {attempt.number} is {token}")
            attempt.tokens[index] = token
        if output.finish_reason is FinishReason.ERROR:
            self._note_error(output)
            attempt.error = attempt.error or f"{output.error_kind}: {output.error_message}"
        end = output.first_index + len(output.token_ids)
        if output.finish_reason is FinishReason.LENGTH and end < len(self.question.answer):
            self._break(f"attempt {attempt.number} ends before token {end}")
            attempt.error = "it is too short"
        if attempt.error or self._has_all(attempt):
            attempt.over.set()

    def _note_error(self, output: EngineOutput) -> None:
        self.tally.errors[str(output.error_kind)] += 1
        if output.error_kind in _BUGS:
            self._break(f"{output.error_kind}: {output.error_message}")

    def _has_all(self, attempt: _Attempt) -> bool:
        return len(self.delivered) + len(attempt.tokens) >= len(self.question.answer)

    def _deliver(self, attempt: _Attempt) -> None:
        """Deliver index i only after i - 1."""
        while (index := len(self.delivered)) in attempt.tokens:
            self.delivered.append(attempt.tokens[index])

    async def _abort(self, attempt: int | None) -> None:
        for worker in (self._prefill, self._decode):
            if worker.role in self.question.notified and worker.is_up.is_set():
                await worker.abort(self.question.request_id, attempt)

    def _break(self, what: str) -> None:
        self.tally.broken.append(f"request {self.question.request_id}: {what}")
