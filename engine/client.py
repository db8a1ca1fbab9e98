"""The two interchangeable clients that start an engine core: in a thread of this process, or in a process of its own.

``ProcessClient`` is the default for services: network work never delays a step. Both answer with the same tokens.
``Delivery`` passes the engine's messages to streams of requests, to ``steps`` and to calls.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import msgspec
from msgspec import structs

from contract.errors import (
    ErrorKind,
    InternalError,
    InvalidRequestError,
    KvbatonError,
    UnavailableError,
    error_from_kind,
)
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, HandOff
from engine.connecting import Transfers
from engine.hosting.messages import (
    Abort,
    AbortRequest,
    AddRequest,
    Call,
    CallResult,
    FromEngine,
    Health,
    Prepare,
    Ready,
    Share,
    Shutdown,
    StartFailed,
    StepOutputs,
    Stopped,
    ToEngine,
    UntilFree,
)
from engine.hosting.process import EngineProcess
from engine.hosting.running import EnginePlan, EngineThread
from engine.info import EngineInfo
from engine.scheduling.stats import SchedulerStats
from engine.settings import EngineSettings


class EngineClient(Protocol):
    """The interface of an engine for services, tests and offline use.

    died: set when the engine has ended without being asked to. idled: set each time that an engine without work reports its
    health.
    """

    info: EngineInfo
    died: asyncio.Event
    idled: asyncio.Event

    @property
    def stats(self) -> SchedulerStats:
        """The engine's state at its last message: after a step, or while idle. Sends nothing."""

    @property
    def complaint(self) -> str | None:
        """The reason why the engine cannot be relied on at the moment; None if it can."""

    async def add_request(self, request: EngineRequest) -> None:
        """Start a request whose outputs come with ``steps``.

        Raises InvalidRequestError for one that is live already, UnavailableError when the engine is gone.
        """

    async def abort(self, request_id: str, attempt: int | None = None, choice: int | None = None) -> None:
        """Abort a choice of a request (None: all) in all attempts up to ``attempt``, and withdraw the KV that is still lent.

        Each choice that has not finished still gets its last output.
        """

    def steps(self) -> AsyncIterator[list[EngineOutput]]:
        """Yield one list of outputs per step, until the engine ends. For one consumer."""

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Start a request and yield its outputs; the last one of each choice has ``is_leg_finished``.

        Leaving early aborts it.
        """

    async def hand_off(self, order: HandOff, seconds: float) -> None:
        """Hand a request off while it decodes: its last output has ``handed_over``, and its KV is lent.

        seconds: how long the engine may take to begin with it. Raises NotFoundError for a request that is not there,
        InvalidRequestError for one that cannot be handed off now, DeadlineError, UnavailableError. Then nothing has changed.
        """

    async def prepare(self, request: EngineRequest) -> None:
        """Compile the grammar of a request that may be added later, and connect to the worker that it comes from.

        Returns when that is over, even if it has failed.

        Raises InvalidRequestError, OverloadedError, UnavailableError.
        """

    async def call(self, method: str, *args: Any) -> Any:
        """Call a utility of the core (``EngineCore.call``), as "stats", "debug_state", "reset_prefix_cache" or "pid"."""

    async def reload_weights(self) -> str:
        """Read the model's weights again; return their fingerprint, which ``info`` has from then on.

        Raises InvalidRequestError and SettingError if nothing has changed (``engine.core.reload_weights``). After any other
        error the engine cannot compute.
        """

    async def until_free(self) -> None:
        """Wait until no request is live and no KV is lent, and all outputs before that moment were delivered.

        Raises UnavailableError when the engine is gone.
        """

    async def shutdown(self) -> None:
        """End the engine and what it runs. May be called twice."""


class EngineLink(Protocol):
    """The thread or process in which a core runs, and the messages to and from it. Used in the event loop only."""

    def start(self, receive: Callable[[FromEngine], None]) -> None:
        """Start to build the core; its messages are passed to ``receive``, in order."""

    def send(self, message: ToEngine) -> None:
        """Send a message, after the engine's first one. Never blocks; a message to an engine that has ended is dropped."""

    def abandon(self) -> None:
        """Give up an engine that is starting."""

    @property
    def complaint(self) -> str | None:
        """The reason why a core that still runs makes no progress; None if it does."""

    async def wait_ended(self) -> bool:
        """Wait until the core has ended and all its messages are received; return whether it ended as asked."""


@dataclass(frozen=True)
class _Live:
    """A choice of a request that has not finished. stream: None if its outputs are delivered by ``steps``."""

    request: EngineRequest
    stream: asyncio.Queue[EngineOutput] | None


class Delivery:
    """Routes the messages of an engine, and ends every request and call if the engine ends without doing so.

    started: facts about the engine once it is up, or the error that kept it from starting. stats: from its last message.
    idled: set when it reports its health, which it does while it has nothing to do. calls: the results that are expected, by
    the ids of their calls.
    """

    def __init__(self) -> None:
        self.started: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.stats = SchedulerStats()
        self.idled = asyncio.Event()
        self._live: dict[str, _Live] = {}
        self.calls: dict[int, asyncio.Future[Any]] = {}
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
            case CallResult(call_id, result, error_kind, error_message):
                future = self.calls.pop(call_id, None)
                if future is None or future.done():  # its caller has left
                    return
                if error_kind is None:
                    future.set_result(result)
                else:
                    future.set_exception(error_from_kind(error_kind, error_message or ""))
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
        for future in self.calls.values():
            if not future.done():
                future.set_exception(UnavailableError(reason))
        self.calls.clear()

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


class StreamingClient:
    """An EngineClient over a link, made by ``start`` of its two kinds."""

    make_link: ClassVar[type[EngineThread] | type[EngineProcess]]
    ended: ClassVar[str] = "the engine was shut down"
    lost: ClassVar[str] = "the engine has died"

    def __init__(self, link: EngineLink) -> None:
        self.died = asyncio.Event()
        self._link = link
        self._delivery = Delivery()
        self.idled = self._delivery.idled
        self._call_ids = itertools.count()
        link.start(self._delivery.deliver)
        self._watch = asyncio.get_running_loop().create_task(self._watch_link())

    @classmethod
    async def start(
        cls, settings: EngineSettings, transfers: Transfers | None = None, **options: Any
    ) -> Self:
        """Load the model; ``options`` are those of EnginePlan. Raises the error that kept it from starting."""
        plan = EnginePlan(settings=settings, transfers=transfers, **options)
        return await cls(cls.make_link(plan)).wait_started()

    @property
    def stats(self) -> SchedulerStats:
        """See EngineClient."""
        return self._delivery.stats

    @property
    def complaint(self) -> str | None:
        """See EngineClient. The reason is that the engine makes no progress, or has died."""
        return "it has died" if self.died.is_set() else self._link.complaint

    async def wait_started(self) -> Self:
        """Wait until the engine is up. Raises the error that kept it from starting."""
        try:
            self.info = await self._delivery.started
        except asyncio.CancelledError:
            self._link.abandon()
            raise
        except KvbatonError:
            await self._watch
            raise
        return self

    async def add_request(self, request: EngineRequest) -> None:
        """See EngineClient."""
        self._begin(request, None)

    async def abort(self, request_id: str, attempt: int | None = None, choice: int | None = None) -> None:
        """See EngineClient."""
        self._link.send(AbortRequest(request_id, attempt, choice))

    def steps(self) -> AsyncIterator[list[EngineOutput]]:
        """See EngineClient."""
        return self._delivery.steps()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See EngineClient."""
        stream: asyncio.Queue[EngineOutput] = asyncio.Queue()
        self._begin(request, stream)
        try:
            num_open = request.num_choices
            while num_open:
                output = await stream.get()
                num_open -= output.is_leg_finished
                yield output
        finally:
            if live := [key for key in request.keys if self._delivery.is_live(key)]:
                self._link.send(Abort(live))

    async def hand_off(self, order: HandOff, seconds: float) -> None:
        """See EngineClient."""
        await self.call("hand_off", order, time.monotonic() + seconds)

    async def prepare(self, request: EngineRequest) -> None:
        """See EngineClient."""
        await self._ask(lambda call_id: Prepare(call_id, request))

    async def call(self, method: str, *args: Any) -> Any:
        """See EngineClient."""
        plain = [msgspec.to_builtins(each) for each in args]
        return await self._ask(lambda call_id: Call(call_id, method, plain))

    async def reload_weights(self) -> str:
        """See EngineClient."""
        fingerprint: str = await self.call("reload_weights")
        self.info = structs.replace(self.info, model_fingerprint=fingerprint)
        return fingerprint

    async def until_free(self) -> None:
        """See EngineClient."""
        await self._ask(UntilFree)

    async def share(self) -> str:
        """Return an address at which other processes of this user attach to the engine (``engine.attaching``).

        Raises InvalidRequestError for an engine of a data-parallel group, SettingError, UnavailableError.
        """
        address: str = await self._ask(Share)
        return address

    async def shutdown(self) -> None:
        """See EngineClient."""
        if not self._watch.done():
            self._link.send(Shutdown())
        await asyncio.shield(self._watch)

    async def _ask(self, message_of: Callable[[int], ToEngine]) -> Any:
        self._delivery.check_open()
        call_id = next(self._call_ids)
        # Before it is sent: the answer may come at once.
        result = self._delivery.calls[call_id] = asyncio.get_running_loop().create_future()
        self._link.send(message_of(call_id))
        return await result

    def _begin(self, request: EngineRequest, stream: asyncio.Queue[EngineOutput] | None) -> None:
        self._delivery.expect(request, stream)
        self._link.send(AddRequest(request))

    async def _watch_link(self) -> None:
        if await self._link.wait_ended():
            self._delivery.close(self.ended, ErrorKind.CANCELLED)
        else:
            self._delivery.close(self.lost, ErrorKind.INTERNAL)
            self.died.set()


class InProcessClient(StreamingClient):
    """The core steps in a thread of this process."""

    make_link = EngineThread


class ProcessClient(StreamingClient):
    """The core steps in a process of its own, which dies with this one. ``start`` from the main thread.

    ``transfers`` and everything in ``options`` are picklable.
    """

    make_link = EngineProcess
