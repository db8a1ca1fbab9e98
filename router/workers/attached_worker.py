"""One worker that is attached to this router: the legs that are bound to it, and its latency on the router's clock."""

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

from contract.errors import KvbatonError, WorkerLostError
from contract.identity import Role
from contract.membership import Credit, DrainOrder, Load, Registration, RoleOrder
from protos import worker_pb2 as pb
from router.routing.running_shares import Held
from router.routing.views import UNLIMITED, WorkerView
from router.tokens.inbox import Event
from router.workers.capacity import WorkerCapacity
from router.workers.order_stream import OrderStream
from router.workers.worker_calls import WorkerCalls
from wire.messages import from_proto, to_proto

LegKey = tuple[str, int, int]
"""(request id, attempt, choice)"""


class LegRoutes:
    """Owns the receivers of the legs that are bound to one worker. num_stale_entries: entries that no leg was to receive."""

    def __init__(self) -> None:
        self.num_stale_entries = 0
        self._receivers: dict[LegKey, Callable[[Event], None]] = {}

    def bind(self, key: LegKey, receive: Callable[[Event], None]) -> None:
        """Pass the entries of a leg to ``receive``, and a WorkerLostError if the worker is lost."""
        self._receivers[key] = receive

    def unbind(self, key: LegKey) -> None:
        """Drop whatever else the worker sends for a leg. Does nothing the second time."""
        self._receivers.pop(key, None)

    def deliver(self, entries: Iterable[pb.TokenEntry]) -> None:
        """Pass entries to their legs. Those of older attempts and unknown requests are dropped."""
        for entry in entries:
            if receive := self._receivers.get((entry.request_id, entry.attempt, entry.choice)):
                receive(entry)
            else:
                self.num_stale_entries += 1

    def fail(self, new_error: Callable[[], KvbatonError]) -> None:
        """Pass an error of its own to every leg."""
        # a copy, since a leg that fails may unbind itself and others
        for receive in list(self._receivers.values()):
            receive(new_error())


_FADE_SECONDS = 10.0
"""Time after which a sample counts 1/e of a new one."""
_STALE_SECONDS = 60.0


class MovingMean:
    """The weighted mean of samples whose weights fade with time. clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sum = 0.0
        self._weight = 0.0
        self._last = -math.inf

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a sample."""
        now = self._clock()
        # the weights fade with time, and not with samples: a busy worker does not forget faster
        kept = math.exp((self._last - now) / _FADE_SECONDS)
        self._sum = self._sum * kept + value * weight
        self._weight = self._weight * kept + weight
        self._last = now

    @property
    def value(self) -> float | None:
        """The mean; None if there was no sample in the last minute."""
        is_stale = self._clock() - self._last > _STALE_SECONDS
        return None if is_stale else self._sum / self._weight


class WorkerLatency:
    """Measures one worker on the router's clock. clock: seconds, monotonic.

    first_token: from the arrival of requests to their first token, which this worker computed. token_gap: between two
    tokens of an answer. num_steps: steps that have arrived.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.first_token = MovingMean(clock)
        self.token_gap = MovingMean(clock)
        self.num_steps = 0
        self._last_step = clock()

    def note_step(self, num_entries: int, num_running_before: int) -> None:
        """Record that a step with this many entries has arrived.

        num_running_before: requests that were running after the step before. If there was none, the time since then is
        no client's wait.
        """
        self.num_steps += 1
        now = self._clock()
        if num_entries and num_running_before:
            self.token_gap.add(now - self._last_step, num_entries)
        self._last_step = now


_ROLES = {role.value: role for role in Role}


class AttachedWorker:
    """One incarnation of a worker, from its registration until its stream closes.

    routes: which leg receives which entries of its stream. gone: set when the worker is detached; whatever it
    sends after that is dropped, even if it is still alive. session: names this incarnation's stream. is_leaving: one side
    has ended the stream on purpose. orders: what is sent to it. held: counts what clients hold of all workers that decode.
    on_change: called when its view has changed, with True if it may have room that it did not have.
    """

    def __init__(
        self,
        registration: Registration,
        calls: WorkerCalls,
        orders: OrderStream,
        held: Held,
        on_change: "Callable[[AttachedWorker, bool], None]",
    ) -> None:
        self.registration = registration
        self._started_at = time.monotonic() - registration.age_seconds
        self.calls = calls
        self.orders = orders
        self.session = secrets.token_hex(8)
        # shares are of the workers that decode: answers stay there, while prompts pass through
        is_counted = registration.role != Role.PREFILL
        self.capacity = WorkerCapacity(
            held if is_counted else None, partial(on_change, self), self.report_use
        )
        self.gone = asyncio.Event()
        self.is_leaving = False
        self.latency = WorkerLatency()
        self.routes = LegRoutes()

    @cached_property
    def name(self) -> str:
        """The worker id."""
        return self.registration.worker_id

    @cached_property
    def _pool_tokens(self) -> int:
        """The tokens that the worker's KV pool holds; block 0 is the null block."""
        registration = self.registration
        if not registration.num_blocks:
            return UNLIMITED
        layout = registration.kv_layout
        return (registration.num_blocks - 1) * (layout.block_size if layout else 0)

    @property
    def role(self) -> Role:
        """The role in which it has registered, or that it has taken since."""
        return _ROLES[self.registration.role]

    @property
    def has_credit(self) -> bool:
        """True if it takes requests at all, however many it and its other routers have now."""
        capacity = self.capacity
        return not self.is_leaving and (capacity.credit.max_requests > 0 or capacity.waits_for_credit)

    @property
    def is_empty(self) -> bool:
        """True if it drains, holds and lends nothing, and no leg of this router is on its way to it."""
        capacity = self.capacity
        return capacity.credit.is_empty and not capacity.num_requests and not capacity.former.num_legs

    @property
    def age_seconds(self) -> float:
        """The time since its process started."""
        return time.monotonic() - self._started_at

    def leave(self) -> None:
        """Record that one side ends the stream on purpose: it gets no more requests."""
        self.is_leaving = True
        # without credit no policy chooses it in the time until its stream ends
        self.capacity.grant(Credit())

    def deliver(self, step: pb.StepOutput) -> None:
        """Pass the entries of one step to their legs. Entries of older attempts and unknown requests are dropped."""
        self.latency.note_step(len(step.entries), self.capacity.load.num_running)
        # its requests have gone on elsewhere: a late token from here would reach the client a second time
        if self.gone.is_set():
            self.routes.num_stale_entries += len(step.entries)
        else:
            self.routes.deliver(step.entries)
        if step.HasField("load"):
            self.capacity.report_load(from_proto(Load, step.load))

    def lose(self, reason: str) -> None:
        """Detach the worker: every leg that is bound to it receives a WorkerLostError."""
        self.gone.set()
        self.routes.fail(lambda: WorkerLostError(f"worker {self.name} was lost with the request: {reason}"))

    def drain(self, order: DrainOrder) -> None:
        """Send the worker the request to drain. It answers with its credit."""
        self.orders.send(pb.RouterMessage(drain=to_proto(pb.Drain, order)))

    def flip(self, order: RoleOrder) -> None:
        """Send the worker the request to take another role. It reports the role when every router has answered."""
        self.capacity.ordered = order
        self.orders.send(pb.RouterMessage(role_change=to_proto(pb.RoleChange, order)))

    def report_use(self) -> None:
        """Send the worker what this router holds of its last credit, unless that has no number.

        It is the answer to every credit, and is sent once more when nothing is left of the worker's former state.
        """
        if self.capacity.credit.number:
            use = to_proto(pb.CreditUse, self.capacity.use())
            self.orders.send(pb.RouterMessage(credit_use=use))

    def undrain(self) -> None:
        """Send the worker the request to serve again."""
        self.orders.send(pb.RouterMessage(undrain=pb.Undrain()))

    def view(self) -> WorkerView:
        """Return the worker as a policy reads it."""
        capacity = self.capacity
        return WorkerView(
            worker_id=self.name,
            role=self.role,
            num_requests=capacity.num_requests,
            num_tokens=capacity.num_tokens,
            max_requests=0 if self.is_leaving else capacity.credit.max_requests,
            max_tokens=capacity.credit.max_tokens,
            waits_for_credit=capacity.waits_for_credit and not self.is_leaving,
            is_unsettled=capacity.credit.is_unsettled,
            num_running=capacity.load.num_running,
            num_waiting=capacity.load.num_waiting,
            kv_cache_usage=capacity.load.kv_cache_usage,
            max_length=self.registration.max_model_len,
            pool_tokens=self._pool_tokens,
        )

    def debug_state(self) -> dict[str, Any]:
        """Return plain data for ``/debug/state``."""
        reg = self.registration
        capacity = self.capacity
        return {
            "worker_id": reg.worker_id,
            "boot_id": reg.boot_id,
            "role": reg.role,
            "pid": reg.pid,
            "address": reg.address,
            "control_address": reg.control_address,
            "admin_address": reg.admin_address,
            "num_running": capacity.load.num_running,
            "num_waiting": capacity.load.num_waiting,
            "kv_cache_usage": capacity.load.kv_cache_usage,
            "max_requests": capacity.credit.max_requests,
            "max_tokens": capacity.credit.max_tokens,
            "is_draining": capacity.credit.is_draining,
            "is_empty": capacity.credit.is_empty,
            "num_legs": capacity.num_requests,
            "num_leg_tokens": capacity.num_tokens,
            "num_former_legs": capacity.former.num_legs,
            "is_unsettled": capacity.credit.is_unsettled,
            "num_stale_entries": self.routes.num_stale_entries,
        }
