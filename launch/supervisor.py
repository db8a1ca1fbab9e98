"""Keeps the processes of one machine running; ``kvbaton up`` and the library use it.

1. Each process starts when the processes that it needs are ready (workers need the router's address).
2. A process that ends before it was ever ready ends the supervisor with an error: a restart would not help.
3. When all are ready, and after every later change, the ready file is written with their addresses.
4. A process that ends later is restarted, after a delay that doubles while it keeps failing.
5. ``add``, ``retire`` and ``reconcile`` change the processes at run time. An added process that does not become ready is
   restarted as in 4, since the others keep serving; a retired one gets its drain time and is not restarted.
6. ``stopped`` stops them: first the ones that others need (the router accepts no more requests), then the others.

``StoppingProcesses`` stops processes in the order in which they depend on each other, and ``write_ready_file`` publishes the
addresses of those that run, for scripts and tests.
"""

import asyncio
import json
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from contract.errors import SettingError, UnavailableError
from contract.identity import Role
from launch.kept_process import (
    Facts,
    KeptProcess,
    Listener,
    ProcessSpec,
    ProcessState,
    RestartPolicy,
    check_specs,
)

logger = logging.getLogger(__name__)


class StoppingProcesses:
    """Owns the tasks that stop processes, by the process's name."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def task_of(self, name: str) -> asyncio.Task[None] | None:
        """Return the task that ends when the earlier process of this name has ended; None if there is none."""
        return self._tasks.get(name)

    def stop(
        self, processes: Collection[KeptProcess], at_once: asyncio.Event | None
    ) -> set[asyncio.Task[None]]:
        """Stop the processes, first those that others of them need; return the tasks, which end with them.

        at_once: when it is set, the processes abandon their work.
        """
        for process in processes:
            process.release()
        needed = {name for process in processes for name in process.spec.needs}
        # The routers first: as long as one accepts requests, the workers would get new ones.
        first = {
            self._stop_after(process, set(), at_once) for process in processes if process.spec.name in needed
        }
        others = {
            self._stop_after(process, first, at_once)
            for process in processes
            if process.spec.name not in needed
        }
        return first | others

    async def wait(self) -> None:
        """Block until all have ended, and raise the error of one that failed."""
        await wait_for(set(self._tasks.values()))

    def _stop_after(
        self, process: KeptProcess, first: set[asyncio.Task[None]], at_once: asyncio.Event | None
    ) -> asyncio.Task[None]:
        name = process.spec.name
        earlier = {self._tasks[name]} if name in self._tasks else set()

        async def stop() -> None:
            if before := first | earlier:
                await asyncio.wait(before)
            await process.stop(at_once)

        def forget(ended: asyncio.Task[None]) -> None:
            if self._tasks.get(name) is ended:  # else a later process of this name is being stopped already
                del self._tasks[name]

        self._tasks[name] = task = asyncio.create_task(stop(), name=f"stop {name}")
        task.add_done_callback(forget)
        return task


async def wait_for(ended: set[asyncio.Task[None]]) -> None:
    """Block until all tasks have ended, and raise the error of one; they continue if the caller is cancelled."""
    if ended:
        await asyncio.wait(ended)
    for task in ended:
        task.result()


def write_ready_file(
    path: Path | None,
    specs: Sequence[ProcessSpec],
    running: Collection[str],
    known: Mapping[str, Facts],
) -> None:
    """Replace ``path`` atomically; None writes nothing.

    running: names of the processes that are ready now. known: facts of all processes that were ever ready.

    Content: ``{"http", "grpc", "processes": [{"name", "role", "pid", "admin"}]}``, the first router's addresses and the
    running processes in the order of ``specs``; routers also have "http" and "grpc".
    """
    if path is None:
        return
    router = next((known[spec.name] for spec in specs if spec.role is Role.ROUTER and spec.name in known), {})
    ready = [(spec, known[spec.name]) for spec in specs if spec.name in running]
    processes = [
        {"name": spec.name, "role": spec.role.value, "pid": facts["pid"], "admin": facts["admin"]}
        | ({"http": facts["http"], "grpc": facts["grpc"]} if spec.role is Role.ROUTER else {})
        for spec, facts in ready
    ]
    content = {"http": router.get("http"), "grpc": router.get("grpc"), "processes": processes}
    # A script that waits for the file reads it as soon as it is there, so it must never be half written.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
    Path(name).replace(path)


def remove_ready_file(path: Path | None) -> None:
    """Remove the file, so that it does not stand for a running service."""
    if path is not None:
        path.unlink(missing_ok=True)


class Supervisor:
    """Owns the processes of ``specs`` and later additions. ``run`` is called once; everything runs in its event loop.

    Raises SettingError if two specs have the same name, or one needs a process that does not exist.
    """

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        ready_file: Path | None = None,
        policy: RestartPolicy | None = None,
        listener: Listener | None = None,
    ) -> None:
        self._ready_file = ready_file
        self._policy = policy or RestartPolicy()
        self._listener = listener
        self._processes: dict[str, KeptProcess] = {}
        self._stopping = StoppingProcesses()
        self._failed: asyncio.Future[None] | None = None  # set by ``run``
        self._at_once: asyncio.Event | None = None
        self._has_published = False
        self._is_stopping = False
        check_specs(specs)
        self._add_all(specs)

    @property
    def facts(self) -> dict[str, Facts]:
        """The facts of every process that was ever ready, by name; without those of retired ones."""
        return {name: process.facts for name, process in self._processes.items() if process.facts is not None}

    @property
    def num_restarts(self) -> Counter[str]:
        """The number of restarts of each process."""
        return Counter(
            {name: process.num_restarts for name, process in self._processes.items() if process.num_restarts}
        )

    async def wait_ready(self) -> dict[str, Facts]:
        """Block until every present process was ready once or is retired; return the facts by name."""
        for process in list(self._processes.values()):  # a copy: processes may be added and retired meanwhile
            await process.was_ready.wait()
        return self.facts

    def add(self, spec: ProcessSpec) -> None:
        """Start another process and keep it running; a retired one of the same name ends first.

        Raises SettingError if its name is in use or it needs a process that does not exist, UnavailableError when the
        supervisor is stopping.
        """
        self._refuse_while_stopping()
        check_specs([*(process.spec for process in self._processes.values()), spec])
        self._add_all([spec])

    async def retire(self, name: str) -> None:
        """Stop a process after its drain time and do not restart it; return when it has ended.

        It is stopped even if the caller is cancelled. Raises SettingError if there is no such process or another one
        needs it, UnavailableError when the supervisor is stopping.
        """
        self._refuse_while_stopping()
        if name not in self._processes:
            raise SettingError(f"unknown process {name!r}; the processes are {', '.join(self._processes)}")
        if needing := [other for other, process in self._processes.items() if name in process.spec.needs]:
            raise SettingError(f"{name} cannot be retired: {', '.join(needing)} needs it; retire that first")
        await wait_for(self._retire([name]))

    async def reconcile(self, desired: Sequence[ProcessSpec]) -> None:
        """Start the missing processes, retire those that are not in ``desired``, and leave the others unchanged.

        Names are compared, not specs: a running process keeps its spec. A call takes effect at once, even while an earlier
        call still waits. It returns when the processes that it retired have ended; ``wait_ready`` waits for those that it
        started. Raises SettingError as the constructor does, UnavailableError when the supervisor is stopping; it changes
        nothing then.
        """
        self._refuse_while_stopping()
        present = {name: process.spec for name, process in self._processes.items()}
        check_specs([present.get(spec.name, spec) for spec in desired])
        names = {spec.name for spec in desired}
        ended = self._retire([name for name in present if name not in names])
        self._add_all([spec for spec in desired if spec.name not in present])
        await wait_for(ended)

    async def run(self, stopped: asyncio.Event, at_once: asyncio.Event | None = None) -> None:
        """Start all processes and keep them running until ``stopped`` is set; none is left when this returns or raises.

        at_once: when it is set, the processes abandon their work.

        Raises UnavailableError, which names the process, when one of the initial processes ends before it was ready.
        """
        remove_ready_file(self._ready_file)
        self._at_once = at_once
        self._failed = failed = asyncio.get_running_loop().create_future()
        for process in self._processes.values():
            self._start(process)
        stop = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait({stop, failed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            self._is_stopping = True
            remove_ready_file(self._ready_file)
            self._stopping.stop(self._processes.values(), self._at_once)
            await self._stopping.wait()  # also for processes that were retired before
        if failed.done():
            failed.result()

    def _refuse_while_stopping(self) -> None:
        if self._is_stopping:
            raise UnavailableError("the supervisor is stopping; it starts and retires no more processes")

    def _add_all(self, specs: Sequence[ProcessSpec]) -> None:
        # An end before the process was ever ready is an error at the start, when a user waits; later the others serve on.
        is_running = self._failed is not None
        added = [
            KeptProcess(spec, self._policy, must_start=not is_running, on_change=self._on_change)
            for spec in specs
        ]
        self._processes |= {process.spec.name: process for process in added}
        if is_running:
            for process in added:
                self._start(process)

    def _start(self, process: KeptProcess) -> None:
        needed = [self._processes[name] for name in process.spec.needs]
        keeper = process.start(lambda: self.facts, needed, self._stopping.task_of(process.spec.name))
        keeper.add_done_callback(self._on_keeper_end)

    def _on_keeper_end(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled() or self._failed is None or self._failed.done():
            return
        if (error := keeper.exception()) is not None:
            self._failed.set_exception(error)

    def _retire(self, names: Collection[str]) -> set[asyncio.Task[None]]:
        retired = [self._processes.pop(name) for name in names]
        ended = self._stopping.stop(retired, self._at_once)
        for process in retired:
            process.was_ready.set()  # nothing waits for it any longer
        if retired:
            self._publish()
        return ended

    def _on_change(self, spec: ProcessSpec, state: ProcessState, facts: Facts) -> None:
        if self._is_stopping:  # the ready file is gone, and must not come back
            return
        if state is not ProcessState.STARTED:
            self._publish()
        logger.info("%s %s (pid %s)", spec.name, state.value, facts["pid"])
        if self._listener:
            self._listener(spec, state, facts)

    def _publish(self) -> None:
        """Write the ready file if all initial processes were ready once; it does not wait for later additions."""
        processes = self._processes.values()
        # Once is enough: a process that is restarted, or was added, must not take the file from those that serve.
        self._has_published = self._has_published or all(process.was_ready.is_set() for process in processes)
        if self._is_stopping or not self._has_published:
            return
        running = {name for name, process in self._processes.items() if process.is_ready}
        write_ready_file(self._ready_file, [process.spec for process in processes], running, self.facts)
