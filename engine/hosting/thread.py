"""An engine core in a thread of this process."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from engine.hosting.messages import FromEngine, Shutdown, ToEngine
from engine.hosting.running import EnginePlan, run_engine
from engine.stepping.dispatch import Inbox

_T = TypeVar("_T")


class EngineThread:
    """An ``EngineLink`` over a queue and ``call_soon_threadsafe``."""

    def __init__(self, plan: EnginePlan) -> None:
        self._plan = plan
        self._inbox: Inbox = Inbox()
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[bool] = self._loop.create_future()

    def start(self, receive: Callable[[FromEngine], None]) -> None:
        """Start the thread; see EngineLink."""
        threading.Thread(target=self._run, args=(receive,), name="engine-core", daemon=True).start()

    def send(self, message: ToEngine) -> None:
        """Send a message; see EngineLink."""
        self._inbox.put(message)

    def abandon(self) -> None:
        """End the thread as soon as it has started; see EngineLink."""
        self._inbox.put(Shutdown())

    @property
    def complaint(self) -> str | None:
        """See EngineLink. A thread of this process is not watched."""
        return None

    async def wait_ended(self) -> bool:
        """Wait until the thread has ended; see EngineLink."""
        return await self._ended

    def _run(self, receive: Callable[[FromEngine], None]) -> None:
        has_ended_well = False
        try:
            has_ended_well = run_engine(self._plan, self._inbox, lambda message: self._post(receive, message))
        finally:
            self._post(self._ended.set_result, has_ended_well)

    def _post(self, function: Callable[[_T], None], value: _T) -> None:
        """Call ``function`` in the event loop, unless that is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, value)
