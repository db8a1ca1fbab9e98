"""Runs the law on a service: reads the routers, decides, and lets a launcher and the routers carry the orders out."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from autoscaler.decision import Decision, Order, Reason, Verb
from autoscaler.launcher import Launcher
from autoscaler.law import decide
from autoscaler.memory import Memory
from autoscaler.policy import ScalingPolicy
from autoscaler.pools import Facts, PoolBook, cheapest, figures, merged
from autoscaler.router_counts import CountHistory, RouterCounts, parse_counts
from autoscaler.sharing import OTHER
from autoscaler.signals import Signals
from autoscaler.timing_model import TimingModel
from contract.errors import KvbatonError
from contract.identity import Role
from launch.router_admin import RouterAdmin

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 5.0


class Controller:
    """Scales the pools of one service. ``run`` is called once.

    routers: returns the admin APIs of all routers. clock: seconds, monotonic.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        timing: TimingModel,
        launcher: Launcher,
        routers: Callable[[], Sequence[RouterAdmin]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._laws = (policy, timing)
        self._launcher = launcher
        self._routers = routers
        self._clock = clock
        self._memory = Memory()
        self._history = CountHistory()
        self._book = PoolBook()
        self._workers: dict[str, Facts] = {}
        self._draining: set[str] = set()
        self._removals: set[asyncio.Task[None]] = set()

    async def run(self, interval: float = INTERVAL_SECONDS) -> None:
        """Decide every ``interval`` seconds, until cancelled."""
        await self.begin()
        while True:
            await asyncio.sleep(interval)
            await self.decide_once()

    async def begin(self) -> None:
        """Read the routers once, so that the first decision can compare with that."""
        self._history.add(self._clock(), await self._read())

    async def decide_once(self) -> Decision:
        """Read the routers, decide, log the decision, and carry it out."""
        now = self._clock()
        self._history.add(now, await self._read())
        load = self._history.load(figures(self._workers))
        pools = self._book.update(now, self._launcher.names(), self._workers)
        signals = Signals(
            time=now,
            prefill=pools[Role.PREFILL],
            decode=pools[Role.DECODE],
            load=load,
            start_seconds=self._book.start_seconds,
        )
        policy, timing = self._laws
        decision, self._memory = decide(policy, timing, self._memory, signals)
        is_held = any(pool.reason is Reason.NO_SIGNALS for pool in decision.pools.values())
        level = logging.WARNING if is_held else logging.INFO if decision.orders else logging.DEBUG
        logger.log(level, "%s", decision.line)
        self._remove_drained()
        for order in decision.orders:
            for _ in range(order.number):
                await self._carry_out(order)
        return decision

    async def wait_removed(self) -> None:
        """Wait until the workers that are being removed have ended."""
        await asyncio.gather(*self._removals)

    async def _read(self) -> dict[str, RouterCounts]:
        """Return the counts of the routers that answer; the lists of workers are remembered if any does."""
        counts: dict[str, RouterCounts] = {}
        lists = []
        for router in self._routers():
            try:
                workers = (await router.pool())["workers"]
                counts[router.address] = parse_counts(await router.metrics())
                lists.append(workers)
            except (KvbatonError, ValueError) as error:
                logger.warning("router %s is not read: %s", router.address, error)
        if lists:
            self._workers = dict(merged(lists))
        return counts

    async def _carry_out(self, order: Order) -> None:
        """Do what an order asks for, to one worker. An error is logged: the next decision counts what is there."""
        role = order.role
        try:
            if order.verb is Verb.ADD:
                self._launcher.add(role)
            elif name := self._worker_for(order):
                await self._apply(order, name)
        except KvbatonError as error:
            logger.warning("%s of a %s worker has failed: %s", order.verb.value, role.value, error.message)

    def _worker_for(self, order: Order) -> str | None:
        """Return the worker to which an order is applied; None if there is none any more."""
        launched = self._launcher.names()
        if order.verb is Verb.FORGET:
            return self._book.oldest_start(order.role, launched)
        if order.verb is Verb.KEEP:
            of_role = [
                name
                for name in self._draining & self._workers.keys()
                if self._workers[name]["role"] == order.role.value
            ]
            return min(of_role, default=None)
        return cheapest(self._workers.values(), order.role, launched)

    async def _apply(self, order: Order, name: str) -> None:
        match order.verb:
            case Verb.FORGET:
                self._remove(name)
            case Verb.DRAIN:
                self._draining.add(name)  # also if no answer arrives: the worker may drain all the same
                await self._order(name, "drain")
            case Verb.KEEP:
                await self._order(name, "undrain")
                self._draining.discard(name)
            case Verb.FLIP:
                await self._order(name, "flip", role=OTHER[order.role].value)

    async def _order(self, worker: str, verb: str, **query: str) -> None:
        """Send an order through the first router that answers. Raises the last error if none does."""
        error = KvbatonError("there is no router")
        for router in self._routers():
            try:
                self._workers[worker] = await router.order(worker, verb, **query)
                return
            except KvbatonError as failed:
                error = failed
        raise error

    def _remove_drained(self) -> None:
        """Remove the workers that this controller has drained and that are empty, or have gone; others may serve again."""
        for name in list(self._draining):
            state = self._workers[name]["state"] if name in self._workers else None
            if state in (None, "empty", "leaving", "serving"):
                self._draining.discard(name)
            if state in (None, "empty", "leaving"):
                self._remove(name)

    def _remove(self, name: str) -> None:
        task = asyncio.create_task(_removed(self._launcher, name), name=f"remove {name}")
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)


async def _removed(launcher: Launcher, name: str) -> None:
    try:
        await launcher.remove(name)
    except KvbatonError as error:
        logger.warning("worker %s is not removed: %s", name, error.message)
