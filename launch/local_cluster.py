"""Runs a router and its workers on this machine until a signal or an event; ``local_service`` does it in a thread."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from contract.identity import new_secret
from contract.processes import RunFolder
from launch.kept_process import Facts, Listener
from launch.memory_plan import check_memory
from launch.model import check_model, find_model
from launch.processes import ROUTER, local_processes
from launch.settings import LocalSettings
from launch.supervisor import Supervisor
from serving.signals import StopEvent, result_of, until_stopped

T = TypeVar("T")
WhenReady = Callable[[dict[str, Facts], asyncio.Event], Awaitable[None]]


@contextmanager
def cluster_secret(given: Path | None) -> Iterator[Path]:
    """Yield the file with the cluster's secret: the given one, or a new 0600 file that is removed afterwards."""
    if given is not None:
        yield given
        return
    with RunFolder("secret") as folder:
        path = folder.path / "secret"
        # The mode is set when the file is made: with a later chmod, other users could open it in between.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as stream:
            stream.write(new_secret())
        yield path


def run_local(settings: LocalSettings, when_ready: WhenReady, listener: Listener | None = None) -> None:
    """Find the model and run ``serve_until`` a signal. Main thread only.

    Raises the errors of both, and the exception of a signal that arrives before ``when_ready`` has returned.
    """
    model = find_model(settings.model)  # before there is an event loop: a signal ends a download
    asyncio.run(
        run_until_signal(
            lambda stopped, use: serve_until(stopped, settings, model, use, listener), when_ready
        )
    )


async def run_until_signal(
    serve: Callable[[asyncio.Event, Callable[[T, asyncio.Event], Awaitable[None]]], Awaitable[None]],
    when_ready: Callable[[T, asyncio.Event], Awaitable[None]],
) -> None:
    """Await ``serve`` with the event of signals, and raise the exception of one before ``when_ready`` has returned."""
    is_done = False

    async def use(running: T, until: asyncio.Event) -> None:
        nonlocal is_done
        await when_ready(running, until)
        is_done = True

    async with until_stopped() as stopped:
        try:
            await serve(stopped, use)
        except Exception:
            if not is_done:
                stopped.raise_signal()  # the signal has stopped what was in use, and so caused the error
            raise
    if not is_done:
        stopped.raise_signal()


async def serve_until(
    stopped: asyncio.Event,
    settings: LocalSettings,
    model: Path,
    when_ready: WhenReady,
    listener: Listener | None = None,
) -> None:
    """Start the processes of ``settings``, await ``when_ready``, then stop them; ``stopped`` stops them too.

    model: its folder. ``when_ready`` gets the facts of every process and ``stopped``; it is cancelled when the processes
    have stopped. No process is left when this returns or raises. Raises SettingError if the settings file contradicts
    itself or pools do not fit into the GPUs, UnavailableError if a process cannot start, and the errors of ``when_ready``.
    """
    await asyncio.to_thread(check_model, settings, model)
    await asyncio.to_thread(check_memory, settings, model)
    with cluster_secret(settings.secret_file) as secret_file:
        specs = local_processes(settings, model, secret_file)
        supervisor = Supervisor(specs, ready_file=settings.ready_file, listener=listener)
        await supervise(supervisor, stopped, when_ready)


async def supervise(supervisor: Supervisor, stopped: asyncio.Event, when_ready: WhenReady) -> None:
    """Run a supervisor and await ``when_ready`` as ``serve_until`` does."""
    at_once = stopped.at_once if isinstance(stopped, StopEvent) else None
    run = asyncio.create_task(supervisor.run(stopped, at_once))

    async def use_when_ready() -> None:
        await when_ready(await supervisor.wait_ready(), stopped)

    use = asyncio.create_task(use_when_ready())
    try:
        await asyncio.wait({run, use}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.set()
        use.cancel()
        # Both are awaited: no process may be left, and the supervisor's error comes first, as it explains the other.
        results = await asyncio.gather(run, use, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


@contextmanager
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
            with suppress(RuntimeError):  # it has ended already
                stop.result()()
    served.result()
