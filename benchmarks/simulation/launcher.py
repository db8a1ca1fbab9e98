"""Starts and removes simulated workers, as a launcher does: a start takes time, or never ends."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from autoscaler.arbiter import OTHER
from autoscaler.decision import Order, Verb
from autoscaler.pools import NUM_STARTS
from autoscaler.signals import PoolSignals
from autoscaler.timing_model import TimingModel
from benchmarks.simulation.pool import SimulatedPool, SimulatedWorker
from benchmarks.simulation.timeline import Timeline
from contract.identity import Role

Starts = Callable[[int], float | None]
"""Returns the seconds that a start takes, None for one that never ends, by the worker's number from 0 on."""
_FULL = 0.9
"""The used part of a worker's KV from which on hardly a request fits."""


@dataclass
class _Starting:
    """A worker that was ordered, and is not ready."""

    role: Role
    since: float


class SimulatedLauncher:
    """Owns the workers that are not ready yet, and carries out orders."""

    def __init__(
        self, timeline: Timeline, pool: SimulatedPool, timing: TimingModel, starts: Starts | None
    ) -> None:
        self._timeline = timeline
        self._pool = pool
        self._timing = timing
        self._starts = starts or (lambda number: timing.start_seconds)
        self._starting: dict[str, _Starting] = {}
        self._took: deque[float] = deque(maxlen=NUM_STARTS)
        self._num_named = 0

    def attach(self, role: Role) -> None:
        """Add a worker that is ready at once."""
        self._pool.add(self._name(role), role)

    def carry_out(self, order: Order) -> None:
        """Do what an order asks for, to as many workers as it names."""
        role = order.role
        for _ in range(order.number):
            match order.verb:
                case Verb.ADD:
                    self._add(role)
                case Verb.DRAIN:
                    self._pool.drain(self._cheapest(role).name)
                case Verb.KEEP:
                    self._pool.keep(next(one.name for one in self._workers(role) if one.is_draining))
                case Verb.FLIP:
                    self._pool.flip(self._cheapest(role).name, OTHER[role])
                case Verb.FORGET:
                    of_role = [(one.since, name) for name, one in self._starting.items() if one.role is role]
                    self._ended(min(of_role)[1])

    def num_existing(self, role: Role) -> int:
        """Return how many workers of a pool occupy devices."""
        return len(self._workers(role)) + sum(one.role is role for one in self._starting.values())

    def signals(self, role: Role) -> PoolSignals:
        """Return the signals of a pool."""
        workers = self._workers(role)
        ready = [worker for worker in workers if not worker.is_draining]
        timing = self._timing
        is_prefill = role is Role.PREFILL
        return PoolSignals(
            num_ready=len(ready),
            starting_ages=tuple(
                self._timeline.now - one.since for one in self._starting.values() if one.role is role
            ),
            num_draining=len(workers) - len(ready),
            num_keepable=len(workers) - len(ready),
            num_in_flight=sum(one.num_legs if is_prefill else one.decode.num_answers for one in ready),
            max_in_flight=len(ready) * timing.max_answers,
            max_tokens=len(ready) * timing.kv_tokens,
            is_full=all(
                one.num_legs >= timing.max_answers or one.num_tokens >= _FULL * timing.kv_tokens
                for one in ready
            ),
        )

    @property
    def start_seconds(self) -> float | None:
        """The median time of recent starts, also of those that were given up; None before the first one."""
        return median(self._took) if self._took else None

    @property
    def num_starts(self) -> int:
        """The number of recent starts that have ended."""
        return len(self._took)

    def _ended(self, name: str) -> _Starting:
        """Remove a start that is over, and keep its time."""
        started = self._starting.pop(name)
        self._took.append(self._timeline.now - started.since)
        return started

    def _add(self, role: Role) -> None:
        number = self._num_named
        name = self._name(role)
        self._starting[name] = _Starting(role, self._timeline.now)
        if (seconds := self._starts(number)) is not None:
            self._timeline.after(seconds, lambda: self._on_ready(name))

    def _on_ready(self, name: str) -> None:
        if name in self._starting:
            self._pool.add(name, self._ended(name).role)

    def _cheapest(self, role: Role) -> SimulatedWorker:
        """Return the worker whose work is moved with the least effort."""
        serving = [worker for worker in self._workers(role) if not worker.is_draining]
        return min(serving, key=lambda worker: (worker.num_tokens, worker.name))

    def _workers(self, role: Role) -> list[SimulatedWorker]:
        return [worker for worker in self._pool.workers.values() if worker.role is role]

    def _name(self, role: Role) -> str:
        self._num_named += 1
        return f"{role.value}-{self._num_named - 1}"
