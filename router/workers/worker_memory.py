"""Remembers workers beyond one incarnation: how often each started again, and how large the lost ones were."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from contract.membership import Registration
from router.routing.views import WorkerSize

_MAX_NAMES = 8192
"""The names of workers whose restarts are remembered. Kubernetes gives every pod a name of its own."""


@dataclass(frozen=True)
class _Boot:
    boot_id: str
    num_restarts: int


class WorkerMemory:
    """Owns what a router remembers of workers by their ids.

    seconds: how long the size of a detached worker is remembered, since it may be starting again.
    """

    def __init__(self, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._gone: dict[str, tuple[float, WorkerSize]] = {}
        self._boots: OrderedDict[str, _Boot] = OrderedDict()
        self._restarts: Counter[str] = Counter()

    @property
    def restarts(self) -> Mapping[str, int]:
        """The number of restarts that this router has seen, by the role of the worker."""
        return self._restarts

    def attached(self, registration: Registration) -> int:
        """Record a process that attaches; return how often this worker was started again, as far as it was reported.

        A process with another boot id is a restart. A supervisor may have restarted it several times since, because it ended
        before it could attach. A router that has started later has only the count of the supervisor.
        """
        before = self._boots.pop(registration.worker_id, None)
        num_restarts = registration.num_restarts
        if before is not None:
            is_new = before.boot_id != registration.boot_id
            num_restarts = max(num_restarts, before.num_restarts + is_new)
            self._restarts[registration.role] += num_restarts - before.num_restarts
        self._boots[registration.worker_id] = _Boot(registration.boot_id, num_restarts)
        if len(self._boots) > _MAX_NAMES:
            self._boots.popitem(last=False)
        self._gone.pop(registration.worker_id, None)
        return num_restarts

    def detached(self, worker_id: str, size: WorkerSize) -> None:
        """Remember the size of a worker for a while."""
        self._gone[worker_id] = self._clock() + self._seconds, size

    def recent_sizes(self) -> list[WorkerSize]:
        """Return the sizes of the workers that were detached a moment ago."""
        if self._gone:
            now = self._clock()
            self._gone = {name: gone for name, gone in self._gone.items() if gone[0] > now}
        return [size for _, size in self._gone.values()]
