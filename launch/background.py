"""Runs a local service in a thread of its own, for commands whose main thread waits for a terminal."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from launch.local_cluster import serve_until
from launch.model import find_model
from launch.router_processes import ROUTER
from launch.settings import LocalSettings
from launch.spec import Facts
from serving.signals import result_of


@contextlib.contextmanager
def local_service(settings: LocalSettings) -> Iterator[Facts]:
    """Run a service within the block and yield the facts of its router; every process is stopped afterwards.

    Ctrl-C reaches the caller, not the processes of the service. Raises the errors of ``find_model`` and
    ``serve_until``, at the latest at the end of the block.
    """
    model = find_model(settings.model)
    ready: Future[Facts] = Future()
    stop: Future[Callable[[], object]] = Future()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()
        stop.set_result(lambda: loop.call_soon_threadsafe(stopped.set))

        async def announce(facts: dict[str, Facts], stopped: asyncio.Event) -> None:
            ready.set_result(facts[ROUTER])
            await stopped.wait()

        await serve_until(stopped, settings, model, announce)

    def fail(served: Future[None]) -> None:
        if not ready.done():
            ready.set_exception(served.exception() or asyncio.CancelledError())

    with ThreadPoolExecutor(1, "local-service") as thread:
        served = thread.submit(lambda: asyncio.run(serve()))
        served.add_done_callback(fail)
        try:
            yield result_of(ready)
        finally:
            with contextlib.suppress(RuntimeError):  # it has ended already
                stop.result()()
    served.result()
