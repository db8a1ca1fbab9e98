"""A parsed request body and how it is answered, for HTTP handlers and for the lines of a batch."""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from aiohttp import web

from contract.errors import KvbatonError
from router.answers.answer import Delta
from router.answers.best_of import choose_best
from router.http.formatter import AnswerFormatter, AnswerOptions
from router.http.streaming import EventStream
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

    def naming_fields(self) -> "NamingFields":
        """Return a block in which an error of the pipeline comes to name the field of the body that it is about."""
        return NamingFields(self)

    def name_field(self, error: KvbatonError) -> None:
        """Let an error name the field of the body that it is about."""
        if error.param == "grammar":
            error.param = self.requests[0].grammar_field
        error.param = self.field_names.get(error.param or "", error.param)

    async def whole(self, deltas: list[Delta]) -> bytes:
        """Return the response object of an answer that is not streamed, as JSON; -inf is null, as in streams."""
        return await encoded(len(deltas), partial(self._whole, deltas))

    def _whole(self, deltas: list[Delta]) -> bytes:
        if self.requests[0].rates_tokens:
            deltas = choose_best(deltas, self.options.num_chosen, self.requests[0].num_choices)
        return msgspec.json.encode(self.formatter.whole(deltas))


class NamingFields:
    """The block of ``Exchange.naming_fields``; a class, since a context manager made of a generator costs more calls."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, KvbatonError):
            self._exchange.name_field(error)


async def encoded(num_parts: int, encode: Callable[[], bytes]) -> bytes:
    """Return the result of ``encode``, called on a thread if the answer has too many parts for the event loop."""
    return await asyncio.to_thread(encode) if num_parts > _SMALL else encode()
