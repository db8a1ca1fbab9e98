"""A parsed request body and how it is answered, for HTTP handlers and for the lines of a batch.

A parser makes an exchange of a body. Its formatter writes the answer in the objects of its API, whole or in events.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
from aiohttp import web

from contract.errors import KvbatonError
from router.answers.answer import Delta, choose_best
from router.http.bodies.body import Json
from router.http.streaming import Event, EventStream
from router.intake.request import GenerationRequest

_SMALL = 256
"""Deltas up to which an answer is encoded on the event loop."""
OpenStream = Callable[[web.Request, dict[str, str], float], EventStream]
"""(request, headers, stall_seconds) → the stream of its answer."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a body: the id of its request, the tenant that sent it, and its time of arrival (monotonic)."""

    request_id: str
    tenant: str
    arrival: float


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of an answer that its client asked for.

    created: Unix seconds. num_choices: answers in total, each with its own last delta. num_chosen: answers to each prompt
    that the client gets. include_usage: add an event with the usage to a stream.
    """

    request_id: str
    model: str
    created: int
    num_choices: int = 1
    num_chosen: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    timings: bool = False
    prompt_logprobs: bool = False


class AnswerFormatter(Protocol):
    """Writes one response. Call ``chunks`` for every delta of a stream, in order, or ``whole`` once."""

    def chunks(self, delta: Delta) -> Sequence[Event]:
        """Return the stream's objects for one delta; none while there is nothing to show."""

    def whole(self, deltas: list[Delta]) -> Json:
        """Return the response object of an answer that is not streamed; each choice's last delta has usage and timings."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one body, and the formatter of their answer.

    field_names: field that an error of the pipeline names → its name in the body, if the two differ.
    left_out: types of the body's tools that cannot run here, which the model does not see.
    """

    requests: list[GenerationRequest]
    options: AnswerOptions
    formatter: AnswerFormatter
    open_stream: OpenStream = EventStream
    field_names: Mapping[str, str] = {}
    left_out: tuple[str, ...] = ()

    async def whole(self, deltas: list[Delta]) -> bytes:
        """Return the response object of an answer that is not streamed, as JSON; -inf is null, as in streams."""

        def encode() -> bytes:
            found = deltas
            if self.requests[0].rates_tokens:
                found = choose_best(deltas, self.options.num_chosen, self.requests[0].num_choices)
            return msgspec.json.encode(self.formatter.whole(found))

        return await encoded(len(deltas), encode)


class NamingFields:
    """A block in which an error of the pipeline comes to name the field of the exchange's body that it is about."""

    # a class: every request enters one, and a context manager made of a generator costs more calls
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KvbatonError):
            if error.param == "grammar":
                error.param = self._exchange.requests[0].grammar_field
            error.param = self._exchange.field_names.get(error.param or "", error.param)


async def encoded(num_parts: int, encode: Callable[[], bytes]) -> bytes:
    """Return the result of ``encode``, called on a thread if the answer has too many parts for the event loop."""
    # an answer with the log probabilities of thousands of tokens would keep the event loop for too long
    return await asyncio.to_thread(encode) if num_parts > _SMALL else encode()
