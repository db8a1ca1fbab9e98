"""The receivers of an engine's messages: streams of requests, steps, results of calls. Used in the event loop only."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from contract.errors import ErrorKind, InternalError, InvalidRequestError, UnavailableError, error_from_kind
from contract.outputs import EngineOutput
from contract.requests import EngineRequest
from engine.hosting.messages import CallResult, FromEngine, Health, Ready, StartFailed, StepOutputs, Stopped
from engine.info import EngineInfo
from engine.scheduling.stats import SchedulerStats


@dataclass(frozen=True)
class _Live:
    """A choice of a request that has not finished. stream: None if its outputs are delivered by ``steps``."""

    request: EngineRequest
    stream: asyncio.Queue[EngineOutput] | None


class Delivery:
    """Routes the messages of an engine, and ends every request and call if the engine ends without doing so.

    started: facts about the engine once it is up, or the error that kept it from starting. stats: from its last message.
    idled: set when it reports its health, which it does while it has nothing to do.
    """

    def __init__(self) -> None:
        self.started: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.stats = SchedulerStats()
        self.idled = asyncio.Event()
        self._live: dict[str, _Live] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._steps: asyncio.Queue[list[EngineOutput] | None] = asyncio.Queue()
        self._end: str | None = None
        self._cause: str | None = None

    def check_open(self) -> None:
        """Raise UnavailableError after ``close``."""
        if self._end is not None:
            raise UnavailableError(self._end)

    def expect(self, request: EngineRequest, stream: asyncio.Queue[EngineOutput] | None) -> None:
        """Add the receiver of a request's outputs. Raises InvalidRequestError for a request that is live already."""
        self.check_open()
        if any(key in self._live for key in request.keys):
            raise InvalidRequestError(
                f"request {request.key} is running already; a replay needs a higher attempt"
            )
        for choice in request.choices:
            one = request.of_choice(choice)
            self._live[one.key] = _Live(one, stream)

    def is_live(self, key: str) -> bool:
        """Return whether this choice's last output has not come yet."""
        return key in self._live

    def expect_result(self, call_id: int) -> asyncio.Future[Any]:
        """Return the future result of a call. Raises UnavailableError after ``close``."""
        self.check_open()
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        return future

    async def steps(self) -> AsyncIterator[list[EngineOutput]]:
        """Yield the outputs of requests without a stream, one list per step, until the engine ends. For one consumer."""
        while (outputs := await self._steps.get()) is not None:
            yield outputs

    def deliver(self, message: FromEngine) -> None:
        """Route a message. Outputs of unknown requests are dropped."""
        match message:
            case Ready(info) if not self.started.done():
                self.started.set_result(info)
            case StartFailed(kind, text, param) if not self.started.done():
                error = error_from_kind(kind, text)
                error.param = param
                self.started.set_exception(error)
            case Stopped(error) if error is not None:
                self._cause = error
            case StepOutputs(outputs, stats):
                self.stats = stats
                self._deliver_step(outputs)
            case CallResult():
                self._deliver_result(message)
            case Health(stats):
                self.stats = stats
                self.idled.set()

    def close(self, reason: str, kind: ErrorKind) -> None:
        """End every request and call that is left with this error: the engine has ended."""
        if self._end is not None:
            return
        reason = f"{reason}: {self._cause}" if self._cause else reason
        self._end = reason
        if not self.started.done():
            self.started.set_exception(InternalError(f"{reason} before it was ready"))
        self._deliver_step(
            [EngineOutput.of_error(live.request, kind.value, reason) for live in self._live.values()]
        )
        self._steps.put_nowait(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(UnavailableError(reason))
        self._calls.clear()

    def _deliver_step(self, outputs: list[EngineOutput]) -> None:
        without_stream = []
        for output in outputs:
            live = self._live.pop(output.key, None) if output.is_leg_finished else self._live.get(output.key)
            if live is None:
                continue
            if live.stream is None:
                without_stream.append(output)
            else:
                live.stream.put_nowait(output)
        if without_stream:
            self._steps.put_nowait(without_stream)

    def _deliver_result(self, message: CallResult) -> None:
        future = self._calls.pop(message.call_id, None)
        if future is None or future.done():
            return
        if message.error_kind is None:
            future.set_result(message.result)
        else:
            future.set_exception(error_from_kind(message.error_kind, message.error_message or ""))
