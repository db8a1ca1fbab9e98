"""A local service in a thread of its own, for commands whose main thread waits for a terminal."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from cli.endpoint import Endpoint, local_endpoint
from cli.local import serve_until
from cli.model import find_model
from cli.processes import ROUTER
from cli.settings import LocalSettings
from worker.launch import Facts


@contextlib.contextmanager
def local_service(settings: LocalSettings) -> Iterator[Endpoint]:
    """A service that runs as long as the block; no process is left behind it.

    A Ctrl-C is the caller's affair: the processes of the service do not get it. Raises what ``find_model`` and
    ``serve_until`` raise, at the latest at the end of the block.
    """
    model = find_model(settings.model)
    ready: Future[Endpoint] = Future()
    stop: Future[Callable[[], object]] = Future()

    async def serve() -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        stop.set_result(lambda: loop.call_soon_threadsafe(stopped.set))

        async def announce(facts: dict[str, Facts], stopped: asyncio.Event) -> None:
            ready.set_result(local_endpoint(settings, facts[ROUTER]))
            await stopped.wait()

        await serve_until(stopped, settings, model, announce)

    def fail(served: Future[None]) -> None:
        if not ready.done():
            ready.set_exception(served.exception() or asyncio.CancelledError())

    with ThreadPoolExecutor(1, "local-service") as thread:
        served = thread.submit(lambda: asyncio.run(serve()))
        served.add_done_callback(fail)
        try:
            yield ready.result()
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended already
                stop.result()()
    served.result()
