"""Keeps a controller deciding: one autoscaler at a time, and after an error another controller begins."""

import asyncio
import logging
import time

from autoscaler.controller import Controller
from autoscaler.decision import Decision
from autoscaler.launcher import Launcher
from autoscaler.lease import Lease
from autoscaler.policy import ScalingPolicy
from autoscaler.routers import Admins
from autoscaler.timing_model import TimingModel
from launch.kept_process import RestartPolicy

logger = logging.getLogger(__name__)

_LEASE_SECONDS = 30.0
_LEASE_INTERVALS = 4.0


def lease_seconds(interval: float) -> float:
    """Return for how long a lease is asked, by an autoscaler that renews it every ``interval`` seconds."""
    return max(_LEASE_SECONDS, _LEASE_INTERVALS * interval)


class Autoscaler:
    """Owns the controller that decides now. lease: held while it decides, so that it orders only while that is valid.

    policy, timing, launcher, routers, start_seconds: of every controller. restarts: the pauses between a controller's error
    and the next one's start, which double while the errors go on.
    """

    def __init__(
        self,
        policy: ScalingPolicy,
        timing: TimingModel,
        launcher: Launcher,
        routers: Admins,
        lease: Lease,
        *,
        restarts: RestartPolicy | None = None,
        start_seconds: float | None = None,
    ) -> None:
        def make(num_restarts: int) -> Controller:
            return Controller(
                policy,
                timing,
                launcher,
                routers,
                may_order=lambda: lease.is_valid,
                num_restarts=num_restarts,
                start_seconds=start_seconds,
            )

        self._make = make
        self._restarts = restarts or RestartPolicy()
        self._controller = make(0)
        self.lease = lease
        self.num_restarts = 0

    @property
    def last(self) -> Decision | None:
        """The last decision of the controller; None before its first one."""
        return self._controller.last

    async def run(self, interval: float) -> None:
        """Decide every ``interval`` seconds, until cancelled. An error of a controller is logged and counted."""
        num_failures = 0
        while True:
            began = time.monotonic()
            error = await self._failed(interval)
            calm = time.monotonic() - began >= self._restarts.calm_seconds
            num_failures = 1 if calm else num_failures + 1
            self.num_restarts += 1
            pause = self._restarts.delay(num_failures)
            logger.error(
                "the autoscaler has failed; the pools stay as they are, and it begins again in %.1f s (restart %d)",
                pause,
                self.num_restarts,
                exc_info=error,
            )
            await asyncio.sleep(pause)
            self._controller = self._make(self.num_restarts)

    async def _failed(self, interval: float) -> BaseException | None:
        """Let the controller decide until it fails, and return its error."""
        deciding = asyncio.create_task(self._decide(interval), name="autoscaler")
        try:
            await asyncio.wait({deciding})
        finally:
            deciding.cancel()
            await asyncio.wait({deciding})
        return deciding.exception()

    async def _decide(self, interval: float) -> None:
        has_begun = False
        while True:
            if not await self.lease.renew():
                has_begun = False  # what changes meanwhile is the work of another autoscaler
            elif has_begun:
                await self._controller.decide_once()
            else:
                has_begun = await self._controller.begin()
            await asyncio.sleep(interval)
