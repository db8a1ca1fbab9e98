"""Clients of the chaos tests: they send requests over gRPC and HTTP, may disconnect, and check the answers."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import aiohttp
import grpc.aio

from contract.errors import ErrorKind
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from serving.errors import ERROR_KIND_KEY

MODEL = "demo"
CONNECTION = "connection"
"""The kind of an error that the service did not report: the connection broke."""
VOCABULARY = range(300, 1400)
_GRPC_OPTIONS = [("grpc.max_reconnect_backoff_ms", 1000)]


def pools(num_prefill: int, num_decode: int) -> tuple[str, ...]:
    """Return the flags of a service with float32, so that its streams can be compared token by token."""
    sizes = ("--prefill", str(num_prefill), "--decode", str(num_decode))
    return (*sizes, "--dtype", "float32", "--num-threads", "1", "--served-model-name", MODEL)


class Api(StrEnum):
    """The API over which a client sends a request."""

    GRPC = "grpc"
    HTTP_STREAM = "http_stream"
    HTTP_WHOLE = "http_whole"


@dataclass(frozen=True)
class Question:
    """One request and the length of its answer. temperature 0 is greedy."""

    number: int
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int

    def as_message(self, salt: str = "") -> pb.GenerateRequest:
        """Return the gRPC message."""
        sampling = pb.SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True
        )
        ids = pb.TokenIds(ids=self.prompt)
        return pb.GenerateRequest(token_ids=ids, sampling=sampling, cache_salt=salt)

    def as_body(self, *, stream: bool) -> dict[str, Any]:
        """Return the body for ``POST /v1/completions``."""
        return {
            "model": MODEL,
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "stream": stream,
        }


def draw_questions(
    rng: random.Random,
    count: int,
    *,
    prompts: tuple[int, int] = (10, 600),
    answers: tuple[int, int] = (20, 600),
    vocabulary: range = VOCABULARY,
) -> list[Question]:
    """Draw greedy and seeded questions in turn; every third one shares a prefix with the one before it."""
    questions: list[Question] = []
    for number in range(count):
        prompt = [rng.choice(vocabulary) for _ in range(rng.randint(*prompts))]
        if number % 3 == 2:
            shared = questions[-1].prompt[: len(prompt) // 2]
            prompt[: len(shared)] = shared
        temperature = 0.0 if number % 2 else 0.8
        questions.append(
            Question(number, tuple(prompt), rng.randint(*answers), temperature, rng.getrandbits(40))
        )
    return questions


@dataclass
class Answer:
    """The answer that a client received. ``token_ids``: gRPC only; ``has_left``: the client disconnected."""

    question: Question
    api: Api
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    error_kind: str = ""
    error: str = ""
    has_left: bool = False

    @property
    def is_whole(self) -> bool:
        """True if it ended with its tokens, not with an error."""
        return bool(self.finish_reason) and not self.error_kind


class Client:
    """Sends requests to one service over every API. Created by ``connected``."""

    def __init__(self, channel: grpc.aio.Channel, session: aiohttp.ClientSession, http: str) -> None:
        self._channel, self._session, self._http = channel, session, http
        self._stub: Any = inference_pb2_grpc.InferenceStub(channel)

    async def until_connected(self) -> None:
        """Wait until gRPC has reconnected; after a broken connection its attempts become rarer."""
        async with asyncio.timeout(30):
            await self._channel.channel_ready()

    async def ask(
        self,
        question: Question,
        api: Api = Api.GRPC,
        *,
        timeout_seconds: float = 120,
        leave_after: int | None = None,
        salt: str = "",
    ) -> Answer:
        """Return the answer, or its beginning before an error. leave_after: disconnect after this number of events.

        Raises TimeoutError if the request does not end in time.
        """
        answer = Answer(question, api)
        async with asyncio.timeout(timeout_seconds + 30):
            try:
                if api is Api.GRPC:
                    await self._ask_grpc(answer, timeout_seconds, leave_after, salt)
                elif api is Api.HTTP_STREAM:
                    await self._ask_stream(answer, leave_after)
                else:
                    await self._ask_whole(answer)
            except aiohttp.ClientConnectionError as error:
                _cut_off(answer, error)
        return answer

    async def _ask_grpc(
        self, answer: Answer, timeout_seconds: float, leave_after: int | None, salt: str
    ) -> None:
        call = self._stub.Generate(answer.question.as_message(salt), timeout=timeout_seconds)
        num_events = 0
        try:
            async for message in call:
                for choice in message.choices:
                    answer.token_ids += choice.token_ids
                    answer.text += choice.text
                    if choice.finish_reason:
                        answer.finish_reason = pb.FinishReason.Name(choice.finish_reason).rpartition("_")[2]
                num_events += 1
                if num_events == leave_after:
                    answer.has_left = True
                    return
        except grpc.aio.AioRpcError as error:
            kinds = {str(key): str(value) for key, value in error.trailing_metadata() or ()}
            answer.error_kind = kinds.get(ERROR_KIND_KEY, CONNECTION)
            answer.error = error.details() or ""
        finally:
            call.cancel()

    async def _ask_stream(self, answer: Answer, leave_after: int | None) -> None:
        num_events, is_done = 0, False
        async with self._post(answer.question.as_body(stream=True)) as response:
            if response.status != 200:
                _take_error(answer, await response.json())
                return
            try:
                async for line in response.content:
                    if not line.strip() or line.startswith(b":"):  # a comment of a stream that waits
                        continue
                    is_done |= _take_event(answer, line)
                    num_events += 1
                    if num_events == leave_after:
                        answer.has_left = True
                        return
            except aiohttp.ClientPayloadError as error:
                _cut_off(answer, error)
        if not is_done and not answer.error_kind:
            _cut_off(answer, "the stream ended without [DONE]")

    async def _ask_whole(self, answer: Answer) -> None:
        async with self._post(answer.question.as_body(stream=False)) as response:
            body = await response.json()
        if "error" in body:
            _take_error(answer, body)
        else:
            _take_choice(answer, body["choices"][0])

    @asynccontextmanager
    async def _post(self, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.post(f"http://{self._http}/v1/completions", json=body) as response:
            yield response


@asynccontextmanager
async def connected(http: str, grpc_address: str) -> AsyncIterator[Client]:
    """Connect a client to the service at these addresses."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        grpc.aio.insecure_channel(grpc_address, _GRPC_OPTIONS) as channel,
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
    ):
        yield Client(channel, session, http)


def _take_event(answer: Answer, line: bytes) -> bool:
    payload = line.removeprefix(b"data: ").strip()
    if payload == b"[DONE]":
        return True
    event = json.loads(payload)
    if "error" in event:
        _take_error(answer, event)
    else:
        for choice in event["choices"]:
            _take_choice(answer, choice)
    return False


def _take_choice(answer: Answer, choice: dict[str, Any]) -> None:
    answer.text += choice["text"]
    answer.finish_reason = (choice["finish_reason"] or answer.finish_reason).upper()


def _take_error(answer: Answer, body: dict[str, Any]) -> None:
    answer.error_kind, answer.error = str(body["error"]["code"]), body["error"]["message"]


def _cut_off(answer: Answer, reason: object) -> None:
    answer.error_kind, answer.error = CONNECTION, str(reason)


async def reference_answers(client: Client, questions: Sequence[Question], at_once: int = 16) -> list[Answer]:
    """Return the reference answers, in the questions' order. Raises AssertionError if one fails."""
    gate = asyncio.Semaphore(at_once)

    async def one(question: Question) -> Answer:
        async with gate:
            answer = await client.ask(question)
        assert answer.is_whole and len(answer.token_ids) == question.max_tokens, answer.error
        return answer

    return await asyncio.gather(*(one(question) for question in questions))


def mistake_in(answer: Answer, reference: Answer, *, may_break: bool = False) -> str | None:
    """Return None for a correct answer: the same tokens to the end, or their beginning and one clear error.

    A client that disconnected may have any beginning; so may one whose connection broke, if ``may_break``.
    """
    name = f"question {answer.question.number} by {answer.api}"
    if answer.api is Api.GRPC and answer.token_ids != reference.token_ids[: len(answer.token_ids)]:
        place = _first_difference(answer.token_ids, reference.token_ids)
        return f"{name}: token {place} of {len(answer.token_ids)} is another one"
    if not reference.text.startswith(answer.text):
        return f"{name}: the text differs from character {_first_difference(answer.text, reference.text)} on"
    if answer.is_whole:
        if answer.text == reference.text and answer.finish_reason == reference.finish_reason:
            return None
        return f"{name}: it ended early, {len(answer.text)} of {len(reference.text)} characters"
    if (
        answer.has_left
        or answer.error_kind in set(ErrorKind)
        or (may_break and answer.error_kind == CONNECTION)
    ):
        return None
    return f"{name}: neither an end nor a clear error: {answer.error_kind!r} {answer.error!r}"


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
