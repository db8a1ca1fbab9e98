"""The times of one change of a role, and why its first leg came no earlier."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from contract.identity import Role
from protos import worker_pb2 as pb
from router.request_path import RequestPath
from router.workers.attached_worker import AttachedWorker

_LOOK_SECONDS = 0.001
_SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass
class FlipTimes:
    """Seconds of one flip.

    taken: from the order until the router may bind legs by the new role. first_leg: from the order until the worker has
    accepted a leg of the new role. settled: from the order until the worker is settled. The time between ``taken`` and the
    order of the first leg has three parts. no_request: no request waited. other_full: requests waited, but no worker of the
    other role had room for one. unserved: a request waited, and both roles had room. accepting: from the order of
    the first leg until the worker has reported that it is carried out.
    """

    taken: float = 0.0
    first_leg: float = 0.0
    settled: float = 0.0
    no_request: float = 0.0
    other_full: float = 0.0
    unserved: float = 0.0
    accepting: float = 0.0


class FirstLegs:
    """Watches the orders to one worker. ``next`` returns when the next leg of a role was ordered and accepted."""

    def __init__(self, worker: AttachedWorker) -> None:
        self._orders = worker.orders
        self._role: Role | None = None
        self._accepted: asyncio.Future[tuple[float, float]] | None = None
        self._ordered: tuple[float, Callable[[pb.Order], object]] | None = None
        self._start = worker.orders.start
        self._carried_out = worker.orders.on_carried_out
        worker.orders.start = self._watch_start  # type: ignore[method-assign, assignment]
        worker.orders.on_carried_out = self._watch_carried_out  # type: ignore[method-assign]

    def next(self, role: Role) -> "asyncio.Future[tuple[float, float]]":
        """Return the times at which a leg of this role is ordered and accepted, for the first one from now on."""
        self._role = role
        self._ordered = None
        self._accepted = asyncio.get_running_loop().create_future()
        return self._accepted

    def _watch_start(self, write: Callable[[pb.Order], object], *rest: Any) -> None:
        self._start(write, *rest)
        order = pb.Order()
        write(order)
        role = Role.PREFILL if order.HasField("prefill") else Role.DECODE
        if role is self._role and self._ordered is None:
            self._ordered = time.monotonic(), write

    def _watch_carried_out(self, num_orders: int) -> None:
        self._carried_out(num_orders)
        if self._accepted is None or self._accepted.done() or self._ordered is None:
            return
        ordered_at, write = self._ordered
        if not any(start.write is write for start in self._orders._awaited):
            self._accepted.set_result((ordered_at, time.monotonic()))


async def watch_first_leg(
    path: RequestPath, other: Role, times: FlipTimes, served: "asyncio.Future[tuple[float, float]]"
) -> None:
    """Wait for the first leg, and sort the time until it was ordered by what it waited for. other: role of the other leg."""
    spans: list[tuple[float, str]] = [(time.monotonic(), _reason(path, other))]
    while not served.done():
        await asyncio.sleep(_LOOK_SECONDS)
        spans.append((time.monotonic(), _reason(path, other)))
    ordered, accepted = served.result()
    for (begin, reason), (end, _) in pairwise(spans):
        if begin < ordered:
            setattr(times, reason, getattr(times, reason) + min(end, ordered) - begin)
    times.accepting = accepted - ordered


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
