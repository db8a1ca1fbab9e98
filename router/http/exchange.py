"""One request body and the answer to it, apart from HTTP: what handlers answer, and what a batch answers line by line."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import msgspec
from aiohttp import web

from contract.errors import KvbatonError
from router.answer import Delta
from router.best_of import choose_best
from router.http.grammars import naming_grammar_field
from router.http.shapes import AnswerOptions, Shape
from router.http.streaming import EventStream
from router.pipeline import Pipeline
from router.request import GenerationRequest

_SMALL = 256
"""Parts (deltas) up to which an answer is written in the event loop."""
OpenStream = Callable[[web.Request, dict[str, str], float], EventStream]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a body came from: the id of its request, the tenant that sent it, and when it arrived."""

    request_id: str
    tenant: str
    arrival: float


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The requests that a body asks for, and how the answer to them is written.

    field_names: field that an error of the pipeline names → its name in the body, where the two differ.
    """

    requests: list[GenerationRequest]
    options: AnswerOptions
    shape: Shape
    open_stream: OpenStream = EventStream
    field_names: Mapping[str, str] = field(default_factory=dict)

    @asynccontextmanager
    async def deltas(self, pipeline: Pipeline) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """Run the requests for as long as the block lasts. An error within names the field of the body."""
        try:
            async with (
                naming_grammar_field(self.requests[0]),
                aclosing(pipeline.generate(*self.requests)) as deltas,
            ):
                yield deltas
        except KvbatonError as error:
            error.param = self.field_names.get(error.param or "", error.param)
            raise

    async def whole(self, deltas: list[Delta]) -> bytes:
        """Return the response object of an answer that is not streamed, as JSON; -inf is null, as in streams."""
        return await written(len(deltas), partial(self._whole, deltas))

    def _whole(self, deltas: list[Delta]) -> bytes:
        if self.requests[0].rates_tokens:
            deltas = choose_best(deltas, self.options.num_chosen, self.requests[0].num_choices)
        return msgspec.json.encode(self.shape.whole(deltas))


async def written(num_parts: int, write: Callable[[], bytes]) -> bytes:
    """Return the result of ``write``. A thread calls it if the answer has so many parts that it would block the loop."""
    return await asyncio.to_thread(write) if num_parts > _SMALL else write()
