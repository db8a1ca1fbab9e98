"""Runs the law on a service: reads the routers, decides, and lets a launcher and the routers carry the orders out.

A worker that is to go is drained through a router first, and removed by the launcher when it is empty (``Departures``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from autoscaler.arbiter import OTHER
from autoscaler.decision import Decision, Order, Verb
from autoscaler.groups import KEEPABLE
from autoscaler.launchers.launcher import Launcher
from autoscaler.law import decide
from autoscaler.memory import Memory
from autoscaler.policy import ScalingPolicy
from autoscaler.pools import PoolBook, cheapest
from autoscaler.routers import Admins, Routers
from autoscaler.signals import Signals
from autoscaler.timing_model import TimingModel
from contract.errors import KvbatonError
from contract.identity import Role
from contract.scaling import AUTOSCALER, ScalingReason

logger = logging.getLogger(__name__)


class Departures:
    """Owns the removals that run. draining: the workers that this autoscaler has drained, until they are removed."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._removals: dict[asyncio.Task[None], str] = {}
        self.draining: set[str] = set()

    @property
    def leaving(self) -> set[str]:
        """The workers that are being removed."""
        return set(self._removals.values())

    @property
    def keepable(self) -> set[str]:
        """The drained workers that may serve again."""
        return self.draining - self.leaving

    def remove(self, name: str) -> None:
        """Begin to remove a worker. If that fails, it counts as drained, so that it is tried again."""
        # A task of its own: a worker may take its whole grace to end, and the pools must be decided meanwhile.
        task = asyncio.create_task(self._try_to_remove(name), name=f"remove {name}")
        self._removals[task] = name
        task.add_done_callback(self._removals.pop)

    async def wait(self) -> None:
        """Wait until the workers that are being removed have ended."""
        await asyncio.gather(*self._removals)

    async def _try_to_remove(self, name: str) -> None:
        try:
            await self._launcher.remove(name)
        except KvbatonError as error:
            logger.warning("worker %s is not removed: %s", name, error.message)
            self.draining.add(name)


class Controller:
    """Scales the pools of one service. ``decide_once`` is called every few seconds, after ``begin``.

    clock: seconds, monotonic. may_order: returns False when another autoscaler may have taken over. num_restarts: the number
    of controllers before this one, which have failed. start_seconds: time of the starts before the first order, if known.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        timing: TimingModel,
        launcher: Launcher,
        routers: Admins,
        clock: Callable[[], float] = time.monotonic,
        *,
        may_order: Callable[[], bool] = lambda: True,
        num_restarts: int = 0,
        start_seconds: float | None = None,
    ) -> None:
        self._laws = (policy, timing)
        self._launcher = launcher
        self._routers = Routers(routers, num_restarts)
        self._clock = clock
        self._memory = Memory()
        self._book = PoolBook(initial_seconds=start_seconds)
        self._launched: Sequence[tuple[str, Role]] = ()
        self._departures = Departures(launcher)
        self._may_order = may_order
        self.last: Decision | None = None

    async def begin(self) -> bool:
        """Read routers and launcher, so that the first decision can compare with that. Returns False if either is away.

        The workers that an autoscaler drains are taken over from the controller before this one; others are an operator's.
        """
        if not (await self._routers.read(self._clock()) and await self._list()):
            return False
        for name, _ in self._launched:
            if self._routers.state_of(name) not in KEEPABLE:
                continue
            if self._routers.workers[name].get("drained_by") == AUTOSCALER:
                self._departures.draining.add(name)
            else:
                logger.warning(
                    "worker %s drains, which no autoscaler has ordered: it stays until an operator undoes that",
                    name,
                )
        return True

    async def decide_once(self) -> Decision:
        """Read routers and launcher, decide, log the decision, and carry it out."""
        now = self._clock()
        is_known = await self._routers.read(now)
        is_known = await self._list() and is_known  # the list is read in any case: orders name its workers
        load = self._routers.load() if is_known else None
        pools = self._book.update(
            now,
            self._launched,
            self._routers.workers,
            keepable=self._departures.keepable,
            is_known=is_known,
        )
        signals = Signals(
            time=now,
            prefill=pools[Role.PREFILL],
            decode=pools[Role.DECODE],
            load=load,
            start_seconds=self._book.start_seconds,
            num_starts=self._book.num_starts,
        )
        policy, timing = self._laws
        decision, self._memory = decide(policy, timing, self._memory, signals)
        for role, pool in decision.pools.items():
            was_bounded = self.last is not None and self.last.pools[role].is_correction_bounded
            if pool.is_correction_bounded and not was_bounded:
                logger.warning(
                    "the measured times of %s workers differ from those of the timing model by more than the bound of a"
                    " correction (%.2g times is used): the number of workers may be wrong; measure the model again"
                    " (kvbaton bench --profile)",
                    role.value,
                    pool.correction,
                )
        self.last = decision
        is_held = any(pool.reason is ScalingReason.NO_SIGNALS for pool in decision.pools.values())
        level = logging.WARNING if is_held else logging.INFO if decision.orders else logging.DEBUG
        logger.log(level, "%s", decision.line)
        # Before the orders, which may take a minute: with empty pools a router is ready only while decisions arrive.
        await self._routers.report(decision.report(policy))
        for order in decision.orders:
            for _ in range(order.number):
                if not self._may_order():
                    logger.warning("the lease has ended: the rest of the orders is left to the next decision")
                    return decision
                await self._carry_out(order)
        for name in self._departures.keepable:
            state = self._routers.state_of(name)
            if state in (None, "empty", "leaving", "serving"):  # serving: an operator has undone the drain
                self._departures.draining.discard(name)
            if state in (None, "empty", "leaving"):
                self._departures.remove(name)
        return decision

    async def wait_removed(self) -> None:
        """Wait until the workers that are being removed have ended."""
        await self._departures.wait()

    async def _list(self) -> bool:
        """Read the launcher's list. Returns False, and keeps the last one, if the launcher does not answer."""
        try:
            self._launched = await self._launcher.names()
        except KvbatonError as error:
            logger.warning("the workers that were started are not known: %s", error.message)
            return False
        return True

    async def _carry_out(self, order: Order) -> None:
        """Do what an order asks for, to one worker. An error is logged: the next decision counts what is there."""
        role = order.role
        try:
            if order.verb is Verb.ADD:
                await self._launcher.add(role)
            elif name := self._worker_for(order):
                await self._apply(order, name)
            else:
                logger.warning(
                    "%s of a %s worker: there is none that was started here", order.verb.value, role.value
                )
        except KvbatonError as error:
            logger.warning("%s of a %s worker has failed: %s", order.verb.value, role.value, error.message)

    def _worker_for(self, order: Order) -> str | None:
        """Return the worker to which an order is applied; None if there is none any more."""
        workers = self._routers.workers
        leaving = self._departures.leaving
        launched = [(name, role) for name, role in self._launched if name not in leaving]
        if order.verb is Verb.FORGET:
            return self._book.oldest_start(order.role, [name for name, _ in launched])
        if order.verb is Verb.KEEP:
            of_role = [
                name
                for name in self._departures.draining & workers.keys()
                if workers[name]["role"] == order.role.value
            ]
            return min(of_role, default=None)
        return cheapest(workers.values(), order.role, launched)

    async def _apply(self, order: Order, name: str) -> None:
        match order.verb:
            case Verb.FORGET:
                self._book.give_up(name, self._clock())
                self._departures.remove(name)
                await asyncio.sleep(0)  # the removal begins, so that its place is free for the next order
            case Verb.DRAIN:
                # Before the order: if its answer is lost, the worker may drain all the same.
                self._departures.draining.add(name)
                await self._routers.order(name, "drain", by=AUTOSCALER)
            case Verb.KEEP:
                await self._routers.order(name, "undrain")
                self._departures.draining.discard(name)
            case Verb.FLIP:
                await self._routers.order(name, "flip", role=OTHER[order.role].value)
