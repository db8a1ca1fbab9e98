"""The two interchangeable clients of one engine core: in a thread of this process, or in a process of its own.

``ProcessClient`` is the default for services: network work never delays a step. Both answer with the same tokens.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, Self

import msgspec

from contract.errors import ErrorKind, KvbatonError
from contract.outputs import EngineOutput
from contract.requests import EngineRequest, HandOff
from engine.connector import ConnectorFactory
from engine.hosting.delivery import Delivery
from engine.hosting.messages import (
    Abort,
    AbortRequest,
    AddRequest,
    Call,
    FromEngine,
    Prepare,
    Shutdown,
    ToEngine,
    UntilFree,
)
from engine.hosting.process import EngineProcess
from engine.hosting.running import EnginePlan
from engine.hosting.thread import EngineThread
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
        """Call a utility of the core: "stats", "debug_state", "counters", "reset_prefix_cache", "check_integrity", "pid"."""

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


class StreamingClient:
    """An EngineClient over a link, made by ``start`` of its two kinds."""

    def __init__(self, link: EngineLink) -> None:
        self.died = asyncio.Event()
        self._link = link
        self._delivery = Delivery()
        self.idled = self._delivery.idled
        self._call_ids = itertools.count()
        link.start(self._delivery.deliver)
        self._watch = asyncio.get_running_loop().create_task(self._watch_link())

    @property
    def stats(self) -> SchedulerStats:
        """See EngineClient."""
        return self._delivery.stats

    @property
    def complaint(self) -> str | None:
        """See EngineClient. The reason is that the engine makes no progress, or has died."""
        return "it has died" if self.died.is_set() else self._link.complaint

    async def started(self) -> Self:
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

    async def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
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
        call_id = next(self._call_ids)
        is_over = self._delivery.expect_result(call_id)
        self._link.send(Prepare(call_id, request))
        await is_over

    async def call(self, method: str, *args: Any) -> Any:
        """See EngineClient."""
        call_id = next(self._call_ids)
        result = self._delivery.expect_result(call_id)
        self._link.send(Call(call_id, method, [msgspec.to_builtins(each) for each in args]))
        return await result

    async def until_free(self) -> None:
        """See EngineClient."""
        call_id = next(self._call_ids)
        is_free = self._delivery.expect_result(call_id)
        self._link.send(UntilFree(call_id))
        await is_free

    async def shutdown(self) -> None:
        """See EngineClient."""
        if not self._watch.done():
            self._link.send(Shutdown())
        await asyncio.shield(self._watch)

    def _begin(self, request: EngineRequest, stream: asyncio.Queue[EngineOutput] | None) -> None:
        self._delivery.expect(request, stream)
        self._link.send(AddRequest(request))

    async def _watch_link(self) -> None:
        if await self._link.wait_ended():
            self._delivery.close("the engine was shut down", ErrorKind.CANCELLED)
        else:
            self._delivery.close("the engine has died", ErrorKind.INTERNAL)
            self.died.set()


class InProcessClient(StreamingClient):
    """The core steps in a thread of this process."""

    @classmethod
    async def start(
        cls, settings: EngineSettings, connector_factory: ConnectorFactory | None = None, **options: Any
    ) -> Self:
        """Load the model; ``options`` are those of EnginePlan. Raises the error that kept it from starting."""
        plan = EnginePlan(settings=settings, connector_factory=connector_factory, **options)
        return await cls(EngineThread(plan)).started()


class ProcessClient(StreamingClient):
    """The core steps in a process of its own, which dies with this one. ``start`` from the main thread."""

    @classmethod
    async def start(
        cls, settings: EngineSettings, connector_factory: ConnectorFactory | None = None, **options: Any
    ) -> Self:
        """Start an engine like InProcessClient's; the factory and everything in ``options`` are picklable."""
        plan = EnginePlan(settings=settings, connector_factory=connector_factory, **options)
        return await cls(EngineProcess(plan)).started()
