"""The lease by which one autoscaler at a time scales a service.

Every router keeps one lease. An autoscaler renews it at all routers before each decision. It asks them one after the other,
in the order of their addresses, and stops at the first that refuses: of two that begin together the first router chooses
one. A router that does not answer is left out, and one that was started again grants a new lease. So two autoscalers that
reach different routers, and not those of the other one, do not see each other.
"""

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence

from autoscaler.routers import Admins
from contract.errors import KvbatonError
from contract.scaling import ScalingLease
from launch.router_admin import RouterAdmin

logger = logging.getLogger(__name__)


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
        asked = self._clock()
        granting: list[RouterAdmin] = []
        for router in sorted(await self._routers(), key=lambda router: router.address):
            try:
                granted = await router.lease_scaling(self._wanted)
            except KvbatonError as error:
                logger.debug("router %s grants no lease: %s", router.address, error.message)
                continue
            if granted.holder != self._wanted.holder:
                self._note_refusal(router, granted)
                await self._release(granting)
                return False
            granting.append(router)
        if self.other is not None:
            logger.info("the lease of %s is over: this autoscaler scales the service now", self.other)
            self.other = None
        if granting:
            self._until = asked + self._wanted.seconds
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

    def _note_refusal(self, router: RouterAdmin, granted: ScalingLease) -> None:
        """Log who has the lease, once for each holder."""
        if granted.holder != self.other:
            logger.warning(
                "another autoscaler scales this service (%s; its lease at router %s ends in %.0f s unless it renews it): "
                "this one waits, and takes over when that has ended",
                granted.holder,
                router.address,
                granted.seconds,
            )
        self.other = granted.holder
