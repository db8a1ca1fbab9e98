"""Keeps a controller deciding: one autoscaler at a time, and after an error another controller begins.

Every router keeps one lease. An autoscaler renews it at all routers before each decision. It asks them one after the other,
in the order of their addresses, and stops at the first that refuses: of two that begin together the first router chooses
one. A router that does not answer is left out, and one that was started again grants a new lease. So two autoscalers that
reach different routers, and not those of the other one, do not see each other.

Both programs, ``service.py`` and ``scaled_cluster.py``, make an ``Autoscaler`` of the policy of their settings, a timing
model, a launcher and their routers.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from autoscaler.controller import Controller
from autoscaler.decision import Decision
from autoscaler.launchers.launcher import Launcher
from autoscaler.policy import Damping, Goals, PoolBounds, ScalingPolicy
from autoscaler.routers import Admins
from autoscaler.timing_model import TimingModel
from contract.errors import KvbatonError
from contract.identity import Role
from contract.scaling import ScalingLease
from launch.devices import RankCounts
from launch.kept_process import RestartPolicy
from launch.machine_settings import ScalingSettings
from launch.router_admin import RouterAdmin

logger = logging.getLogger(__name__)

_LEASE_SECONDS = 30.0
_LEASE_INTERVALS = 4.0


def configured_policy(
    settings: ScalingSettings, least: Mapping[Role, int], ranks: Mapping[Role, RankCounts]
) -> ScalingPolicy:
    """Return the policy of these settings. least: workers of each pool. ranks: those of each of its workers.

    Raises SettingError if the settings contradict each other.
    """
    most = {Role.PREFILL: settings.max_prefill, Role.DECODE: settings.max_decode}
    bounds = {
        role: PoolBounds(
            least=least[role],
            most=most[role] or least[role],
            devices=ranks[role].num_devices,
            data_parallel_size=ranks[role].data,
        )
        for role in (Role.PREFILL, Role.DECODE)
    }
    return ScalingPolicy(
        prefill=bounds[Role.PREFILL],
        decode=bounds[Role.DECODE],
        goals=Goals(ttft=settings.ttft_goal_ms / 1e3, itl=settings.itl_goal_ms / 1e3),
        budget=settings.budget,
        damping=Damping(stabilization=settings.shrink_after_seconds),
    )


def lease_seconds(interval: float) -> float:
    """Return for how long a lease is asked, by an autoscaler that renews it every ``interval`` seconds."""
    return max(_LEASE_SECONDS, _LEASE_INTERVALS * interval)


def new_holder(program: str) -> str:
    """Return a name for an autoscaler of this process that no other one has, and that people can find it by."""
    return f"{program}, pid {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(3)}"


class Lease:
    """Holds the lease for the autoscaler ``holder``. seconds: for which it is granted. clock: seconds, monotonic."""

    def __init__(
        self, holder: str, routers: Admins, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._wanted = ScalingLease(holder=holder, seconds=seconds)
        self._routers = routers
        self._clock = clock
        self._until = float("-inf")
        self.other: str | None = None
        """The autoscaler that has the lease instead, when this one was refused the last time."""

    @property
    def is_valid(self) -> bool:
        """True if no other autoscaler can have the lease now."""
        return self._clock() < self._until

    async def renew(self) -> bool:
        """Ask all routers for the lease. Returns False if one refuses; True without an answer, which is no refusal."""
        begin = self._clock()
        granting: list[RouterAdmin] = []
        for router in sorted(await self._routers(), key=lambda router: router.address):
            try:
                granted = await router.lease_scaling(self._wanted)
            except KvbatonError as error:
                logger.debug("router %s grants no lease: %s", router.address, error.message)
                continue
            if granted.holder != self._wanted.holder:
                if granted.holder != self.other:  # once for each holder: this is asked every few seconds
                    logger.warning(
                        "another autoscaler scales this service (%s; its lease at router %s ends in %.0f s unless it renews "
                        "it): this one waits, and takes over when that has ended",
                        granted.holder,
                        router.address,
                        granted.seconds,
                    )
                self.other = granted.holder
                await self._release(granting)  # else no autoscaler had all routers until they end
                return False
            granting.append(router)
        if self.other is not None:
            logger.info("the lease of %s is over: this autoscaler scales the service now", self.other)
            self.other = None
        if granting:  # from the first request on: the routers' clocks began later than this one
            self._until = begin + self._wanted.seconds
        return True

    async def release(self) -> None:
        """Give the lease back, so that another autoscaler need not wait for its end."""
        if self.is_valid:
            await self._release(await self._routers())

    async def _release(self, routers: Sequence[RouterAdmin]) -> None:
        self._until = float("-inf")
        for router in routers:
            try:
                await router.lease_scaling(ScalingLease(holder=self._wanted.holder, seconds=0.0))
            except KvbatonError as error:
                logger.debug("router %s keeps the lease until it ends: %s", router.address, error.message)


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
            deciding = asyncio.create_task(self._decide(interval), name="autoscaler")
            try:
                # This raises no error of the controller: whatever it is, it is logged below, and another controller begins.
                await asyncio.wait({deciding})
            finally:
                deciding.cancel()
                await asyncio.wait({deciding})
            error = deciding.exception()
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
