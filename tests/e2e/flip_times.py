"""The times of one change of a role, and why its first leg came no earlier."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from contract.identity import Role
from router.attached_worker import AttachedWorker
from router.request_path import RequestPath

_LOOK_SECONDS = 0.001
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass
class FlipTimes:
    """Seconds of one flip.

    taken: from the order until the router may bind legs by the new role. first_leg: from the order until the worker has
    accepted a leg of the new role. settled: from the order until the worker is settled. The time between ``taken`` and the
    call of the first leg has three parts. no_request: no request waited. other_full: requests waited, but no worker of the
    other role had room for one. unserved: a request waited, and both roles had room. accepting: the call of the first leg.
    """

    taken: float = 0.0
    first_leg: float = 0.0
    settled: float = 0.0
    no_request: float = 0.0
    other_full: float = 0.0
    unserved: float = 0.0
    accepting: float = 0.0


class FirstLegs:
    """Watches the calls to one worker. ``next`` returns when the next leg of a role was called and accepted."""

    def __init__(self, worker: AttachedWorker) -> None:
        self._role: Role | None = None
        self._accepted: asyncio.Future[tuple[float, float]] | None = None
        calls: Any = worker.calls
        calls.prefill = self._watched(calls.prefill, Role.PREFILL)
        calls.decode = self._watched(calls.decode, Role.DECODE)

    def next(self, role: Role) -> "asyncio.Future[tuple[float, float]]":
        """Return the times at which a leg of this role is called and accepted, for the first one from now on."""
        self._role = role
        self._accepted = asyncio.get_running_loop().create_future()
        return self._accepted

    def _watched(self, call: Callable[[Any], Any], role: Role) -> Callable[[Any], Any]:
        async def watched(request: Any) -> None:
            called = time.monotonic()
            waiting = self._accepted if role is self._role else None
            await call(request)
            if waiting and not waiting.done():
                waiting.set_result((called, time.monotonic()))

        return watched


async def watch_first_leg(
    path: RequestPath, other: Role, times: FlipTimes, served: "asyncio.Future[tuple[float, float]]"
) -> None:
    """Wait for the first leg, and sort the time until it was called by what it waited for. other: role of the other leg."""
    spans: list[tuple[float, str]] = [(time.monotonic(), _reason(path, other))]
    while not served.done():
        await asyncio.sleep(_LOOK_SECONDS)
        spans.append((time.monotonic(), _reason(path, other)))
    called, accepted = served.result()
    for (begin, reason), (end, _) in pairwise(spans):
        if begin < called:
            setattr(times, reason, getattr(times, reason) + min(end, called) - begin)
    times.accepting = accepted - called


def _reason(path: RequestPath, other: Role) -> str:
    """Return the name of the field that counts the present moment."""
    if not len(path.queue):
        return "no_request"
    views = (ranked.view for ranked in path.registry.views.ranked(other))
    return "unserved" if any(view.num_requests < view.max_requests for view in views) else "other_full"


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Return quantiles in milliseconds."""
    in_order = sorted(seconds)
    return {
        name: round(1000 * in_order[min(len(in_order) - 1, int(share * len(in_order)))], 1)
        for name, share in _SHARES.items()
    }
