"""All routers of a service, by their admin APIs, as one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import structs

from autoscaler.pools import Facts, check_facts, figures
from autoscaler.router_counts import CountHistory, RouterCounts, parse_counts
from autoscaler.signals import LoadSignals
from contract.errors import KvbatonError
from contract.scaling import ScalingReport
from launch.router_admin import RouterAdmin, merged, order_first

logger = logging.getLogger(__name__)
_Reading = tuple[str, Sequence[Facts], RouterCounts]
"""The address of a router, its list of workers, and its counts."""

Admins = Callable[[], Awaitable[Sequence[RouterAdmin]]]
"""Returns the admin APIs of the routers that there are now."""


class Routers:
    """Owns what the routers have reported: their counts of the last minutes, and the last list of workers.

    num_restarts: of the autoscaler, which the routers publish.
    """

    def __init__(self, admins: Admins, num_restarts: int = 0) -> None:
        self._admins = admins
        self._num_restarts = num_restarts
        self._history = CountHistory()
        self._answering: frozenset[str] = frozenset()
        self.workers: dict[str, Facts] = {}
        """Facts by worker id; those of before while no router answers."""

    async def read(self, now: float) -> bool:
        """Read all routers; an error of one is logged. Returns False if none answers. now: never decreases."""
        read = [one for one in await asyncio.gather(*map(_read, await self._admins())) if one is not None]
        if read:
            self.workers = dict(merged(workers for _, workers, _ in read))
        self._history.add(now, {address: counts for address, _, counts in read})
        self._answering = frozenset(address for address, _, _ in read)
        return bool(read)

    def load(self) -> LoadSignals | None:
        """Return the load; None before the second reading, and if no router has answered the last one."""
        return self._history.load(figures(self.workers))

    async def order(self, worker: str, verb: str, **query: str) -> None:
        """Send an order through the first router that answers. Raises the last error if none does.

        A router that has not answered the last reading is tried last: a frozen one answers after a long wait.
        """
        routers = await self._admins()
        routers = sorted(routers, key=lambda router: router.address not in self._answering)
        self.workers[worker] = await order_first(routers, worker, verb, **query)

    async def report(self, report: ScalingReport) -> None:
        """Send a decision to all routers that have answered. Another one publishes how old its last decision is."""
        report = structs.replace(report, num_restarts=self._num_restarts)
        answering = [router for router in await self._admins() if router.address in self._answering]
        sent = (router.report_scaling(report) for router in answering)
        for error in await asyncio.gather(*sent, return_exceptions=True):
            if isinstance(error, KvbatonError):
                logger.debug("a router does not publish the decision: %s", error.message)
            elif error is not None:
                raise error

    def state_of(self, worker: str) -> Any:
        """Return the state of a worker; None if it is not attached."""
        return self.workers[worker]["state"] if worker in self.workers else None


async def _read(router: RouterAdmin) -> _Reading | None:
    """Read one router; log an error, also a number out of its range, and return None then."""
    try:
        workers = (await router.pool())["workers"]
        check_facts(workers)
        return router.address, workers, parse_counts(await router.metrics())
    except (KvbatonError, ValueError) as error:
        logger.warning("router %s is not read: %s", router.address, error)
        return None
