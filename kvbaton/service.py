"""The service behind an ``LLM`` and ``kvbaton batch``: a router in this process, and workers as child processes.

The router is that of ``kvbaton up``, without ports for clients and operators: requests enter its pipeline directly. The
workers are started, watched and restarted like those of ``kvbaton up``, and end with this process.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from contract.errors import UnavailableError
from contract.identity import Role
from launch.arguments import parse, to_arguments
from launch.command_settings import from_file
from launch.kept_process import Facts, ProcessSpec
from launch.local_cluster import cluster_secret, supervise
from launch.model import check_model, find_model, model_name
from launch.processes import ROUTER, local_processes
from launch.service_settings import RouterCommand
from launch.settings import LocalSettings, LogLevel, child_environment, variable
from launch.supervisor import Supervisor
from router.pipeline import Pipeline
from router.service import RouterService
from router.settings import RouterSettings
from serving.signals import result_of
from text.model_card import ModelCard

T = TypeVar("T")
UseRouter = Callable[[RouterService, asyncio.Event], Awaitable[None]]
"""Uses a router that is ready; the event is set when the service stops."""
_LOOPBACK = "127.0.0.1:0"
NO_TIMEOUT_SECONDS = 30 * 24 * 3600.0
_MAX_QUEUE = 2**31


class LLMSettings(LocalSettings):
    """The settings of ``kvbaton up``, with one aggregated worker as the default."""

    log_level: LogLevel = "error"
    """Lowest level of the workers' log records that are written."""

    @property
    def pools(self) -> tuple[int, int, int]:
        """The numbers of prefill, decode and aggregated workers."""
        if self.prefill is None and self.decode is None and self.both is None:
            return 0, 0, 1
        return super().pools


class OfflineService:
    """A service that its constructor starts; the constructor returns when the service is ready. ``close`` stops everything.

    Raises SettingError for a model that cannot be used, UnavailableError when a worker cannot start.
    """

    def __init__(self, settings: LLMSettings) -> None:
        self._model = find_model(settings.model)
        check_model(settings, self._model)
        self._settings = settings
        self._ready: Future[tuple[Pipeline, ModelCard]] = Future()
        self._is_closed = False
        # Reentrant: the garbage collector may call ``close`` in a thread that holds it.
        self._closing = threading.RLock()
        # Another kind of loop may not start processes in a group of their own.
        self._loop = asyncio.SelectorEventLoop()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-llm", daemon=True)
        self._thread.start()
        try:
            self.pipeline, self.card = result_of(self._ready)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the requests, the workers and the router. A second call does nothing."""
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._stopped.set)
        if threading.current_thread() is not self._thread:  # true when the garbage collector calls this
            self._thread.join()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the service's event loop, from another thread. Ctrl-C cancels it.

        Raises its errors, and UnavailableError when the service is closed meanwhile.
        """
        with self._closing:
            if self._is_closed:
                raise UnavailableError("this LLM is closed")
            answer = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return result_of(answer)
        except CancelledError:
            raise UnavailableError("this LLM was closed before the answers were complete") from None
        finally:
            answer.cancel()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except Exception as error:  # noqa: BLE001 - raised by the constructor
                self._fail(error)
            else:
                self._fail(UnavailableError("it was stopped before it was ready"))

    def _fail(self, error: Exception) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        async def announce(router: RouterService, stopped: asyncio.Event) -> None:
            self._ready.set_result((router.pipeline, router.models.card()))
            await stopped.wait()

        try:
            await serve_offline(self._stopped, self._settings, self._model, announce)
        finally:
            with self._closing:  # work that is submitted after this would never run
                self._is_closed = True


async def serve_offline(
    stopped: asyncio.Event, settings: LocalSettings, model: Path, when_ready: UseRouter
) -> None:
    """Run a router in this event loop and its workers as processes, await ``when_ready``, then stop them.

    model: its folder. The router listens for workers only. Otherwise like ``launch.local_cluster.serve_until``.
    """
    with cluster_secret(settings.secret_file) as secret_file:
        router = RouterService(_router_settings(settings, model, secret_file))

        async def use(_: dict[str, Facts], until: asyncio.Event) -> None:
            await router.wait_ready()
            await when_ready(router, until)

        try:
            # The router runs already when the workers are started, so each gets its address at once.
            await router.start(has_public_ports=False)
            specs = _workers(settings, model, secret_file, router.addresses.as_dict())
            await supervise(Supervisor(specs), stopped, use)
        finally:
            await router.stop()


def _router_settings(settings: LocalSettings, model: Path, secret_file: Path) -> RouterSettings:
    """Return the settings of a router of ``kvbaton up``, without limits that only a service with many clients needs."""
    unlimited = {"request_timeout_seconds": NO_TIMEOUT_SECONDS, "max_queue": _MAX_QUEUE}
    environment = child_environment(unlimited | from_file(settings, Role.ROUTER))
    names = (name for name in RouterSettings.model_fields if variable(name) in environment)
    own = {
        "model": model,
        "served_model_name": settings.served_model_name or model_name(settings.model),
        "secret_file": secret_file,
        "internal": _LOOPBACK,
    }
    given = {name: environment[variable(name)] for name in names}
    return parse(RouterCommand, "kvbaton router", to_arguments(given | own))


def _workers(settings: LocalSettings, model: Path, secret_file: Path, router: Facts) -> list[ProcessSpec]:
    def with_router(spec: ProcessSpec) -> Callable[[Mapping[str, Facts]], list[str]]:
        return lambda _: spec.command({ROUTER: router})

    return [
        replace(spec, needs=(), command=with_router(spec))
        for spec in local_processes(settings, model, secret_file)
        if spec.name != ROUTER
    ]
