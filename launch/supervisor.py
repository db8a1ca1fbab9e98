"""Keeps the processes of one machine running; ``kvbaton up`` and the library use it.

1. Every process starts when those that it needs are ready (workers need the router's address).
2. A process that ends before it was ever ready ends the supervisor with an error: starting it again would not help.
3. When all are ready, and after every later change, the ready file says where they are.
4. A process that ends later is started again, after a delay that doubles while it keeps failing.
5. ``add``, ``retire`` and ``reconcile`` change the processes meanwhile. One that is added later and does not become
   ready is started again as in 4, since the others serve on; one that is retired has its drain time and stays away.
6. ``stopped`` ends them: first what others need (the router takes no more requests), then the others.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from contract.errors import SettingError, UnavailableError
from launch.kept_process import KeptProcess, Listener, ProcessState, RestartPolicy
from launch.ready_file import remove_ready_file, write_ready_file
from launch.spec import Facts, ProcessSpec, check_specs

logger = logging.getLogger(__name__)


class Supervisor:
    """Owns the processes of ``specs`` and of those that are added. ``run`` is called once; all runs in its event loop.

    Raises SettingError where two specs have one name, or one needs a process that is not there.
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
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None  # there is one from the start of ``run``
        self._at_once: asyncio.Event | None = None
        self._has_published = False
        self._is_stopping = False
        check_specs(specs)
        self._take_on(specs)

    @property
    def facts(self) -> dict[str, Facts]:
        """Return the facts of every process that was ever ready, by name; those of a retired one are forgotten."""
        return {name: process.facts for name, process in self._processes.items() if process.facts is not None}

    @property
    def num_restarts(self) -> Counter[str]:
        """Return how often each process was started again."""
        return Counter(
            {name: process.num_restarts for name, process in self._processes.items() if process.num_restarts}
        )

    async def wait_ready(self) -> dict[str, Facts]:
        """Block until every present process has been ready once or is retired; return the facts by name."""
        for process in list(self._processes.values()):
            await process.was_ready.wait()
        return self.facts

    def add(self, spec: ProcessSpec) -> None:
        """Start one more process, and keep it running; a retired one of its name ends first.

        Raises SettingError where its name is taken or it needs a process that is not there, UnavailableError when the
        supervisor is stopping.
        """
        self._refuse_while_stopping()
        check_specs([*(process.spec for process in self._processes.values()), spec])
        self._take_on([spec])

    async def retire(self, name: str) -> None:
        """Stop a process, with its drain time, and start it no more; returns when it has ended.

        It is stopped also where the caller is cancelled meanwhile. Raises SettingError where there is no such process or
        another one needs it, UnavailableError when the supervisor is stopping.
        """
        self._refuse_while_stopping()
        if name not in self._processes:
            raise SettingError(f"no process is named {name!r}; there are {', '.join(self._processes)}")
        if needing := [other for other, process in self._processes.items() if name in process.spec.needs]:
            raise SettingError(f"{name} cannot be retired: {', '.join(needing)} needs it; retire that first")
        await _wait_for(self._retire([name]))

    async def reconcile(self, wanted: Sequence[ProcessSpec]) -> None:
        """Start what is missing, retire what is not wanted any more, and leave the rest alone.

        Names are compared, not specs: a running process keeps the spec with which it was started. A call acts at once,
        even while an earlier one still waits. It returns when the processes that it retired have ended; ``wait_ready``
        waits for those that it started. Raises SettingError as the constructor does, UnavailableError when the supervisor is
        stopping; then nothing is changed.
        """
        present = {name: process.spec for name, process in self._processes.items()}
        self._refuse_while_stopping()
        check_specs([present.get(spec.name, spec) for spec in wanted])
        names = {spec.name for spec in wanted}
        ended = self._retire([name for name in present if name not in names])
        self._take_on([spec for spec in wanted if spec.name not in present])
        await _wait_for(ended)

    async def run(self, stopped: asyncio.Event, at_once: asyncio.Event | None = None) -> None:
        """Start all and keep them running until ``stopped`` is set; no process is left when this returns or raises.

        at_once: set when the processes are not to finish their work first.

        Raises UnavailableError, which names the process, when one of the first ends before it was ever ready.
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
            await self._stop_all()
        if failed.done():
            failed.result()

    def _refuse_while_stopping(self) -> None:
        if self._is_stopping:
            raise UnavailableError("the processes are being stopped; nothing is started or retired any more")

    def _take_on(self, specs: Sequence[ProcessSpec]) -> None:
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
        keeper = process.start(lambda: self.facts, needed, self._ending.get(process.spec.name))
        keeper.add_done_callback(self._on_keeper_end)

    def _on_keeper_end(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled() or self._failed is None or self._failed.done():
            return
        if (error := keeper.exception()) is not None:
            self._failed.set_exception(error)

    def _retire(self, names: Collection[str]) -> set[asyncio.Task[None]]:
        retired = [self._processes.pop(name) for name in names]
        ended = self._end(retired)
        for process in retired:
            process.was_ready.set()  # nothing waits for it any longer
        if retired:
            self._publish()
        return ended

    def _end(self, processes: Collection[KeptProcess]) -> set[asyncio.Task[None]]:
        """Stop the processes: those that others of them need, then the others. The tasks end with them."""
        for process in processes:
            process.release()
        needed = {name for process in processes for name in process.spec.needs}
        first = {self._end_after(process, set()) for process in processes if process.spec.name in needed}
        others = {self._end_after(process, first) for process in processes if process.spec.name not in needed}
        return first | others

    def _end_after(self, process: KeptProcess, first: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        name = process.spec.name
        earlier = {self._ending[name]} if name in self._ending else set()
        task = asyncio.create_task(_stop(process, first | earlier, self._at_once), name=f"stop {name}")
        self._ending[name] = task
        task.add_done_callback(lambda _: self._forget_end(name, task))
        return task

    def _forget_end(self, name: str, task: asyncio.Task[None]) -> None:
        if self._ending.get(name) is task:
            del self._ending[name]

    async def _stop_all(self) -> None:
        self._is_stopping = True
        remove_ready_file(self._ready_file)
        self._end(self._processes.values())
        await _wait_for(set(self._ending.values()))

    def _on_change(self, spec: ProcessSpec, state: ProcessState, facts: Facts) -> None:
        if self._is_stopping:
            return
        if state is not ProcessState.STARTED:
            self._publish()
        logger.info("%s %s (pid %s)", spec.name, state.value, facts["pid"])
        if self._listener:
            self._listener(spec, state, facts)

    def _publish(self) -> None:
        """Write the ready file if all have been ready once; one that is added later is not waited for."""
        processes = self._processes.values()
        self._has_published = self._has_published or all(process.was_ready.is_set() for process in processes)
        if self._is_stopping or not self._has_published:
            return
        running = {name for name, process in self._processes.items() if process.is_ready}
        write_ready_file(self._ready_file, [process.spec for process in processes], running, self.facts)


async def _stop(process: KeptProcess, first: set[asyncio.Task[None]], at_once: asyncio.Event | None) -> None:
    """Stop a process when the processes of ``first`` have ended."""
    if first:
        await asyncio.wait(first)
    await process.stop(at_once)


async def _wait_for(ended: set[asyncio.Task[None]]) -> None:
    """Block until all have ended, and raise what one of them raises; they go on if the caller is cancelled."""
    if ended:
        await asyncio.wait(ended)
    for task in ended:
        task.result()
